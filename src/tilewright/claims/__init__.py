"""Claims that documents make about GPUs and PyTorch, each checked by computing or measuring it here."""
