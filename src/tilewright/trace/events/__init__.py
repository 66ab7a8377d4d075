"""Converts the events of a file to rows of the schema: tracks, nesting, pairs, flows, counters."""
