"""What grows with the number of ranks: jobs of the core alone, which measure themselves."""
