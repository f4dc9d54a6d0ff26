"""The shards of a torch model that servers hold, and the row of its parameters."""
