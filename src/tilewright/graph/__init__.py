"""Queries on graphs with one vocabulary of calls: operands, views, writes, layouts, sizes, names of dimensions."""
