"""Engines: libraries that move bytes, behind one communicator contract."""
