"""The race that settles a choice: alternatives for one piece of work, compared, then timed interleaved.

Generated kernels, attention, layouts of convolutions, and products with what follows them are all raced here. The rooms
`choose/` and `kernels/` decide which work is raced, and `records/outcomes.py` keeps the outcome.
"""

from __future__ import annotations

import fcntl
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.measure.timing.benchmark import RESOLUTION_US, interleaved
from tilewright.measure.timing.stopwatch import Lap, Stopwatch, stopwatch_for
from tilewright.records.errors import warn_once
from tilewright.records.outcomes import Outcome

if TYPE_CHECKING:
    import torch

SECONDS = 0.4
LEAST_REPEATS = 5
CONFIRMED = 1.03
"""The shortest time counts once a second call took at most this multiple of it."""
MOST_ROUNDS = 8
"""At most so many times the wanted time is spent until the shortest times are confirmed."""
LEAD = 1.5
"""A GPU first waits for this multiple of a call's host time, so that the measured time contains no host time."""


def contest(
    alternatives: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    seconds: float = SECONDS,
    operand_eps: float = 0.0,
) -> Outcome:
    """Microseconds of each alternative's shortest call on `device`; the results of the first alternative are trusted.

    Other programs on the device only add to a time. Beside ten of them even the 20th percentile measured the load: four
    processes raced a product and its GELU in one kernel (31 us) and in two (48), and two of the four chose two kernels.
    A call longer than a time slice of the GPU is never alone there, so that races of different processes wait for one
    another (but for the first calls, which compile and plan on the host), and calls are repeated until the shortest
    time is seen twice.

    An alternative whose results differ from the first's by more than rounding (of results, and of operands to numbers
    with `operand_eps`) is left out with a message. The state of the device's generator is as before.
    """
    watch = stopwatch_for(str(device))
    times: dict[str, list[float]] = {}

    def timed(name: str, function: Callable[[], object], host_us: float, _: int) -> Lap:
        watch.lead(LEAD * host_us)
        lap = watch.time(function)
        times.setdefault(name, []).append(lap.us)
        return lap

    with _same_draws(device) as restore:
        for function in alternatives.values():
            function()
        with only_race(_gpu(device)):
            right = _agreeing(alternatives, restore, operand_eps)
            calls = {name: partial(timed, name, one, _host_us(watch, one)) for name, one in right.items()}
            deadline = watch.now() + MOST_ROUNDS * seconds
            interleaved(calls, watch.now, min_repeats=LEAST_REPEATS, max_seconds=seconds)
            while not all(map(is_confirmed, times.values())) and watch.now() < deadline:
                interleaved(calls, watch.now, min_repeats=LEAST_REPEATS, max_seconds=seconds)
    return Outcome({name: min(taken) for name, taken in times.items()})


def is_confirmed(times_us: Sequence[float]) -> bool:
    """Whether the shortest time was seen twice.

    >>> is_confirmed([5.0, 9.0, 8.0]), is_confirmed([5.0, 9.0, 5.1])
    (False, True)
    """
    shortest, second = sorted(times_us)[:2]
    return second <= max(CONFIRMED * shortest, shortest + RESOLUTION_US)


def _gpu(device: torch.device) -> str | None:
    """What names a GPU in all processes; None for a CPU, on whose cores races run side by side."""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


@contextmanager
def only_race(gpu: str | None) -> Iterator[None]:
    """Races of other processes on this GPU wait, whatever caches these use. None waits where no file can be locked."""
    path = Path(tempfile.gettempdir()) / f"tilewright-{os.getuid()}-race-{gpu}.lock"
    handle = None
    if gpu is not None:
        with suppress(OSError):
            handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
            fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


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
    alternatives: Mapping[str, Callable[[], object]], restore: Callable[[], object], operand_eps: float
) -> dict[str, Callable[[], object]]:
    """The alternatives whose results agree with the first one's, from the same random numbers."""
    found: dict[str, Callable[[], object]] = {}
    expected: list[torch.Tensor] = []
    for name, function in alternatives.items():
        restore()
        results = _floats(function())
        if not found:
            expected = results
        elif not agree(results, expected, operand_eps):
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


def agree(results: list[torch.Tensor], expected: list[torch.Tensor], operand_eps: float = 0.0) -> bool:
    """Whether shapes and non-finite places are equal, and the norm of the difference is at most √ε of the norm.

    ε is that of the results' dtype, or that of what operands may be rounded to if it is larger. A result that is zero
    but for the rounding of sums in fp32, as the gradient of a softmax over one element, agrees with any other such: it
    is at most 64 ε of fp32 of the norm of all results.
    """
    import torch

    if [one.shape for one in results] != [one.shape for one in expected]:
        return False
    whole = math.hypot(*(float(torch.where(torch.isfinite(one), one, 0.0).double().norm()) for one in expected))
    rounding = 64 * torch.finfo(torch.float32).eps * whole
    for one, other in zip(results, expected, strict=True):
        finite = torch.isfinite(other)
        if not torch.equal(torch.isfinite(one), finite):
            return False
        a, b = (torch.where(finite, x, 0.0).double() for x in (one, other))
        eps = max(torch.finfo(other.dtype).eps, operand_eps)
        if (a - b).norm() > math.sqrt(eps) * b.norm() + rounding:
            return False
    return True
