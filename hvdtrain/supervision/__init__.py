"""What ranks and the process that supervises their job have in common."""
