"""tilewright: how far each operator of a PyTorch model is from its hardware limit, why, and the kernel that closes the gap."""

__version__ = "0.1.0"
