"""The horovod engine: the core of an installed Horovod."""
