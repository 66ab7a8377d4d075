"""Attention in a graph: recognised however it is spelled, fused, and given to the kernel that is fastest.

Before autograd `recognise` rewrites what a user wrote out (`spelling`, `writes`, `match`, `mask`, `form`, `own`),
`unread_weights` and `sdpa` read the masks of calls and leave none to products and a softmax (`constants`, `places`,
`visible`, `acceptable`), and `shift` settles gradients that are zero. `kernel` chooses among fused kernels in the graph
of ATen operators (`fused`, `pinned`).
"""
