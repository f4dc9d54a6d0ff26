"""The report: runs of `train`, read from their files, as one HTML page that needs no network."""
