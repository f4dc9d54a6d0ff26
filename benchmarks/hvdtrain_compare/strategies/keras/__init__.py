"""The strategies for Keras: one file for each."""
