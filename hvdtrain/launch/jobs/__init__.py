"""Scripts for the schedulers of clusters."""
