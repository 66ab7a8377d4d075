"""The rule behind a grid, found from sizes and constants alone."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilewright.anatomy.capture import TritonLaunch
from tilewright.anatomy.tiles import grid_rule, rule_text

MATRICES = {"a": (1024, 512), "b": (512, 1024), "c": (1024, 1024)}


def captured(
    shapes: Mapping[str, tuple[int, ...]], grid: tuple[int, int, int], numbers: Mapping[str, int], **tiles: Any
) -> TritonLaunch:
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    arguments = {**tensors, **numbers, **tiles}
    params = [SimpleNamespace(name=name, is_constexpr=name in tiles) for name in arguments]
    return TritonLaunch(SimpleNamespace(params=params), arguments, {}, grid, None, None)


@pytest.mark.parametrize(
    ("shapes", "grid", "numbers", "tiles", "rule"),
    [
        ({"x": (1000, 512)}, (63, 1, 1), {}, {"ROWS": 16, "COLUMNS": 64}, "⌈1,000 / ROWS 16⌉"),
        ({"x": (100, 5000)}, (100, 1, 1), {}, {"LOG": True, "ROWS": 1, "COLUMNS": 8192}, "⌈100 / ROWS 1⌉"),
        ({"x": (64, 4096)}, (128, 1, 1), {}, {"BLOCK": 2048}, "⌈262,144 / BLOCK 2048⌉"),
        # All in one axis, and an accident of the inner size that fits as well: the result's axes are taken.
        (
            MATRICES,
            (32, 1, 1),
            {},
            {"ROWS": 128, "COLUMNS": 256, "DEPTH": 64},
            "⌈1,024 / ROWS 128⌉ · ⌈1,024 / COLUMNS 256⌉",
        ),
        (MATRICES, (8, 8, 1), {}, {"M": 128, "N": 128, "K": 64}, "⌈1,024 / M 128⌉, ⌈1,024 / N 128⌉"),
        ({"q": (8, 12, 500, 64)}, (96, 4, 1), {}, {"BLOCK": 128}, "8 · 12, ⌈500 / BLOCK 128⌉"),
        ({"x": (7,)}, (6, 1, 1), {"n": 333}, {"BLOCK": 64}, "⌈333 / BLOCK 64⌉"),
        ({"x": (7,)}, (1, 1, 1), {}, {}, ""),
    ],
)
def test_a_rule_is_found(
    shapes: dict[str, tuple[int, ...]],
    grid: tuple[int, int, int],
    numbers: dict[str, int],
    tiles: dict[str, Any],
    rule: str,
) -> None:
    found = grid_rule(captured(shapes, grid, numbers, **tiles))
    assert found is not None and rule_text(found) == rule


def test_no_rule_is_none() -> None:
    assert grid_rule(captured({"x": (1000, 512)}, (17, 1, 1), {}, ROWS=16)) is None
    assert rule_text(None) == ""
