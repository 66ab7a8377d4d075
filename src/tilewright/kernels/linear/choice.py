"""Which implementation of a product of some sizes is fastest on this device: measured once, kept on disk."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from tilewright.graph.capture import in_real_tensors
from tilewright.kernels.linear import cuda
from tilewright.launch.builder import Operand
from tilewright.records import cache
from tilewright.records.errors import CacheError, warn_once

ROUNDS = 9
WARM_UP = 2
LEAD = 2
MARGIN = 0.98
"""Another implementation is taken if its time is below this share of the first's, so that noise decides nothing."""
Impls = Mapping[str, Callable[..., object]]
Operands = Sequence[torch.Tensor | Operand | None]

_known: dict[tuple[object, ...], str] = {}


def fastest(operator: str, operands: Operands, impls: Impls) -> str:
    """The fastest of `impls` for operands like these, x [M, K] and weight [N, K] first; the first of `impls` unless
    another clearly wins.

    M is rounded up to a power of two. What is asked first with new sizes waits for the device, which runs each
    implementation some 30 times on random tensors; later calls, in this process or another, look the answer up. While
    a CUDA graph is being captured nothing can be measured: sizes that are not known take the first implementation.
    """
    x, weight = operands[:2]
    assert x is not None and weight is not None
    rows = 1 << (x.shape[0] - 1).bit_length()
    question = (operator, rows, weight.shape, x.dtype, x.device)
    known = _known.get(question)
    if known is not None:
        return known
    if torch.cuda.is_current_stream_capturing():
        return next(iter(impls))
    sizes = (str(rows), *map(str, weight.shape), str(x.dtype), torch.cuda.get_device_name(x.device))
    key = cache.key_of(operator, *impls, *sizes, torch.__version__, _source())
    try:
        _known[question] = _kept(key, operands, impls)
    except torch.OutOfMemoryError:
        warn_once(f"{operator}: no memory to measure {tuple(x.shape)} by {tuple(weight.shape)}; it runs in one kernel")
        return next(iter(impls))
    return _known[question]


def _kept(key: str, operands: Operands, impls: Impls) -> str:
    """The answer on disk, or a measured one that goes there."""
    try:
        path = cache.build(key, ".txt", lambda out: _write(out, _measure(operands, impls)))
        answer = path.read_text()
        if answer in impls:
            return answer
        cache.discard(path)
    except CacheError as error:
        warn_once(f"the fastest implementation of each product is measured again in every process: {error}")
    return _measure(operands, impls)


@functools.cache
def _source() -> str:
    """Source of the kernels and of this choice: an answer on disk holds for them alone."""
    return "".join(path.read_text() for path in (*sorted(cuda.SOURCE.parent.glob("*.cu*")), Path(__file__)))


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def _measure(operands: Operands, impls: Impls) -> str:
    """Time interleaved runs on random tensors; the generator's state is restored afterwards.

    Two untimed calls come before each timed one: they keep the device busy while the host prepares the timed call,
    whose time would else contain the host's.
    """
    device = next(x.device for x in operands if x is not None)
    generator = torch.cuda.default_generators[device.index]
    state = generator.get_state()
    times: dict[str, list[float]] = {name: [] for name in impls}
    with in_real_tensors(), torch.cuda.device(device), torch.no_grad():
        tensors = [
            None if x is None else torch.empty(x.shape, dtype=x.dtype, device=device).normal_() for x in operands
        ]
        for turn in range(WARM_UP + ROUNDS):
            for name, impl in impls.items():
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                for _ in range(LEAD):
                    impl(*tensors)
                start.record()
                impl(*tensors)
                end.record()
                end.synchronize()
                if turn >= WARM_UP:
                    times[name].append(start.elapsed_time(end))
    generator.set_state(state)
    return _fastest_of(times)


def _fastest_of(times: Mapping[str, Sequence[float]]) -> str:
    """By the shortest time: another process on the device slows most runs, seldom all."""
    shortest = {name: min(found) for name, found in times.items()}
    first, best = next(iter(times)), min(times, key=lambda name: shortest[name])
    return best if shortest[best] < MARGIN * shortest[first] else first
