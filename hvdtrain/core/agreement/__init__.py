"""How the members of a channel agree on what they run next, and how a channel ends."""
