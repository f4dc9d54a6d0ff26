"""The contenders, and their turns."""
