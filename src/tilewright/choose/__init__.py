"""Offers of implementations, and the chooser that prices, races and decides."""
