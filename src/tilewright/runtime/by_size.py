"""Runs graphs with symbolic sizes: by one program for all sizes, or by one compiled for each size that recurs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

from torch import fx

from tilewright.capture.aot import Boxed
from tilewright.graph.size_symbols import Sizes, SizeSymbols
from tilewright.graph.specialise import counted_inputs, reads_offsets, size_key

MOST_PROGRAMS = 8
"""The most programs for all sizes of one graph; they then serve also sizes far from their own."""
MOST_REFUSALS = 2
"""After so many no further one is tried."""
MOST_READY = 256
"""The most sizes for which a program's integers are kept."""
AT_ONCE = 4
"""Without such a program, a graph is compiled for its first this many sizes at the first call, for later sizes at the
second call."""
MOST_SIZES = 16
"""The most sizes for which it is compiled then; PyTorch runs it for others."""
MOST_SEEN = 4096
"""The most sizes that are remembered after their first call."""


class Program(Protocol):
    """Serves all sizes of a graph, or those of one parity."""

    def serves(self, sizes: Sizes) -> bool:
        """Whether it is right for these sizes."""

    def is_near(self, sizes: Sizes) -> bool:
        """Whether its kernels are good for these sizes."""

    def executable(self, sizes: Sizes) -> Boxed:
        """Runs the graph at these sizes."""


class ExecutableBySize:
    """A graph with symbolic sizes.

    `program` makes a program for sizes near those of a call, or returns None if that is impossible; a size of 0 or 1 is
    compiled for itself. `compile` returns the executable for the sizes of a call, `otherwise` runs any sizes. Sizes
    that depend on data stay symbolic.
    """

    _boxed_call = True

    def __init__(
        self,
        graph: fx.Graph,
        symbols: SizeSymbols | None,
        program: Callable[[Sizes, list[Any]], Program | None],
        compile: Callable[[list[Any]], Boxed],
        otherwise: Boxed,
        past_limit: Callable[[], None],
    ) -> None:
        self.symbols = symbols
        self.program = program
        self.compile = compile
        self.otherwise = otherwise
        self.past_limit = past_limit
        self.offsets = reads_offsets(graph)
        self.counted = counted_inputs(graph)
        self.programs: list[Program] = []
        self.refusals = 0
        """How often there was no program near some sizes; those that there are then serve also sizes far from them."""
        self.ready: dict[Sizes, Boxed] = {}
        self.fixed: dict[Hashable, Boxed] = {}
        self.seen: set[Hashable] = set()

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        if self.symbols is not None:
            sizes = self.symbols.read(args)
            run = self.ready.get(sizes) or self._made(sizes, args)
            if run is not None:
                return run(args)
        return self._of_these_sizes(args)(args)

    def _made(self, sizes: Sizes, args: list[Any]) -> Boxed | None:
        if self.symbols is None or not self.symbols.are_general(sizes):
            return None
        known = [program for program in self.programs if program.serves(sizes)]
        is_far = not any(program.is_near(sizes) for program in known)
        if is_far and len(self.programs) < MOST_PROGRAMS and self.refusals < MOST_REFUSALS:
            made = self.program(sizes, args)
            if made is None:
                self.refusals += 1
            else:
                self.programs.append(made)
                known += [made] if made.serves(sizes) else []
        if not known:
            return None
        if len(self.ready) >= MOST_READY:
            # Another thread may have removed it.
            self.ready.pop(next(iter(self.ready)), None)
        near = next((program for program in known if program.is_near(sizes)), known[-1])
        self.ready[sizes] = run = near.executable(sizes)
        return run

    def _of_these_sizes(self, args: list[Any]) -> Boxed:
        sizes = size_key(args, offsets=self.offsets, counted=self.counted)
        if (run := self.fixed.get(sizes)) is not None:
            return run
        # A growing sequence has each size once, and compiling for it would cost more than it saves.
        if len(self.fixed) >= AT_ONCE and sizes not in self.seen:
            if len(self.seen) < MOST_SEEN:
                self.seen.add(sizes)
            return self.otherwise
        if len(self.fixed) >= MOST_SIZES:
            self.past_limit()
            return self.otherwise
        # Two threads may compile for the same sizes; they load the same library.
        self.fixed[sizes] = run = self.compile(args)
        return run
