"""Emits source code for nests: C++ with OpenMP for the CPU, Triton for a GPU."""
