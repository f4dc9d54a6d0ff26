"""Collective operations, which do not depend on global state."""
