"""The operations that ranks do together, one file each. They know no global state."""
