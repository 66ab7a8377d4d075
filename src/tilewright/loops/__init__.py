"""Loop nests: a set of operators as plain data, which the cost model counts and the emitters print."""
