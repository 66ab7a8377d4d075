"""Norms: recognised, computed from moments, split in two kernels."""
