"""What a killed rank costs: jobs of which one process is killed, and the steps of an elastic job."""
