"""The race that settles a choice: alternatives for one piece of work, compared, then timed interleaved.

Generated kernels, attention, and products with what follows them are all raced here. `tune/` and
`kernels/linear/__init__.py` decide which work is raced, and `records/outcomes.py` keeps the outcome.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from tilewright.measure.timing.benchmark import interleaved
from tilewright.measure.timing.stopwatch import Lap, Stopwatch, stopwatch_for
from tilewright.records.errors import warn_once
from tilewright.records.outcomes import Outcome

if TYPE_CHECKING:
    import torch

SECONDS = 0.4
LEAST_REPEATS = 5
LEAD = 1.5
"""A GPU first waits for this multiple of a call's host time, so that the measured time contains no host time."""


def contest(
    alternatives: Mapping[str, Callable[[], object]], device: torch.device, *, seconds: float = SECONDS
) -> Outcome:
    """Microseconds of each alternative's shortest call on `device`; the results of the first alternative are trusted.

    Other programs on the device only add to a time. Beside ten of them even the 20th percentile measured the load: four
    processes raced a product and its GELU in one kernel (31 us) and in two (48), and two of the four chose two kernels.

    An alternative whose results differ from the first's by more than rounding is left out with a message. The state of
    the device's generator is as before.
    """
    watch = stopwatch_for(str(device))
    shortest: dict[str, float] = {}

    def timed(name: str, function: Callable[[], object], host_us: float, _: int) -> Lap:
        watch.lead(LEAD * host_us)
        lap = watch.time(function)
        shortest[name] = min(shortest.get(name, math.inf), lap.us)
        return lap

    with _same_draws(device) as restore:
        right = _agreeing(alternatives, restore)
        calls = {name: partial(timed, name, function, _host_us(watch, function)) for name, function in right.items()}
        interleaved(calls, watch.now, min_repeats=LEAST_REPEATS, max_seconds=seconds)
    return Outcome(shortest)


def _host_us(watch: Stopwatch, function: Callable[[], object]) -> float:
    return min(watch.time(function).host_us or 0.0 for _ in range(3))


@contextmanager
def _same_draws(device: torch.device) -> Iterator[Callable[[], object]]:
    """Yields a function that resets the device's generator; also resets it at the end."""
    import torch

    on_gpu = device.type == "cuda"
    generator = torch.cuda.default_generators[device.index or 0] if on_gpu else torch.default_generator
    restore = partial(generator.set_state, generator.get_state())
    try:
        yield restore
    finally:
        restore()


def _agreeing(
    alternatives: Mapping[str, Callable[[], object]], restore: Callable[[], object]
) -> dict[str, Callable[[], object]]:
    """The alternatives whose results agree with the first one's, from the same random numbers."""
    found: dict[str, Callable[[], object]] = {}
    expected: list[torch.Tensor] = []
    for name, function in alternatives.items():
        restore()
        results = _floats(function())
        if not found:
            expected = results
        elif not agree(results, expected):
            first = next(iter(found))
            warn_once(f"{name} was not raced: its results differ from those of {first} by more than rounding")
            continue
        found[name] = function
    return found


def _floats(result: Any) -> list[torch.Tensor]:
    import torch

    if isinstance(result, torch.Tensor):
        return [result.detach()] if result.is_floating_point() else []
    return [one for part in result for one in _floats(part)] if isinstance(result, (tuple, list)) else []


def agree(results: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Whether shapes and non-finite places are equal, and the norm of the difference is at most √ε of the norm."""
    import torch

    if [one.shape for one in results] != [one.shape for one in expected]:
        return False
    for one, other in zip(results, expected, strict=True):
        finite = torch.isfinite(other)
        if not torch.equal(torch.isfinite(one), finite):
            return False
        a, b = (torch.where(finite, x, 0.0).double() for x in (one, other))
        if (a - b).norm() > math.sqrt(torch.finfo(other.dtype).eps) * b.norm():
            return False
    return True
