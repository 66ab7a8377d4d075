"""What a call did, as plain data: whose memory each address is, and what is drawn."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilewright.kernels import repeat
from tilewright.kernels.launches import Launch, drawn, note
from tilewright.kernels.repeat import NUMBER, OFFSET, SEED, Chain, watched


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeat, "driver_of", lambda device: (1, 2, 3, 4, 5))


def send(letters: str, *values: float) -> None:
    note(Launch(7, (1, 2, 3), 32, 64, letters, values))


def chain_of(run: Callable[..., Any], *arguments: Any) -> Chain | None:
    return watched(run, arguments)[1]


def test_whose_memory_an_address_is() -> None:
    def run(x: torch.Tensor, y: torch.Tensor, by: float) -> tuple[torch.Tensor, torch.Tensor]:
        scratch = torch.empty(10, dtype=torch.float64)
        first, second = torch.empty_like(y), x.new_empty(2, 3)
        send("PPfi", x.data_ptr(), scratch[4:].data_ptr(), by, -1)
        send("PPPq", y.data_ptr(), second.data_ptr(), 0, 9)
        return second.view(3, 2), first

    x, y = torch.randn(4), torch.randn(2, 5).t()
    made = chain_of(run, x, y, 0.5)
    assert made is not None
    assert [each[:3] for each in made.made] == [
        ((3, 2), (2, 1), torch.float32), (tuple(y.shape), y.stride(), torch.float32), ((10,), (1,), torch.float64),
    ]  # fmt: skip
    assert (made.single, made.results, made.advance, made.driver) == (False, 2, 0, (1, 2, 3, 4, 5))
    half, minus = struct.unpack("<I", struct.pack("<f", 0.5))[0], 2**32 - 1
    assert [sent[4] for sent in made.launches] == [
        ((0, 0), (4, 32), (NUMBER, half), (NUMBER, minus)),
        ((1, 0), (2, 0), (NUMBER, 0), (NUMBER, 9)),
    ]
    assert made.launches[0][:4] == (7, (1, 2, 3), 32, 64)


def test_seed_and_offset_as_they_were_taken() -> None:
    def run(x: torch.Tensor, shift: int) -> torch.Tensor:
        y = torch.empty_like(x)
        seed, offset = drawn(3, 8, 4)
        send("Pqqq", y.data_ptr(), seed, offset + shift if shift else offset, 8)
        return y

    made = chain_of(run, torch.randn(4), 0)
    assert made is not None and made.advance == 4
    assert made.launches[0][4] == ((1, 0), (SEED, 0), (OFFSET, 0), (NUMBER, 8))
    assert chain_of(run, torch.randn(4), 1) is None
    assert drawn(3, 8, 4) == (3, 8) and type(drawn(3, 8, 4)[0]) is int


def returned_argument(x: torch.Tensor) -> torch.Tensor:
    return x


def part(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(8)[:4].view(4)


def twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.empty(4)
    return y, y.view(2, 2)


def stranger(x: torch.Tensor) -> torch.Tensor:
    send("P", x.data_ptr() + 4)
    return torch.empty(4)


def computed(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def unheard(x: torch.Tensor) -> torch.Tensor:
    note(None)
    return torch.empty(4)


@pytest.mark.parametrize("run", [returned_argument, part, twice, stranger, computed, unheard])
def test_what_cannot_be_repeated(run: Callable[[torch.Tensor], Any]) -> None:
    assert chain_of(run, torch.randn(4)) is None
