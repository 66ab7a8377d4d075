"""Rewrites of the graph, one a file. A pass proposes and gives reasons; none measures."""
