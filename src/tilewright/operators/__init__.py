"""One row per ATen operator: its class, its body in the loop language, or the library call it stays."""
