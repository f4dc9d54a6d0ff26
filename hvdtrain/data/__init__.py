"""Data sets and exact sharding. Imports no framework."""
