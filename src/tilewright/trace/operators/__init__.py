"""The operator table: self and total time, and what it says in words."""
