"""Attribution of kernels, and the classes of each step's time."""
