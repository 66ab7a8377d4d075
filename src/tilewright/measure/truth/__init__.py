"""Whether results are right: float64 beside eager, and how far a tensor may be from it."""
