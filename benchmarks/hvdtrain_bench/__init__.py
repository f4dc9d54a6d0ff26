"""Benchmarks against peers: all of them interleaved in one run, every result checked."""
