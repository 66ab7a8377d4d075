"""How long a call takes: clocks held since the start, events, cold caches, rounds until medians are known."""
