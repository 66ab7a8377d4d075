"""What the command line does, as functions: `explain`, `optimize`, `bench`."""

from tilewright.verbs.bench import BENCH_IMPLS, bench_case, measure
from tilewright.verbs.explanation import Explanation, ceilings_of, explain, explain_case, tree_of_case
from tilewright.verbs.optimisation import Optimized, optimize, optimize_case, with_times
from tilewright.verbs.subject import Subject, tensors_in

__all__ = [
    "BENCH_IMPLS", "Explanation", "Optimized", "Subject", "bench_case", "ceilings_of", "explain", "explain_case",
    "measure", "optimize", "optimize_case", "tensors_in", "tree_of_case", "with_times",
]  # fmt: skip
