"""The world of a rank: its channels, and going on without ranks that have ended."""
