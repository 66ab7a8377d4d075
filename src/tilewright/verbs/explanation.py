"""`explain`: what a case costs on a device, captured and priced without being run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tilewright.case_names import accepts, signature_of
from tilewright.records.case import Case
from tilewright.records.errors import InputError, UsageError
from tilewright.records.measurement import Ceiling
from tilewright.records.program import Program
from tilewright.report.displayable import Displayable
from tilewright.report.progress import progress_of

if TYPE_CHECKING:
    from tilewright.hardware.profiles import DeviceProfile
    from tilewright.passes.stage import Applied


@dataclass(repr=False)
class Explanation(Displayable):
    """The cost of a case on a device; displays itself in a terminal and in a notebook."""

    case: Case
    program: Program
    ceilings: Sequence[Ceiling]
    everything: bool = False
    """Whether it shows every operator and decision, or a summary."""

    def __rich__(self) -> Any:
        from tilewright.report.terminal import show_explain

        return show_explain(self.program, self.ceilings, self.case.named_sizes(), self.everything)


def explain_case(case: Case, on: str | None = None) -> Explanation:
    """Graph, costs, floors and planned fusions of `case` on a known device, or on this machine.

    Nothing is computed and no device is needed. Raises CaptureError, InputError or UsageError.
    """
    from tilewright.compile.price import price_program
    from tilewright.hardware.target import absent

    profile = _profile(on)
    return Explanation(case, price_program(without_memory(case), absent(profile)), ceilings_of(profile))


def explain(
    model: Callable[..., Any], *inputs: Any, on: str | None = None, training: bool = False, **keywords: Any
) -> Explanation:
    """`explain_case` for a module or function, called as `model(*inputs, **keywords)` would be.

    Tensors among the arguments may be anywhere, also on the meta device or fake; their values are not read. Dimensions
    have no names, so costs are numbers. `on`: a name of
    `hardware/profiles.py`, as `h200`; default this machine.
    """
    case = case_of(model, inputs, training, keywords)
    with progress_of(f"explaining {case.name}"):
        return explain_case(case, on)


def case_of(
    model: Callable[..., Any], inputs: Sequence[Any], training: bool, keywords: Mapping[str, Any] | None = None
) -> Case:
    """A module or function and its arguments as a case. Raises UsageError or InputError if it cannot take them."""
    import torch

    name = getattr(model, "__name__", type(model).__name__)
    keywords = keywords or {}
    if not callable(model):
        raise UsageError(f"expected a module or a function, not {model!r} of type {type(model).__name__}")
    call = model.forward if isinstance(model, torch.nn.Module) else model
    if not accepts(call, inputs, keywords):
        named = f" and {', '.join(keywords)}" if keywords else ""
        raise InputError(f"{name}{signature_of(call)} does not take {len(inputs)} inputs{named}")
    return Case(name, lambda: model, inputs, training=training, keywords=keywords)


def without_memory(case: Case) -> Case:
    """`case`, whose model is built once, of fake tensors: a model of any size is priced on any machine."""
    from tilewright.capture.fakes import built_without_memory

    return replace(case, build=built_without_memory(case.build))


def _profile(on: str | None) -> DeviceProfile:
    from tilewright.hardware.profiles import local_profile, profile_for

    return profile_for(on) if on else local_profile()


def ceilings_of(profile: DeviceProfile) -> list[Ceiling]:
    """The ceilings that a floor is computed from, as rows of a run."""

    def row(kind: str, value: float, unit: str, dtype: str = "") -> Ceiling:
        return Ceiling(profile.name, kind, dtype, value, unit, profile.origin)

    rows = [
        row("copy", profile.copy_GBps, "GB/s"),
        row("read", profile.read_GBps, "GB/s"),
        row("write", profile.write_GBps, "GB/s"),
        row("vector", profile.vector_TFLOPs, "TFLOP/s", "float32"),
        row("launch", profile.launch_us, "us"),
    ]
    caches = {"cache": profile.l2_GBps, "cache read": profile.l2_read_GBps, "cache write": profile.l2_write_GBps}
    rows += [row(kind, GBps, "GB/s") for kind, GBps in caches.items() if GBps is not None]
    return rows + [row("matmul", rate, "TFLOP/s", dtype) for dtype, rate in profile.matmul_TFLOPs.items()]


CHANGES = 12
"""Lines of each rewrite's changes that are shown, unless all are asked for."""


def rewrites_of_case(case: Case, on: str | None = None) -> list[Applied]:
    """Every rewrite that ran while `case` was planned for a known device, or this machine, in order.

    Nothing is computed. Raises as `explain_case` does.
    """
    from tilewright.compile.capture import capture
    from tilewright.compile.planner import Planner
    from tilewright.hardware.target import absent
    from tilewright.passes.stage import applied

    with applied() as found:
        capture(case, Planner(absent(_profile(on))))
    return found


def rewrite_lines(rewrites: Sequence[Applied], everything: bool = False) -> list[str]:
    """For each rewrite that changed the graph: its name, time, decisions, and the calls it removed and inserted."""
    lines = []
    for one in rewrites:
        if not (changes := one.changes()):
            continue
        made, gone = len(one.after.nodes), len(one.before.nodes)
        lines.append(f"{one.name}  {gone} → {made} nodes, {one.ms:.1f} ms")
        lines += [f"    {x.verdict}: {x.reason}" + (f"  {x.source}" if x.source else "") for x in one.decisions]
        shown = changes if everything else _some(changes)
        lines += [f"  {line}" for line in shown]
        if len(shown) < len(changes):
            lines.append(f"    … {len(changes) - len(shown)} more; --all shows them")
    total = sum(one.ms for one in rewrites)
    unchanged = sum(not one.changes() for one in rewrites)
    return [*lines, f"{len(rewrites)} runs of rewrites took {total:.0f} ms; {unchanged} found nothing to change"]


def _some(changes: list[str]) -> list[str]:
    """At most CHANGES of them, inserted calls (`+`) beside the removed ones.

    >>> _some(["- a"] * 20 + ["+ b"] * 3) == ["- a"] * 9 + ["+ b"] * 3
    True
    """
    kinds = [line for line in changes if line.startswith("-")], [line for line in changes if not line.startswith("-")]
    most = CHANGES - min(*map(len, kinds), CHANGES // 2)
    return [line for kind in kinds for line in kind[:most]]


def tree_of_case(case: Case) -> Any:
    """The captured forward graph as an annotated tree (a rich renderable)."""
    from tilewright.compile.price import tree_of
    from tilewright.graph.tree import render

    return render(tree_of(without_memory(case)))
