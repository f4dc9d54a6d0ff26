"""Building Horovod for the frameworks that are installed; nothing of it is patched."""
