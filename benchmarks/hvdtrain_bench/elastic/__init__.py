"""What killed ranks cost: jobs of which one process is killed, and steps of elastic jobs."""
