"""Graphs of calls with one vocabulary: operands, constants, insertion, views, layouts, sizes, names of dimensions."""
