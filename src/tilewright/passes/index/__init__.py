"""Sums and gathers at indices."""
