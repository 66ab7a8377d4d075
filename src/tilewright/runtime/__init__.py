"""Executables: compiled kernels, buffers, launches, random draws."""
