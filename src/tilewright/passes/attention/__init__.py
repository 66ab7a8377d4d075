"""Attention in a graph: recognised however it is written, fused, and computed by the fastest kernel.

Before autograd, `recognise` fuses attention written as products and a softmax (`spelling`, `writes`, `match`, `mask`,
`form`, `own`); `unread_weights`, `flex` and `sdpa` read the masks of calls and make the calls fusible (`constants`,
`iota`, `mask_parts`, `acceptable`); `shift` removes gradients that are zero. In the joint graph of ATen operators,
`fused` reads a fused attention once, with its mask, and calls another kernel of `library` in its place:
`choose/attention.py` says which.
"""
