"""Products of matrices: contracted, padded, of few rows, with their biases, added up in place."""
