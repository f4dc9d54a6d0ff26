"""The report: the files of `train` runs as one HTML page that needs no network."""
