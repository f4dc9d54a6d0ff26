"""One model of hosts and their slots, and how each launcher and scheduler writes it down."""
