"""Random modules keep the numbers contract: results, gradients, and what a call writes to buffers and arguments.

`TILEWRIGHT_FUZZ_MODULES` says how many (8 unless told). The modules are the same at every run.
"""

import os

import pytest
import torch

from tests.fuzz.batches import Alone, module_failure
from tests.fuzz.modules import Module, program
from tilewright.measure.truth.contract import compare

MODULES = int(os.environ.get("TILEWRIGHT_FUZZ_MODULES") or 8)
FIRST = 5000


def drawn(number: int) -> Module:
    with torch.random.fork_rng():
        torch.manual_seed(number)
        return program(number)


@pytest.mark.parametrize("number", range(FIRST, FIRST + MODULES))
def test_random_modules_keep_the_numbers_contract(number: int) -> None:
    module = drawn(number)
    alone = Alone(module, number)
    try:
        rows, record = alone.check()
    except Exception as error:
        raise AssertionError(module_failure(module, number)) from error
    assert alone.missed(rows) == [] and alone.left(record) == [], module_failure(module, number)


def test_a_module_is_the_same_each_time() -> None:
    """Its layers, its parameters, and what it computes."""
    module = drawn(FIRST)
    assert module == drawn(FIRST)
    first, second = Alone(module, FIRST), Alone(module, FIRST)
    torch.manual_seed(0)
    ours = first.built(*first.inputs)
    torch.manual_seed(0)
    theirs = second.built(*second.inputs)
    assert all(compare(a, b, b.detach()).max_error == 0 for a, b in zip(ours, theirs, strict=True))
