"""Races: implementations of one workload timed interleaved on fresh inputs, checked, and written as bench rows."""
