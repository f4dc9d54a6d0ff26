"""A directory for Python's path that contains nothing but the package `horovod`."""
