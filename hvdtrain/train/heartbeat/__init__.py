"""What ranks tell each other and record while they train."""
