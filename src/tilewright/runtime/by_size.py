"""Compiles programs of changing sizes for the sizes that recur; runs others eagerly."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import fx

from tilewright.graph.capture import Boxed
from tilewright.graph.specialise import counted_inputs, reads_offsets, size_key

AT_ONCE = 4
"""A program is compiled for its first this many sizes at the first call, for later sizes at the second call."""
MOST_SIZES = 16
"""The most sizes for which a program is compiled; PyTorch runs it for others."""
MOST_SEEN = 4096
"""The most sizes that are remembered after their first call."""


class CompiledBySize:
    """A captured function whose arguments at `places` change their sizes.

    A growing sequence has each size once, and compiling for it would cost more than it saves: such a call runs `eager`,
    the captured operators under autograd. `past_limit` is called before a call with a size beyond `MOST_SIZES`.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        eager: Callable[..., Any],
        places: Sequence[int],
        past_limit: Callable[[], None],
    ) -> None:
        self.compiled = compiled
        self.eager = eager
        self.places = places
        self.past_limit = past_limit
        self.known: set[Hashable] = set()
        self.seen: set[Hashable] = set()

    def __call__(self, *args: Any) -> Any:
        sizes = size_key([args[place] for place in self.places], offsets=False)
        if sizes in self.known:
            return self.compiled(*args)
        if len(self.known) >= AT_ONCE and sizes not in self.seen:
            if len(self.seen) < MOST_SEEN:
                self.seen.add(sizes)
            return self.eager(*args)
        if len(self.known) >= MOST_SIZES:
            self.past_limit()
            return self.eager(*args)
        self.known.add(sizes)
        return self.compiled(*args)


class ExecutableBySize:
    """A graph with symbolic sizes, compiled for each set of sizes at the first call with it.

    Sizes that depend on data stay symbolic. `compile` returns the executable for the sizes of these arguments;
    `otherwise` runs any sizes.
    """

    _boxed_call = True

    def __init__(self, module: fx.GraphModule, compile: Callable[[list[Any]], Boxed], otherwise: Boxed) -> None:
        self.compile = compile
        self.otherwise = otherwise
        self.offsets = reads_offsets(module)
        self.counted = counted_inputs(module)
        self.known: dict[Hashable, Boxed] = {}

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        sizes = size_key(args, offsets=self.offsets, counted=self.counted)
        run = self.known.get(sizes)
        if run is None:
            # Two threads may compile for the same sizes; they load the same library.
            run = self.compile(args) if len(self.known) < MOST_SIZES else self.otherwise
            if run is not self.otherwise:
                self.known[sizes] = run
        return run(args)
