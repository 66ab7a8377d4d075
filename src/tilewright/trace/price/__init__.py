"""The bytes and operations of each recorded call, and its distance from the floor."""
