"""Programs with symbolic sizes that an earlier process compiled: neither traced nor planned again.

`torch._dynamo.reset` forgets what this process compiled, so that it is looked up on disk.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.backend.compiling import assert_same, compiled, twin, with_grad
from tilewright.graph import program_cache


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache that keeps programs."""
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TILEWRIGHT_KEEP_PROGRAMS", "1")
    program_cache.counts.clear()
    yield tmp_path / "cache"
    program_cache.counts.clear()


def again() -> None:
    """Forget what this process compiled."""
    torch._dynamo.reset()
    program_cache.counts.clear()


def run(function: Callable[..., Any], sizes: list[int], *others: Any, backward: bool = False) -> list[Any]:
    """Results and gradients of one compiled function for inputs [n, 12], and of eager."""
    compiled_function = compiled(function)
    found = []
    for n in sizes:
        torch.manual_seed(n)
        x = with_grad(n, 12) if backward else torch.randn(n, 12)
        mine, plain = [twin(v) for v in (x, *others)], [twin(v) for v in (x, *others)]
        torch._dynamo.mark_dynamic(mine[0], 0)
        results = compiled_function(*mine), function(*plain)
        for result in results if backward else ():
            sum((r * r).sum() for r in (result if isinstance(result, tuple) else (result,))).backward()
        assert_same(results[0], results[1])
        assert_same([x.grad for x in mine], [x.grad for x in plain])
        assert_same(mine, plain)
        found.append([results[0], [x.grad for x in mine]])
    return found


def mixes(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = F.gelu(x @ w).view(x.shape[0] * 2, 6)
    return F.layer_norm(h, (6,)) / x.shape[0] + torch.arange(x.shape[0] * 2)[:, None]


def shows(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    h = F.gelu(x @ w)
    return h, h.t(), h[1:], x.view(-1), x.t()


def writes(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x[1:] += F.gelu(x)[:-1]
    w.add_(x.sum())
    return x.t(), w * 2


@pytest.mark.parametrize("function", [mixes, shows])
def test_training_finds_the_program_and_the_plans_of_its_sizes(function: Callable[..., Any]) -> None:
    w = with_grad(12, 12)
    first = run(function, [5, 8], w, backward=True)
    assert program_cache.counts == {"compiled": 1, "kept": 1, "sizes planned": 4, "sizes kept": 4}
    again()
    second = run(function, [5, 8], w, backward=True)
    assert program_cache.counts == {"loaded": 1, "sizes loaded": 4}
    torch.testing.assert_close(second, first, rtol=0, atol=0)


@pytest.mark.parametrize("function", [mixes, shows, writes])
def test_inference_finds_the_program_and_plans_only_sizes_that_are_new(function: Callable[..., Any]) -> None:
    w = torch.randn(12, 12)
    run(function, [5, 8], w)
    assert program_cache.counts == {"compiled": 1, "kept": 1, "sizes planned": 2, "sizes kept": 2}
    again()
    run(function, [9, 5], w)  # traced for 5 at first
    assert program_cache.counts == {"loaded": 1, "sizes planned": 1, "sizes kept": 1, "sizes loaded": 1}


def test_a_program_of_two_symbols_is_found() -> None:
    def table(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.gelu(x)[:, None, :] * y[None, :, :]

    def call(rows: int, columns: int) -> None:
        x, y = torch.randn(rows, 12), torch.randn(columns, 12)
        for tensor in (x, y):
            torch._dynamo.mark_dynamic(tensor, 0)
        assert_same(compiled(table)(x, y), table(x, y))

    call(5, 8)
    for sizes in ((9, 4), (6, 6)):
        again()
        call(*sizes)
        assert program_cache.counts == {"loaded": 1, "sizes planned": 1, "sizes kept": 1}


def test_other_ranges_are_other_programs() -> None:
    any_size: dict[str, int] = {}
    some = {"min": 4, "max": 100}
    for bounds, expected in ((any_size, "compiled"), (some, "compiled"), (some, "loaded"), (any_size, "loaded")):
        again()
        x = torch.randn(7, 12)
        torch._dynamo.mark_dynamic(x, 0, **bounds)
        compiled(mixes)(x, torch.randn(12, 12))
        assert program_cache.counts[expected] == 1, (bounds, program_cache.counts)


def test_conditions_on_sizes_are_checked_before_each_call(folder: Path) -> None:
    w = torch.randn(12, 12)
    run(mixes, [5], w)
    (path,) = (p for p in folder.rglob(f"*{program_cache.SUFFIX}") if getattr(program_cache.load(p.stem), "entry", b""))
    program = program_cache.load(path.stem)
    assert program is not None
    program_cache.discard(path.stem)
    condition = "L['t0'] % 4 != 3"  # as if a rewrite had asked for it
    guards = f"{program.guards} and {condition}" if program.guards else condition
    program_cache.keep(path.stem, dataclasses.replace(program, guards=guards))
    again()
    run(mixes, [5, 6, 7], w)
    # 7 does not meet the condition: Dynamo asks for another program, and the kept one is not it.
    assert program_cache.counts["loaded"] == 1 and program_cache.counts["compiled"] == 1, program_cache.counts
