"""The files of a run: metrics, environment and results."""
