"""Nests to source: C++ with OpenMP for the CPU, Triton for a GPU."""
