"""Plain data that every other room reads and writes: no torch, no side effects."""
