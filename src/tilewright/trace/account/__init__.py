"""Whose work a kernel was, and where the time of each step went."""
