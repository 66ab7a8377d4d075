"""Ways of computing one workload raced side by side, on fresh inputs and under watch, into the rows of a bench."""
