"""What each recorded call must move and compute, and how far it was from its floor."""
