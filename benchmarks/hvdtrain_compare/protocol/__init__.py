"""What the command and the ranks of a contender tell each other."""
