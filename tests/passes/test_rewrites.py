"""Rewrites of single programs, one row of `rewrites.txt` each: which operators are left, and that the numbers stay."""

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from tests.passes.graphs import aten, calls, run
from tests.passes.test_sample_sums import image, of_norm
from tests.tables import rows, sections, value
from tilewright.hardware.target import Target, target_named
from tilewright.measure.truth.contract import compare
from tilewright.passes.loss import compute_where_read
from tilewright.passes.norm.split import split_norms, sum_samples_last
from tilewright.passes.products import FEW, add_biases_in_kernels, add_biases_in_products, contract, sum_few_terms
from tilewright.passes.simplify import drop_round_trips, drop_unread, simplify
from tilewright.passes.strided import split_strided_rows

TABLE = Path(__file__).with_name("rewrites.txt")
Rewrite = Callable[[fx.Graph, Target], Any]


def contract_in_tf32(graph: fx.Graph, target: Target) -> Any:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return contract(graph, target)
    finally:
        torch.set_float32_matmul_precision(before)


def drop_round_trips_and_unread(graph: fx.Graph, target: Target) -> None:
    drop_round_trips(graph)
    drop_unread(graph)


REWRITES: dict[str, Rewrite] = {
    **{"add_biases_in_kernels": add_biases_in_kernels, "add_biases_in_products": add_biases_in_products},
    **{"compute_where_read": compute_where_read, "contract": contract, "contract in TF32": contract_in_tf32},
    **{"drop_round_trips": drop_round_trips_and_unread, "simplify": simplify},
    **{"split_norms": split_norms, "split_strided_rows": split_strided_rows, "sum_few_terms": sum_few_terms},
    **{"sum_samples_last": sum_samples_last},
}
EXACT = ("simplify", "drop_round_trips")
"""Those whose results have eager's bits."""


def drawn(dtype: torch.dtype, more: int = 0) -> Callable[..., Tensor]:
    def draw(*shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(sum(shape) + more)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return draw


fp64, fp32, bf16 = map(drawn, (torch.float64, torch.float32, torch.bfloat16))
special = fp32(40, 600)
special[:, 0], special[3, 1], special[4, 2], special[5, 3] = -torch.inf, -torch.inf, torch.inf, torch.nan
NAMED = {
    **{"fp64": fp64, "fp32": fp32, "bf16": bf16, "fp16": drawn(torch.float16), "image": image, "of_norm": of_norm},
    **{"A": fp64(3, 37, 40), "B": fp64(3, 41, 40), "X": bf16(6, 7, 40), "W": bf16(24, 40), "BIAS": bf16(24)},
    **{"S": torch.linspace(-2, 2, 12).reshape(3, 4), "FEW": FEW, "SPECIAL": special},
    # Few long rows, their gradient, and two numbers for each channel.
    **{"L": 2 * fp32(2, 4, 200, 200) + 1, "G": 2 * drawn(torch.float32, 1)(2, 4, 200, 200) + 1},
    **{"P": fp32(4).sigmoid() + 0.5, "Q": drawn(torch.float32, 1)(4).sigmoid() + 0.5},
    **{"LOGITS": torch.empty(2048, 4096, dtype=torch.bfloat16), "picks": lambda x: torch.arange(len(x)) ** 2 % 1013},
}


def hold(said: str, found: list[str]) -> bool:
    """Whether calls are as a row says."""
    names = [call.removeprefix("tilewright.").split(".")[0] for call in found]
    if said.startswith("= "):
        return names == said.split()[1:]
    for word in said.split():
        name, times = re.fullmatch(r"[+-]?(.+?)(?:\*(\d+))?", word).groups()  # type: ignore[union-attr]
        count = sum(fnmatchcase(each, name) for each in names)
        if not (count == int(times) if times else bool(count) == (word[0] == "+")):
            return False
    return True


ROWS = {f"{section}: {row['name']}": (section, row) for section in sections(TABLE) for row in rows(TABLE, section)}


@pytest.mark.parametrize("name", ROWS)
def test_a_rewrite(name: str) -> None:
    section, row = ROWS[name]
    rewrite, device, *but = re.split(" on |, not on ", section)
    function, inputs = value(row["program"], NAMED), value(f"[{row['inputs']}]", NAMED)
    graph = aten(function, *inputs)
    before = str(graph)
    decisions = REWRITES[rewrite](graph, target_named(device)) or []
    if row["calls"] == "stays":
        assert str(graph) == before and decisions == []
        return
    assert {decision.verdict for decision in decisions} <= {"taken"} and hold(row["calls"], calls(graph))
    check_numbers(graph, function, inputs, exact=rewrite in EXACT)
    for other in but:
        there = aten(function, *inputs)
        REWRITES[rewrite](there, target_named(other))
        assert not hold(row["calls"], calls(there))


def check_numbers(graph: fx.Graph, function: Callable[..., Any], inputs: list[Tensor], *, exact: bool) -> None:
    """Results, their strides, and what is written to inputs are eager's, but for rounding unless `exact`."""
    mine, theirs = ([x.clone() for x in inputs] for _ in range(2))
    torch.manual_seed(0)
    found = tree_leaves(run(graph, *mine))
    torch.manual_seed(0)
    eager = tree_leaves(function(*theirs))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
    nodes = tree_leaves(graph.output_node().args[0])
    truth = eager if exact else tree_leaves(function(*(x.double() for x in inputs)))
    for node, ours, other, true in zip(nodes, found, eager, truth, strict=True):
        assert ours.dtype == other.dtype and ours.stride() == other.stride() == node.meta["val"].stride()
        if exact or other.dtype == torch.float64:
            within = 0 if exact else 1e-12
            torch.testing.assert_close(ours, other, rtol=within, atol=within, equal_nan=True)
        else:
            figures = compare(ours, other, true)
            assert figures.ok, figures
