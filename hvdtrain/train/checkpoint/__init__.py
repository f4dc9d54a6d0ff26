"""Checkpoints: what a run has to keep to go on, in files that are whole or not there at all."""
