"""The rules, a few closely related ones in each file."""
