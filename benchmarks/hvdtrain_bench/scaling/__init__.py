"""Scaling on paper: links, steps and exchanges, and predictions from them."""
