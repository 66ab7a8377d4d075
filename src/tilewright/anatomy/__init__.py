"""Analyses kernels: captures their launches, disassembles them, and records the accesses of single programs."""
