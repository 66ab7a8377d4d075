"""`bisect`: which rewrite makes a case's numbers wrong, and at which call."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilewright.records.case import Case
from tilewright.records.measurement import Verified

if TYPE_CHECKING:
    from torch import fx

    from tilewright.passes.stage import Applied

SKIP = "TILEWRIGHT_SKIP"
LOOSE = 64
"""Two graphs differ where a value of one is off by more than so many ulp of the largest: a rewrite may round otherwise,
and a wrong one is further off."""


@dataclass(frozen=True)
class Bisected:
    """The rewrite that breaks the numbers contract, if one does, and where."""

    broken: Sequence[Verified]
    """What breaks the contract with all rewrites."""
    rewrite: str | None = None
    node: str | None = None
    source: str | None = None
    changes: Sequence[str] = ()
    """What the rewrite did to the graph."""
    compiled: int = 0
    """How often the case was compiled."""

    @property
    def outcome(self) -> str:
        """One sentence."""
        if not self.broken:
            return "every result keeps the numbers contract: there is nothing to find"
        tensors = ", ".join(row.tensor for row in self.broken)
        if self.rewrite is None:
            return f"{tensors} breaks the numbers contract without any rewrite, too: look at the generated kernels"
        where = f" at {self.node}" if self.node else ""
        line = f" ({self.source})" if self.source else ""
        return f"the rewrite {self.rewrite} breaks the numbers contract{where}{line}: {tensors}"


def bisect_case(case: Case, device: str = "cpu", tell: Callable[[str], None] = lambda _: None) -> Bisected:
    """Compile `case` with fewer and fewer rewrites, verifying each time against float64.

    The first rewrite is named with which the contract breaks, if those before it run and those after it do not, and the
    first call whose value it changes. Raises CaptureError, InputError or CompilerError.
    """
    from tilewright.compile.stages import STAGES
    from tilewright.records.cxx import require_compiler

    if device == "cpu":
        # Without one PyTorch would run all, and nothing would be wrong.
        require_compiler()
    every = [one.name for stage in STAGES for one in stage.passes if not one.required]
    trials = _Trials(case, device, tell)
    broken, ran = trials.run(())
    if not broken:
        return Bisected(broken, compiled=trials.count)
    if trials.run(every)[0]:
        return Bisected(broken, compiled=trials.count)
    changing = {one.name for one in ran if one.changes()}
    suspects = [name for name in every if name in changing]
    good, bad = 0, len(suspects)
    while bad - good > 1:
        middle = (good + bad) // 2
        kept = suspects[:middle]
        if trials.run([name for name in every if name not in kept])[0]:
            bad = middle
        else:
            good = middle
    kept = suspects[:bad]
    _, ran = trials.run([name for name in every if name not in kept])
    found = [one for one in ran if one.name == kept[-1] and one.changes()]
    tell(f"looking for the call at which {kept[-1]} is wrong")
    node = next((at for one in found if (at := wrong_call(one)) is not None), None)
    changes = [line for one in found for line in one.changes()]
    return Bisected(broken, kept[-1], None if node is None else node.name, _line(node), changes, trials.count)


def _line(node: fx.Node | None) -> str | None:
    from tilewright.graph.source import source_line

    return None if node is None else source_line(node)


class _Trials:
    def __init__(self, case: Case, device: str, tell: Callable[[str], None]) -> None:
        self.case, self.device, self.tell, self.count = case, device, tell, 0

    def run(self, skip: Sequence[str]) -> tuple[list[Verified], list[Applied]]:
        """The tensors that break the contract without these rewrites, and what the others did."""
        from tilewright.measure.truth.verify import verify
        from tilewright.passes.stage import applied
        from tilewright.verbs.subject import Subject

        self.count += 1
        self.tell(f"compiling and verifying, {len(skip)} rewrites left out")
        with _environment(SKIP, ",".join(skip)), applied() as ran:
            subject = Subject(self.case, self.device)
            ours = subject.functions["tilewright"]
            rows = verify(subject.model, ours, subject.inputs, seed=1, training=self.case.training)
        return [row for row in rows if not row.ok], ran


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def wrong_call(applied: Applied) -> fx.Node | None:
    """The first call whose value is another after the rewrite, with random inputs; None if none is, or it cannot run.

    Calls are compared by name. If a call differs only because it reads another one now, what it read is named.
    """
    before, after = (_values(snapshot.copied(), snapshot.graph) for snapshot in (applied.before, applied.after))
    nodes = {state.name: node for node, state in applied.after.nodes.items()}
    wrong = next((name for name in after if name in before and _differs(before[name], after[name])), None)
    if wrong is None:
        return None
    then, now = applied.before.nodes.get(nodes[wrong]), applied.after.nodes[nodes[wrong]]
    read = zip(then.operands, now.operands, strict=False) if then is not None else ()
    replaced = (old for old, new in read if _differs(before.get(old.name), after.get(new.name)))
    return next(replaced, nodes[wrong])


def _values(graph: fx.Graph, of: fx.Graph) -> dict[str, Any]:
    """The value of each call of `graph` that could run, by name; inputs are random, alike for the same shapes."""
    import torch
    from torch import fx

    from tilewright.pytorch.state import in_real_tensors

    values: dict[str, Any] = {}

    class Run(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            values[n.name] = value = super().run_node(n)
            return value

    module = fx.GraphModule(of.owning_module or torch.nn.Module(), graph)
    inputs = [_example(node) for node in graph.find_nodes(op="placeholder")]
    with in_real_tensors(), torch.no_grad():
        torch.manual_seed(0)
        # After an exception the values so far are compared.
        with suppress(Exception):
            Run(module).run(*inputs)
    return values


def _example(node: fx.Node) -> Any:
    """A random value of a graph's input; integers are 0 or 1, which are indices of what has two elements."""
    import torch

    value = node.meta.get("val", node.meta.get("example_value"))
    if not isinstance(value, torch.Tensor):
        return int(value) if isinstance(value, (int, torch.SymInt)) else value
    generator = torch.Generator().manual_seed(0)
    shape = [int(size) for size in value.shape]
    is_float = value.is_floating_point() or value.is_complex()
    drawn = torch.randn(shape, generator=generator) if is_float else torch.randint(0, 2, shape, generator=generator)
    held = torch.empty_strided(shape, [int(n) for n in value.stride()], dtype=value.dtype, device=value.device)
    return held.copy_(drawn)


def _differs(one: Any, other: Any) -> bool:
    import torch

    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return any(map(_differs, one, other))
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    if one.shape != other.shape or one.dtype != other.dtype:
        return True
    if not one.is_floating_point():
        return not torch.equal(one, other)
    a, b = one.double(), other.double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return True
    finite = a.isfinite()
    off, largest = (x[finite].abs().max().item() if finite.any() else 0.0 for x in (a - b, a))
    return bool(off > LOOSE * torch.finfo(one.dtype).eps * max(largest, 1.0))
