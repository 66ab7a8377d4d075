"""Kernels built at run time, and the executor that runs recipes and compiled graphs."""
