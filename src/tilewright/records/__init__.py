"""Plain data that every other room reads and writes; imports no torch. `cache` and `home` are its files on disk."""
