"""One way to train for each framework, found by choose.py."""
