"""What a step would take if something were changed, and what it waits for: a simulation of a run's timeline."""
