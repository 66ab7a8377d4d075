"""Random numbers: PyTorch's generators drawn in the kernels that need them."""
