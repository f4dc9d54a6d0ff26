"""Checkpoints: what a run has to keep to continue, in files that are whole or not there at all."""
