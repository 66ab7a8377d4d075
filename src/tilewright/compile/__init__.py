"""From a captured graph to its plan: passes, fusion, choice, schedule and sources, in this order, in one place.

`Planner` makes the `Plan`, `price_case` prices one without running it, the backend runs one. Importing this package
imports none of its modules: they need PyTorch.
"""
