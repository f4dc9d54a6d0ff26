"""The timeline: when each operation waited and when it moved, on all ranks, on one clock."""
