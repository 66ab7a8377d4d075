"""Every implementation of an operator, and the sizes that it is measured at: one file for each folder of `kernels/`."""
