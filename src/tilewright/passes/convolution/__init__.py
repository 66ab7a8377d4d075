"""Convolutions: layouts of their tensors, products in their place, biases and gradients."""
