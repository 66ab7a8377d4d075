"""Timing of calls: protected clocks, CUDA events, cold caches, and rounds until the medians are precise."""
