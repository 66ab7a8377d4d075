"""Loop nests: a set of operators as plain data that cost counts and emitters print."""
