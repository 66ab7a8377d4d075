"""PyTorch's private modules, for all rooms but `graph`, whose capture is built on them."""
