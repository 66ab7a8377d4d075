"""Chooses between alternatives by prediction or, if predictions are close, by measurement."""
