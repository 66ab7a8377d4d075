"""Which way of computing a product of some sizes is fastest on this device: measured once, kept on disk."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from tilewright.kernels.linear import cuda
from tilewright.records import cache
from tilewright.records.errors import CacheError, warn_once

ROUNDS = 9
WARM_UP = 2
LEAD = 2
MARGIN = 0.98
"""Of the first way's time: what another must stay below to be taken, so that noise decides nothing."""
Ways = Mapping[str, Callable[[], object]]

_known: dict[tuple[object, ...], str] = {}


def fastest(operator: str, x: torch.Tensor, weight: torch.Tensor, ways: Ways) -> str:
    """The name of the fastest of `ways` for x [M, K] and weight [N, K] on a GPU; the first unless it is beaten clearly.

    Sizes between two powers of two of M count as one. The first question about sizes waits for the device
    and takes some 30 runs of each way; later ones, in this process or another, look the answer up. While a
    CUDA graph is being captured nothing can be measured, and the first way is the answer to what is not
    known.
    """
    if len(ways) == 1:
        return next(iter(ways))
    rows = 1 << (len(x) - 1).bit_length()
    question = (operator, rows, weight.shape, x.dtype, x.device)
    known = _known.get(question)
    if known is not None:
        return known
    if torch.cuda.is_current_stream_capturing():
        return next(iter(ways))
    sizes = (str(rows), *map(str, weight.shape), str(x.dtype), torch.cuda.get_device_name(x.device))
    _known[question] = _kept(cache.key_of(operator, *ways, *sizes, torch.__version__, _source()), x.device, ways)
    return _known[question]


def _kept(key: str, device: torch.device, ways: Ways) -> str:
    """The answer on disk, or a measured one that goes there."""
    try:
        path = cache.build(key, ".txt", lambda out: _write(out, _measure(device, ways)))
        answer = path.read_text()
        if answer in ways:
            return answer
        cache.discard(path)
    except CacheError as error:
        warn_once(f"the fastest way of each product is measured anew in every process: {error}")
    return _measure(device, ways)


@functools.cache
def _source() -> str:
    """Of the kernels, and of the rules by which they are chosen."""
    return "".join(path.read_text() for path in (*sorted(cuda.SOURCE.parent.glob("*.cu*")), Path(__file__)))


def _write(path: Path, text: str) -> None:
    path.write_text(text)


def _measure(device: torch.device, ways: Ways) -> str:
    """By interleaved runs. The generator ends where it was, whatever the ways draw.

    Two calls go before the one that is timed: they keep the device busy while the host prepares that one, whose
    time would else contain the host's.
    """
    generator = torch.cuda.default_generators[device.index]
    state = generator.get_state()
    times: dict[str, list[float]] = {name: [] for name in ways}
    with torch.cuda.device(device), torch.no_grad():
        for turn in range(WARM_UP + ROUNDS):
            for name, way in ways.items():
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                for _ in range(LEAD):
                    way()
                start.record()
                way()
                end.record()
                end.synchronize()
                if turn >= WARM_UP:
                    times[name].append(start.elapsed_time(end))
    generator.set_state(state)
    return _fastest_of(times)


def _fastest_of(times: Mapping[str, Sequence[float]]) -> str:
    """By the shortest time: another process on the device takes its slices from most runs, seldom from all."""
    shortest = {name: min(found) for name, found in times.items()}
    first, best = next(iter(times)), min(times, key=lambda name: shortest[name])
    return best if shortest[best] < MARGIN * shortest[first] else first
