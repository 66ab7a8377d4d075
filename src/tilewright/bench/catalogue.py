"""The suites by name; each is imported when it is asked for, since kernels need Triton."""

from __future__ import annotations

import importlib

from tilewright.bench.peers import example_module
from tilewright.records.errors import UsageError
from tilewright.records.suite import Suite

_WHERE = {
    "softmax": "softmax",
    "log_softmax": "softmax",
    "cross_entropy": "cross_entropy",
    "layer_norm": "norm",
    "rms_norm": "norm",
    "add_layer_norm": "norm",
    "add_rms_norm": "norm",
    "gelu": "activation",
    "swiglu": "activation",
    "dropout_add": "dropout_add",
    "weighted_sum": "weighted_sum",
    "matmul": "kernels/matmul.py",
    "product": "product",
    "linear_gelu": "linear",
    "linear_gelu_tanh": "linear",
    "linear_dropout_add": "linear",
    "linear_cross_entropy": "linear_cross_entropy",
    "attention": "attention",
    "attention_decode": "attention",
}
SUITES = tuple(_WHERE)


def suite(name: str) -> Suite:
    """The suite of that name; UsageError lists the known ones."""
    if name not in _WHERE:
        raise UsageError(f"no operator named {name!r} in the bench; known: {', '.join(SUITES)}")
    where = _WHERE[name]
    is_example = where.endswith(".py")
    module = example_module(where) if is_example else importlib.import_module(f"tilewright.bench.suites.{where}")
    found: Suite = module.SUITES[name]
    return found
