"""The shards of a Keras model that servers hold, and the row of its variables."""
