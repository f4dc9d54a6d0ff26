"""The same recipe under several strategies of parallel training, side by side."""
