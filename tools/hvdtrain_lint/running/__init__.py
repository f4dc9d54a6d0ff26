"""Runs a script for some steps on two ranks, and compares what the ranks did."""
