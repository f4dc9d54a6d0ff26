"""Predicted step times of exchanges, from measurements, and the choice among them."""
