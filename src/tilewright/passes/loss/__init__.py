"""Losses of classes: log-softmax from two numbers a row."""
