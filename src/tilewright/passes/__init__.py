"""Rewrites of the graph, one per file. A pass proposes and gives reasons; no pass measures."""
