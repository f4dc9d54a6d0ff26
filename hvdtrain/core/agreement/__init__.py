"""The agreement protocol: what the members of a channel run next, and how a channel ends."""
