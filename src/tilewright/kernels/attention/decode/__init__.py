"""Attention of a few queries against a long cache of keys, split over the keys."""
