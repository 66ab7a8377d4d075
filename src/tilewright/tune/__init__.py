"""Settles alternatives by prediction and, where that is close, by measurement."""
