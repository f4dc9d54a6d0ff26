"""Finds, in the text of a script, what goes wrong when several ranks run it."""
