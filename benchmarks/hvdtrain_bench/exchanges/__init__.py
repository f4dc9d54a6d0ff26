"""Exchanges compared with the average: step times, bytes sent, and losses."""
