"""The arguments of a race: fixed addresses, new values each round, and checks that implementations keep both."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright.measure.truth.proof import exact_in_any_dtype
from tilewright.records.suite import Workload

_SMALL_BLOCK = 2**20
_SMALL_BLOCKS = 16
_NAN_BYTE = 0xFF
"""Memory filled with this byte is NaN in every floating dtype."""


class Arguments:
    """A workload's arguments, with new values for each round.

    The tensors in `values` keep their addresses, so an implementation that caches results by address returns
    stale ones. Between calls the tensors hold NaN, so an implementation that reads them on a stream that does
    not wait for the inputs returns NaN. The seed comes from the system, so no run repeats another's values.
    """

    def __init__(self, workload: Workload, device: str) -> None:
        self._workload = workload
        self._device = torch.device(device)
        self._defaults = [torch.default_generator]
        if self._device.type == "cuda":
            self._defaults.append(torch.cuda.default_generators[self._device.index or 0])
        self._secret = secrets.randbits(40)
        self._round: int | None = None
        self._drawn: Sequence[Any] = ()
        self.values: list[Any] = list(self.drawn(-1))
        self._tangents: dict[int, torch.Tensor] = {}
        self._handed: dict[int, torch.Tensor] = {}
        self._ends: dict[int, tuple[torch.Size, torch.dtype]] = {}
        """Shape and dtype of each result, from the last request for its gradient."""

    @property
    def nbytes(self) -> int:
        """Sum over the tensors among the arguments."""
        return sum(value.nbytes for value in self.values if isinstance(value, torch.Tensor))

    def seed(self, number: int) -> int:
        """The seed of a round's inputs, incoming gradients and random draws."""
        return self._secret + 1000 * (number + 1)

    def drawn(self, number: int) -> Sequence[Any]:
        """The values of a round, as new tensors."""
        return self._workload.make(self._device, self._generator(self.seed(number)))

    def fill(self, number: int) -> None:
        """Write the values of a round into `values`, and seed the default generators for it."""
        # `torch.manual_seed` formats a stack trace, which takes longer than many kernels.
        for generator in self._defaults:
            generator.manual_seed(self.seed(number))
        if number != self._round:
            self._drawn, self._round, self._tangents = self.drawn(number), number, {}
        with torch.no_grad():
            for index, (value, fresh) in enumerate(zip(self.values, self._drawn, strict=True)):
                if isinstance(value, torch.Tensor):
                    value.copy_(fresh)
                else:
                    self.values[index] = fresh
            # A timed fwd+bwd call requests gradients inside the timed region, so they are made here.
            for index in self._ends:
                self._hand(index)

    def tangent(self, result: torch.Tensor, index: int) -> torch.Tensor:
        """The incoming gradient of the round for a result; every implementation gets the same values."""
        assert self._round is not None, "fill comes before the first gradient"
        end = result.shape, result.dtype
        if self._ends.get(index) != end or index not in self._handed:
            self._ends[index] = end
            self._hand(index)
        return self._handed[index]

    def tangent_of(self, number: int) -> Callable[[torch.Tensor, int], torch.Tensor]:
        """A function (result, index) → incoming gradient of a round, drawn on the device."""

        def draw(result: torch.Tensor, index: int) -> torch.Tensor:
            return self._draw(number, index, result.shape).to(result.dtype)

        return draw

    def _hand(self, index: int) -> None:
        """Make the round's gradient for the result that `_ends` describes, in new memory."""
        assert self._round is not None
        shape, dtype = self._ends[index]
        if index not in self._tangents or self._tangents[index].shape != shape:
            self._tangents[index] = self._draw(self._round, index, shape)
        self._handed[index] = self._tangents[index].to(dtype, copy=True)

    def _draw(self, number: int, index: int, shape: torch.Size) -> torch.Tensor:
        generator = self._generator(self.seed(number) + 1 + index)
        drawn = torch.randn(shape, dtype=torch.bfloat16, device=self._device, generator=generator)
        return exact_in_any_dtype(drawn)

    def intact(self) -> bool:
        """Whether `values` and the incoming gradients still equal what `fill` wrote, bit for bit."""
        pairs = [*zip(self.values, self._drawn, strict=True)]
        pairs += [(handed, self._tangents[index].to(handed.dtype)) for index, handed in self._handed.items()]
        return all(_same(value.detach(), fresh.detach()) for value, fresh in pairs if isinstance(value, torch.Tensor))

    def scramble(self) -> None:
        """Overwrite the inputs with NaN and drop the gradients, until the next `fill`."""
        self._handed = {}
        for value in self.values:
            # Integers may be indices, which must stay in bounds.
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                poison(value)

    def aliased_by(self, results: Sequence[torch.Tensor]) -> bool:
        """Whether a result shares the storage of an argument."""
        mine = {storage_of(value) for value in self.values if isinstance(value, torch.Tensor)}
        return any(result.numel() > 0 and storage_of(result) in mine for result in results)

    def _generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(seed)


def storage_of(tensor: torch.Tensor) -> int:
    """The address of a tensor's storage."""
    return int(tensor.untyped_storage().data_ptr())


def poison(tensor: torch.Tensor) -> None:
    """Overwrite with NaN; integers with their minimum, bools with their negation."""
    # An expanded axis is one element in memory, and PyTorch refuses to write it more than once.
    sizes = [1 if step == 0 else size for size, step in zip(tensor.shape, tensor.stride(), strict=True)]
    memory = tensor.detach().as_strided(sizes, tensor.stride())
    if tensor.is_floating_point() or tensor.is_complex():
        memory.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        memory.logical_not_()
    else:
        memory.fill_(torch.iinfo(tensor.dtype).min)


def poison_free_memory(nbytes: int, device: str) -> None:
    """Fill the GPU memory that PyTorch's allocator returns next with NaN: `nbytes` in large blocks, and small ones.

    This finds implementations that rely on new buffers being zero. The allocator's free blocks are released
    first, or it would return those.
    """
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(torch.device(device))[0]
    # Blocks up to 1 MiB come from another pool than larger ones.
    small = [torch.empty(_SMALL_BLOCK, dtype=torch.uint8, device=device).fill_(_NAN_BYTE) for _ in range(_SMALL_BLOCKS)]
    large = torch.empty(min(nbytes, free // 2), dtype=torch.uint8, device=device).fill_(_NAN_BYTE)
    del small, large


def poison_freed_heap(nbytes: int) -> torch.Tensor:
    """`poison_free_memory` for a CPU, for results of about `nbytes`: while the returned block lives, malloc gives NaN.

    The returned block keeps the freed ones below it in the heap; otherwise the system would return zeros.
    """
    blocks = [torch.empty(max(nbytes, 1), dtype=torch.uint8).fill_(_NAN_BYTE) for _ in range(_SMALL_BLOCKS)]
    return blocks[-1]


def _same(value: torch.Tensor, fresh: torch.Tensor) -> bool:
    if torch.equal(value, fresh):
        return True
    return (
        value.is_floating_point()
        and torch.equal(value.isnan(), fresh.isnan())
        and bool(torch.equal(value.nan_to_num(0.0), fresh.nan_to_num(0.0)))
    )
