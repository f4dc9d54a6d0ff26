"""The world of a rank: its channels, and continuing without ranks that have ended."""
