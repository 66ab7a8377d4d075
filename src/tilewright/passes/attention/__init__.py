"""Attention in a graph: recognised in all its spellings, fused, and computed by the fastest kernel.

Before autograd `recognise` rewrites attention that the user spelled out (`spelling`, `writes`, `match`, `mask`, `form`,
`own`), `unread_weights`, `flex` and `sdpa` read the masks of calls and make all calls fusible (`constants`, `places`,
`visible`, `acceptable`), and `shift` removes gradients that are zero. `kernel` chooses among fused kernels in the graph
of ATen operators (`fused`, `pinned`).
"""
