"""Rewrites of the graph. A pass proposes and gives reasons; no pass measures."""
