"""Checks of an installation: what is installed, what works, and how to mend the rest."""
