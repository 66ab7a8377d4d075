"""PyTorch's private modules, for all rooms but `capture`, which is built on them."""
