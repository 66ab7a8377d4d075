"""What a run says, to a person: the terminal view and the self-contained page. Needs no torch."""
