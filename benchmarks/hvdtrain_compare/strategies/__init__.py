"""The strategies: one file for each."""
