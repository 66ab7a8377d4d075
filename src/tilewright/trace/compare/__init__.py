"""Compares runs: what changed, and whether noise explains it."""
