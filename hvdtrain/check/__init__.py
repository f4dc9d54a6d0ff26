"""Checks of an installation: what is installed, what works, and how to fix the rest."""
