"""Two runs compared: what changed, and whether it is real."""
