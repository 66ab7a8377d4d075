"""The suite `matmul`: what tiling through shared memory gives, and what a library adds. It has no operator."""
