"""Views of a run: the terminal and the self-contained page. Needs no torch."""
