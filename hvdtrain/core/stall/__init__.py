"""The stall watch: reports operations that wait too long, and the ranks that are missing."""
