"""Plain data that every other package reads and writes; imports no torch. `cache` and `home` are its files on disk."""
