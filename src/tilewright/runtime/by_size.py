"""Programs whose sizes change between calls: compiled for sizes that recur, run eagerly for others."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import fx

from tilewright.graph.capture import Boxed
from tilewright.graph.specialise import counted_inputs, reads_offsets, size_key

AT_ONCE = 4
"""The number of sizes for which a program is compiled at the first call; for others at the second."""
MOST_SIZES = 16
"""The largest number of sizes for which a program is compiled; with others PyTorch runs it."""
MOST_SEEN = 4096
"""The number of sizes that are remembered after one call."""


class CompiledBySize:
    """A captured function whose arguments at `places` have sizes that change.

    A sequence that grows brings each size once, and kernels for it would cost more than they save: such a call runs
    `eager`, the captured operators under autograd. `past_limit` is called before a call with one size too many.
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
    """A graph with symbolic sizes: compiled for each set of sizes when a call first brings them.

    Sizes that depend on data stay symbolic. `compile` gives the executable for the sizes of the arguments it is shown;
    `otherwise` runs any.
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
            # Two threads may compile the same sizes; the library they load is one.
            run = self.compile(args) if len(self.known) < MOST_SIZES else self.otherwise
            if run is not self.otherwise:
                self.known[sizes] = run
        return run(args)
