"""Attention in Triton for every GPU that Triton knows, and for every call: masks, ALiBi, dropout, packing, fp32."""
