"""Runs rewrites one after another. One that fails is taken back, and the others run.

    graph ─ rewrite ─ rewrite ─ rewrite (raises) → the graph as it was before it, one line, a decision ─ rewrite ─ …

With `TILEWRIGHT_STRICT=1` the failure is an error. `TILEWRIGHT_SKIP=NAME,…` leaves rewrites out. With
`TILEWRIGHT_VERIFY=1` each rewrite's result is verified (`verify.py`).
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path

from torch import fx

from tilewright.graph.snapshot import Snapshot
from tilewright.graph.source import source_line
from tilewright.hardware.target import Target
from tilewright.passes.rule import Rule
from tilewright.passes.verify import verify
from tilewright.records.errors import TilewrightError, first_line, strict, warn_once
from tilewright.records.program import Decision, GraphName

Rewrite = Callable[[fx.Graph, Target], Sequence[Decision] | None]
"""Rewrites a graph in place for a target: `rewrite(graph, target)`; its decisions, if it leaves any."""


@dataclass
class Pass:
    """A rewrite with its name in decisions, messages and `TILEWRIGHT_SKIP`."""

    name: str
    run: Rewrite
    hand_written: bool = False
    """Whether it brings hand-written kernels into a plan, which can be planned without them."""
    required: bool = False
    """Whether results would be wrong without it: it is not left out by name, and if it fails, so does the plan."""


@dataclass(frozen=True)
class Stage:
    """Rewrites in their order, and what holds of the graph before the first and after the last of them."""

    name: str
    before: str
    after: str
    passes: tuple[Pass | Rule, ...]

    def run(
        self, graph: fx.Graph, target: Target, *, name: GraphName | None = None, hand_written: bool = True
    ) -> list[Decision]:
        """Rewrite `graph` in place; the decisions, which are those of a graph called `name` if that is given.

        Without `hand_written` no hand-written kernel is brought in.
        """
        decisions: list[Decision] = []
        for rewrite in self.passes:
            is_skipped = rewrite.name in skipped() and not rewrite.required
            if not is_skipped and (hand_written or not rewrite.hand_written):
                decisions += attempt(rewrite, graph, target)
        return decisions if name is None else [replace(decision, graph=name) for decision in decisions]


@dataclass(frozen=True)
class Applied:
    """One run of a rewrite."""

    name: str
    before: Snapshot
    after: Snapshot
    decisions: Sequence[Decision]
    ms: float

    def changes(self) -> list[str]:
        """What it did to the graph: removed calls `- c = relu(a)`, then inserted ones and readers `+ c = gelu(a)`."""
        pairs = list(self.after.changes(self.before))
        removed = [f"- {old.name} = {old.text()}" for old, _ in pairs if old is not None]
        return [*removed, *(f"+ {new.name} = {new.text()}" for _, new in pairs if new is not None)]


def attempt(rewrite: Pass | Rule, graph: fx.Graph, target: Target) -> Sequence[Decision]:
    """Run one rewrite; after an exception `graph` is as before, and the decision says why.

    Raises TilewrightError in strict mode, and what a required rewrite raises.
    """
    before, started = Snapshot(graph), time.perf_counter()
    try:
        decisions = rewrite.run(graph, target) or ()
        ms = (time.perf_counter() - started) * 1e3
        if (observe := _observer.get()) is not None:
            observe(Applied(rewrite.name, before, Snapshot(graph), decisions, ms))
        if os.environ.get("TILEWRIGHT_VERIFY") == "1":
            verify(graph, before)
        return decisions
    # Whatever it raises, the program can be planned without it.
    except Exception as error:
        if rewrite.required:
            raise
        decision = left_out(rewrite.name, error, before)
        before.put_back()
        return [decision]


def left_out(name: str, error: Exception, before: Snapshot) -> Decision:
    """Say that an optional step raised, at the call that it was looking at, and give the decision.

    Raises TilewrightError in strict mode: `error` itself if it is one.
    """
    if strict() and isinstance(error, TilewrightError):
        raise error
    node = _node_at_fault(error, before)
    call = "the graph" if node is None else before.nodes[node].name
    operands = [] if node is None else before.nodes[node].operands
    producer = operands[0].name if operands else call
    reason = f"it failed with {type(error).__name__}: {first_line(error)} ({_place(error)})"
    source = None if node is None else source_line(node)
    line = f"the rewrite {name} is left out at {source or call}: {reason}"
    if strict():
        raise TilewrightError(line) from error
    warn_once(f"{line}; please report it")
    return Decision("forward", producer, call, "impossible", reason, source=source, passed_by=name)


_observer: ContextVar[Callable[[Applied], None] | None] = ContextVar("tilewright_observer", default=None)


@contextmanager
def applied() -> Iterator[list[Applied]]:
    """Collect what every rewrite of this block does."""
    found: list[Applied] = []
    token = _observer.set(found.append)
    try:
        yield found
    finally:
        _observer.reset(token)


def skipped() -> Sequence[str]:
    """The rewrites that `TILEWRIGHT_SKIP` leaves out."""
    return [name for name in os.environ.get("TILEWRIGHT_SKIP", "").split(",") if name]


def _node_at_fault(error: Exception, before: Snapshot) -> fx.Node | None:
    """The call of the graph that the innermost function with one was looking at: its `node`, or the first it holds.

    The graph's first call if no function had one; None if it has no calls.
    """
    found = next((node for node, state in before.nodes.items() if state.op.startswith("call_")), None)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        held = {name: x for name, x in frame.f_locals.items() if isinstance(x, fx.Node) and x in before.nodes}
        calls = {name: x for name, x in held.items() if before.nodes[x].op.startswith("call_")}
        if calls:
            found = calls.get("node") or next(iter(calls.values()))
    return found


def _place(error: Exception) -> str:
    """The line of the rewrite that raised, or called what raised: `contractions.py:111`."""
    frames, package = traceback.extract_tb(error.__traceback__), str(Path(__file__).parents[1])
    ours = [frame for frame in frames if frame.filename.startswith(package) and frame.filename != __file__]
    last = (ours or frames)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"
