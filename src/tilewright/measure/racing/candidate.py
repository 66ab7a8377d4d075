"""One implementation in a race: prepares a call, times it, passes its results on and overwrites them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tilewright.measure.racing.arguments import Arguments, poison
from tilewright.measure.timing import timers
from tilewright.measure.timing.stopwatch import LONGEST_LEAD_US, Lap, Stopwatch
from tilewright.measure.truth.proof import RunOutput, gradients_of, tensors_of
from tilewright.records.measurement import Direction
from tilewright.records.suite import Variant

_MARGIN = 1.3


class InvalidRun(Exception):
    """The implementation was wrong or cheated, so its time does not count. The message says how."""


class RacedVariant:
    """A variant in one direction on the arguments of a race."""

    def __init__(self, variant: Variant, direction: Direction, arguments: Arguments, watch: Stopwatch) -> None:
        self.variant = variant
        self.direction = direction
        self._arguments = arguments
        self._watch = watch
        self.lead_us = 0.0
        """Time that the host needs to prepare and queue a call."""
        self._queued_ns = 0
        self.trains = direction in ("bwd", "fwd+bwd")
        self._held: Any = None
        self._forward: list[torch.Tensor] = []

    def call(self, number: int, inspect: Callable[[object], None] | None = None) -> Lap:
        """One timed call on the values of a round; its results are overwritten afterwards."""
        # The inputs of an inspected call are written late, so work on a stream that does not wait for them reads NaN.
        self._watch.lead(LONGEST_LEAD_US if inspect else self.lead_us)
        began = timers.now_ns()
        run = self.ready(number)
        with torch.set_grad_enabled(self.trains):
            lap = self._watch.time(partial(self._hold, run), inspect)
        # The device waits this long before the next call, so that the host has queued all of it.
        self.lead_us = (self._queued_ns - began) / 1e3 * _MARGIN
        self._clear()
        return lap

    def ready(self, number: int) -> Callable[[], Any]:
        """The function to time, on the values of a round. For `bwd`, the forward runs here.

        Call it with gradients enabled as `trains` says.
        """
        self._arguments.fill(number)
        with torch.set_grad_enabled(self.trains):
            return self._prepared()

    def _prepared(self) -> Callable[[], Any]:
        function, values = self.variant.function, self._arguments.values
        if not self.trains:
            return partial(function, *values)
        if self.direction == "bwd":
            self._forward = tensors_of(function(*values))
            return self._backward(self._forward, values)
        return partial(self._forward_and_backward, values)

    def _backward(self, results: Sequence[torch.Tensor], values: Sequence[Any]) -> Callable[[], Any]:
        wanted = [value for value in values if isinstance(value, torch.Tensor) and value.requires_grad]
        ends = [result for result in results if result.requires_grad]
        tangents = [self._arguments.tangent(end, index) for index, end in enumerate(ends)]
        return partial(torch.autograd.grad, ends, wanted, tangents, retain_graph=True)

    def _forward_and_backward(self, values: Sequence[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        results = tensors_of(self.variant.function(*values))
        return results, gradients_of(results, values, self._arguments.tangent)

    def results(self, returned: Any) -> RunOutput:
        """Outputs and gradients of a timed call; for `bwd` the outputs come from the untimed forward."""
        if self.direction == "bwd":
            return RunOutput(self._forward, list(returned))
        if self.direction == "fwd+bwd":
            return RunOutput(*returned)
        return RunOutput(tensors_of(returned), [])

    def _hold(self, run: Callable[[], Any]) -> Any:
        self._held = run()
        self._queued_ns = timers.now_ns()
        return self._held

    def _clear(self) -> None:
        """Overwrite the results, so that the next call cannot return them from reused memory."""
        results = self.results(self._held)
        for tensor in (*results.outputs, *results.gradients):
            if type(tensor) is torch.Tensor and not self._arguments.aliased_by([tensor]):
                poison(tensor)
        self._held, self._forward = None, []
        self._arguments.scramble()
