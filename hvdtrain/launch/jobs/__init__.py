"""Job scripts for the schedulers of clusters."""
