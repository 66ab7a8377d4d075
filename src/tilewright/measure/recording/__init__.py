"""Some steps of a program under a profiler: what is marked in them, and when the recording ends."""
