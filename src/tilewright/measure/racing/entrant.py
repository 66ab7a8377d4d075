"""One implementation in a race: how a call is prepared, timed, looked at and cleared away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tilewright.measure.racing.arguments import Arguments, poison
from tilewright.measure.timing import timers
from tilewright.measure.timing.stopwatch import Lap, Stopwatch
from tilewright.measure.truth.proof import Results, gradients_of, tensors_of
from tilewright.records.measurement import Direction
from tilewright.records.suite import Variant

_AHEAD_US = 200.0
"""How far the host runs ahead of the device in a call that is looked at: work that does not wait for its
inputs on their stream then meets the inputs of nobody."""
_MARGIN = 1.3


class Foul(Exception):
    """What an implementation did that makes its time no time of its operator."""


class Entrant:
    """A variant in one direction on the arguments of a race."""

    def __init__(self, variant: Variant, direction: Direction, arguments: Arguments, watch: Stopwatch) -> None:
        self.variant = variant
        self.direction = direction
        self._arguments = arguments
        self._watch = watch
        self.lead_us = 0.0
        """So long the host needs to queue a call with all that is prepared for it."""
        self._queued_ns = 0
        self.trains = direction in ("bwd", "fwd+bwd")
        self._held: Any = None
        self._forward: list[torch.Tensor] = []

    def call(self, number: int, look: Callable[[object], None] | None = None) -> Lap:
        """One timed call on the values of a round; whatever it leaves behind is overwritten."""
        self._watch.lead(self.lead_us + (_AHEAD_US if look else 0.0))
        began = timers.now_ns()
        run = self.ready(number)
        with torch.set_grad_enabled(self.trains):
            lap = self._watch.time(partial(self._hold, run), look)
        # So long the host took to queue all of it; the next call lets the device wait for that.
        self.lead_us = (self._queued_ns - began) / 1e3 * _MARGIN
        self._clear()
        return lap

    def ready(self, number: int) -> Callable[[], Any]:
        """What is to be timed, on the values of a round; a backward has its forward behind it.

        To be called with gradients enabled as `trains` says.
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

    def results(self, returned: Any) -> Results:
        """What a timed call returned, with the forward's results where only the backward was timed."""
        if self.direction == "bwd":
            return Results(self._forward, list(returned))
        if self.direction == "fwd+bwd":
            return Results(*returned)
        return Results(tensors_of(returned), [])

    def _hold(self, run: Callable[[], Any]) -> Any:
        self._held = run()
        self._queued_ns = timers.now_ns()
        return self._held

    def _clear(self) -> None:
        """Nothing right may be left in memory that the next call could be handed."""
        left = self.results(self._held)
        for tensor in (*left.outputs, *left.gradients):
            if type(tensor) is torch.Tensor and not self._arguments.aliased_by([tensor]):
                poison(tensor)
        self._held, self._forward = None, []
        self._arguments.scramble()
