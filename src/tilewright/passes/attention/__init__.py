"""Attention in a graph: recognised however it is spelled, fused, and given to the kernel that is fastest.

`recognise` rewrites what a user wrote out (`spelling`, `match`, `mask`, `form`), `shift` settles gradients that are
zero; both before autograd. `kernel` chooses among fused kernels in the graph of ATen operators (`fused`, `pinned`).
"""
