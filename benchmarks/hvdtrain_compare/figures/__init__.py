"""What follows from measurements: counts, times, and how they are written. Pure."""
