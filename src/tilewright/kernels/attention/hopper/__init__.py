"""Attention by the instructions that Hopper alone has: bulk copies, products of warpgroups, clusters."""
