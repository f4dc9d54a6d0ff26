"""Hosts and their slots, and the formats in which launchers and schedulers write them."""
