"""What ranks do to their own process: output, exits, memory and threads."""
