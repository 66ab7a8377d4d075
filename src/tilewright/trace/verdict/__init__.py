"""The verdict on a run: what is slow, why, and what to do, with the line and the gain."""
