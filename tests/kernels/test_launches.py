"""Launches as plain data: those of Triton lose their constants, and what is no plain launch is said to be none."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilewright.kernels.launches import Launch, heard, launch, listened, note, word

SIGNATURE = {"x": "*fp32", "n": "i64", "one": "constexpr", "p": "fp32", "none": "constexpr", "BLOCK": "constexpr"}


class Kernel:
    """As far as `launch` looks at one of Triton's."""

    arg_names = tuple(SIGNATURE)

    def __init__(self, **metadata: int) -> None:
        names = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
        known = dict.fromkeys(names, 0) | {"num_ctas": 1, "num_warps": 4, "shared": 512} | metadata
        source = SimpleNamespace(signature=SIGNATURE)
        self.compiled: Any = SimpleNamespace(function=7, src=source, metadata=SimpleNamespace(**known))
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            self.calls.append((grid, arguments, options))
            return self.compiled

        return run


def launched(kernel: Kernel) -> tuple[torch.Tensor, list[Launch | None]]:
    x = torch.zeros(3)
    with heard() as launches:
        launch(kernel, (5, 2), x, 3, 1, 0.5, None, BLOCK=16, num_warps=4)
    assert len(kernel.calls) == 1 and kernel.calls[0][0] == (5, 2)
    return x, launches.launches


def test_a_launch_of_triton() -> None:
    x, launches = launched(Kernel())
    # The last two are areas of Triton's own.
    assert launches == [Launch(7, (5, 2, 1), 128, 512, "PqfPP", (x.data_ptr(), 3, 0.5, 0, 0))]


@pytest.mark.parametrize("more", [{"num_ctas": 2}, {"global_scratch_size": 8}, {"launch_pdl": 1}], ids=str)
def test_what_takes_more_than_parameters(more: dict[str, int]) -> None:
    assert launched(Kernel(**more))[1] == [None]


def test_of_the_interpreter_nothing_is_known() -> None:
    kernel = Kernel()
    kernel.compiled = None
    assert launched(kernel)[1] == [None]


def test_who_listens_hears_its_own() -> None:
    one = Launch(1, (1, 1, 1), 32, 0, "", ())
    note(one)
    assert not listened()
    with heard() as outer:
        note(one)
        with heard() as inner:
            note(None)
        assert listened()
        note(one)
    assert (outer.launches, inner.launches) == ([one, one], [None])
    assert not listened()


@pytest.mark.parametrize(("letter", "value"), [("P", 2**40), ("q", -3), ("i", -3), ("f", 0.1), ("I", 2**32 - 1)])
def test_a_word_is_what_the_driver_reads(letter: str, value: float) -> None:
    data = word(letter, value).to_bytes(8, "little")
    assert struct.unpack_from(f"@{letter}", data)[0] == pytest.approx(value)
