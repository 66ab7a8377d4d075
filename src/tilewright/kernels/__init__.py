"""Hand-written kernels, one folder an operator: the formula, its kernels, and all ways of computing it."""
