"""Schedules of loop nests: how a nest is divided among programs, loops and registers, and the one that is chosen."""
