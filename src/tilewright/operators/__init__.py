"""One row per operator: its class, its body in the loop language, or the library call or own kernel that it stays."""
