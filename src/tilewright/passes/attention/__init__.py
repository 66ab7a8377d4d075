"""Attention in a graph: recognised however it is written, fused, and computed by the fastest kernel.

Before autograd, `recognise` fuses attention written as products and a softmax (`spelling`, `match`, `form`, `own`);
`flex` and `sdpa` make calls of PyTorch's attention fusible (`acceptable`); all read masks by `mask_parts`
(`constants`). `shift` removes gradients that are zero. In the joint graph of ATen operators, `fused` reads a fused
attention once, with its mask, and calls another kernel of `library` in its place: `choose/attention.py` says which.
"""
