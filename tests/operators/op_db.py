"""PyTorch's operator database, compiled: which calls give eager's results and gradients. `benchmarks.op_db` runs it.

Of each operator and dtype a few calls: the first sample with more than one element, one from the middle of the samples,
the first with gaps between its elements, written in place, and with `out=`. All calls of an operator are one program;
if something is wrong with it, each is compiled alone and judged:

    right       results, gradients, writes and strides keep the numbers contract
    no row      right, and an operator of the graph is none of the table's
    untraced    PyTorch's own capture does not have it as one graph (`aot_eager` refuses as well)
    inherited   wrong, and the same wrong with `aot_eager`
    refused     eager raises
    undefined   two runs of eager differ
    unjudged    another correct implementation might decide otherwise (`tests/fuzz/conditioning.py`)
    wrong, raised

Strides of gradients may also be those of AOTAutograd, which decomposes some operators
before it differentiates them.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_leaves

from tests.fuzz.batches import Batch
from tilewright.backend import Recording, backend, recording
from tilewright.measure.truth.verify import Results, run_eager, verify
from tilewright.records.measurement import Verified

SEED = 7
MOST_ELEMENTS = 1_000_000
MOST_SAMPLES = 300
"""Of those that are looked through for the ones to run."""
FINE = ("right", "no row", "refused", "untraced", "undefined", "unjudged")
INFERENCE = ("out", "argument in place")
"""Forms of a call that eager has without gradients only."""


def _seeded_outside(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return operator(*args, **kwargs)


# The database seeds its random operators inside of the call, which Dynamo does not trace.
for _name, _module in list(sys.modules.items()):
    if _name.startswith("torch.testing") and "wrapper_set_seed" in vars(_module):
        vars(_module)["wrapper_set_seed"] = _seeded_outside


@dataclass(frozen=True)
class Outcome:
    """What came of one call."""

    op: str
    dtype: str
    form: str
    status: str
    detail: str = ""


class Call:
    """One call of an operator: a function of its tensors, and these."""

    def __init__(self, op: OpInfo, dtype: torch.dtype, form: str, function: Callable[..., Any], sample: SampleInput):
        self.op, self.dtype, self.form = op.formatted_name, dtype, form
        self.space: dict[str, Any] = {"operator": function}
        self.inputs: list[torch.Tensor] = []
        asks = form.rpartition(": ")[2] not in INFERENCE
        given = [self.spelled(value) for value in (sample.input, *sample.args)]
        given += [f"{name}={self.spelled(value)}" for name, value in sample.kwargs.items()]
        self.text = f"operator({', '.join(given)})"
        self.inputs = [t.detach().requires_grad_(asks and t.requires_grad) for t in self.inputs]

    def spelled(self, value: Any) -> str:
        """An argument as Python, which Dynamo reads faster than a tree."""
        if type(value) in (list, tuple):
            inner = "".join(self.spelled(one) + ", " for one in value)
            return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
        if isinstance(value, torch.Tensor):
            self.inputs.append(value)
            return f"t{len(self.inputs) - 1}"
        self.space[name := f"c{len(self.space)}"] = value
        return name

    def function(self, name: str = "call") -> Callable[..., list[torch.Tensor]]:
        parameters = ", ".join(f"t{i}" for i in range(len(self.inputs)))
        exec(f"def {name}({parameters}):\n    return flat({self.text})", space := {**self.space, "flat": flat})
        made: Callable[..., list[torch.Tensor]] = space[name]
        return made

    def make_inputs(self, seed: int, device: str) -> list[torch.Tensor]:
        return self.inputs

    def without_gradients(self) -> Call:
        for tensor in self.inputs:
            tensor.requires_grad_(False)
        return self

    def judged(self, status: str, detail: str = "") -> Outcome:
        return Outcome(self.op, name_of(self.dtype), self.form, status, detail[:2000])


def calls_of(op: OpInfo, dtype: torch.dtype, device: str) -> Iterator[Call]:
    gradient = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    gradient = gradient and dtype in op.supported_backward_dtypes(device)
    samples = list(itertools.islice(op.sample_inputs(device, dtype, requires_grad=gradient), MOST_SAMPLES))
    samples = [sample for sample in samples if is_plain(tensors_of(sample))]
    if not samples:
        return
    first = next((s for s in samples if max(t.numel() for t in tensors_of(s)) > 1), samples[0])
    call = partial(Call, op, dtype)
    yield call("first", op.op, first)
    if (middle := samples[len(samples) // 2]) is not first:
        yield call("middle", op.op, middle)
    written = op.inplace_variant
    if op.supports_autograd or written is None:
        yield call("gaps", op.op, first.noncontiguous())
    if written is not None:
        yield call("in place", lambda x, *args, **kwargs: written(x.clone(), *args, **kwargs), first)
        yield call("gaps: argument in place", written, first.noncontiguous())
    if op.supports_out:
        yield call("out", op.op, with_out(op, first))


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def flat(result: Any) -> list[torch.Tensor]:
    """The tensors of a result."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [t for one in result for t in flat(one)] if isinstance(result, (tuple, list)) else []


def tensors_of(sample: SampleInput) -> list[torch.Tensor]:
    return [t for t in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(t, torch.Tensor)]


def is_plain(tensors: Sequence[torch.Tensor]) -> bool:
    return bool(tensors) and all(
        t.layout is torch.strided and not t.is_quantized and t.numel() < MOST_ELEMENTS for t in tensors
    )


def with_out(op: OpInfo, sample: SampleInput) -> SampleInput:
    """The sample with tensors of its results' shapes to write to."""
    with torch.no_grad():
        result = op.op(sample.input, *sample.args, **sample.kwargs)
    # Dynamo does not trace `out=` with gaps.
    made = [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in flat(result)]
    out = made[0] if isinstance(result, torch.Tensor) else tuple(made)
    return SampleInput(sample.input, args=sample.args, kwargs=sample.kwargs | {"out": out})


def defined(op: OpInfo, dtype: torch.dtype, device: str) -> Iterator[Call | Outcome]:
    """The calls that eager can do, without gradients where it cannot do these; an outcome where two runs differ."""
    if dtype not in op.supported_dtypes(device):
        return
    torch.manual_seed(SEED)
    made = calls_of(op, dtype, device)
    while True:
        call = None
        try:
            call = next(made)
            try:
                results = eagerly(call)
            except (RuntimeError, NotImplementedError):
                results = eagerly(call.without_gradients())
            again = eagerly(call)
        except StopIteration:
            return
        # Eager's own, or that of who makes the samples.
        except Exception as error:
            if call is None:
                yield Outcome(op.formatted_name, name_of(dtype), "samples", "refused", lines_of(error))
                return
            yield call.judged("refused", lines_of(error))
            continue
        if is_plain([torch.zeros(1), *results.outputs.values()]):
            yield call if difference(results, again) is None else call.judged("undefined")


def eagerly(call: Call) -> Results:
    return run_eager(call.function(), call.inputs, seed=SEED, training=True)


def difference(a: Results, b: Results) -> str | None:
    """The first tensor that is not the same, bit for bit but for the sign of zeros."""
    pairs = (a.outputs, b.outputs), (a.written, b.written), (a.bwd, b.bwd)
    for mine, theirs in pairs:
        for name in mine | theirs:
            if name not in mine or name not in theirs or not same(mine[name], theirs[name]):
                return name
    return None


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if a.is_complex():
        a, b = (torch.view_as_real(t.resolve_conj()) for t in (a, b))
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.masked_fill(a.isnan(), 0), b.masked_fill(b.isnan(), 0))


class Program(Batch):
    """Calls that are compiled together; `check` first looks whether all bits are eager's."""

    programs: Sequence[Any]

    def __init__(self, calls: Sequence[Call], device: str = "cpu") -> None:
        super().__init__(calls, 0, device)  # type: ignore[arg-type]
        self.seeds = [SEED] * len(calls)
        self.strides: list[str] = []

    @cached_property
    def eager(self) -> tuple[Results, dict[str, Any]]:
        return self.run(self.function())

    def run(self, function: Callable[..., Any]) -> tuple[Results, dict[str, Any]]:
        """Results, and the strides of outputs and gradients."""
        strides: dict[str, Any] = {}

        def noted(*tensors: torch.Tensor) -> Any:
            results = function(*tensors)
            for i, part in enumerate(results):
                strides.update((f"output[{i}][{j}]", strides_of(t)) for j, t in enumerate(part))
            return results

        found = run_eager(noted, self.inputs(), seed=SEED, training=True)
        return found, strides | {name: strides_of(t) for name, t in found.bwd.items()}

    def compiled(self, compiler: Any) -> Callable[..., Any]:
        torch._dynamo.reset()
        return torch.compile(self.function(), backend=compiler, fullgraph=True, dynamic=False)

    def check(self, training: bool = True) -> tuple[list[Verified], Recording]:
        (eager, lies), compiled = self.eager, self.compiled(backend)
        with recording() as record:
            self.ours, lie = self.run(compiled)
            same = difference(self.ours, eager) is None
            rows = [] if same else verify(self.function(), compiled, self.inputs(), seed=SEED)
        self.strides = [f"{n}: strides {lie[n]} for {lies[n]}" for n in lies.keys() & lie.keys() if lie[n] != lies[n]]
        if self.strides and all(line.startswith("input") for line in self.strides):
            _, traced = self.run(self.compiled("aot_eager"))
            self.strides = [line for line in self.strides if lie[line.split(":")[0]] != traced[line.split(":")[0]]]
        return rows, record


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its strides, 0 for those that no element is found by."""
    counts = tensor.numel() > 1
    return tuple(s if counts and n > 1 else 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def together(calls: Sequence[Call], device: str) -> list[Outcome]:
    """Outcomes of calls that are compiled as one program; of one call the true one."""
    program = Program(calls, device)
    try:
        rows, record = program.check()
        broken = [row for row in rows if not row.ok]
    except Exception as error:
        what = f"{type(error).__name__}: {lines_of(error)}"
        return [call.judged("raised" if len(calls) > 1 else alone_raised(program, what), what) for call in calls]
    lost = [*map(str, broken), *program.strides]
    missing = sorted({f.what for f in record.fallbacks})
    if not lost:
        return [call.judged("no row" if missing else "right", ", ".join(missing)) for call in calls]
    if len(calls) > 1:
        return [call.judged("wrong", "\n".join(lost)) for call in calls]
    return [calls[0].judged(alone_wrong(program, rows), "\n".join(lost))]


def alone_raised(program: Program, what: str) -> str:
    try:
        program.run(program.compiled("aot_eager"))
    except Exception:
        return "untraced"
    return "raised"


def alone_wrong(program: Program, rows: Sequence[Verified]) -> str:
    if not program.strides and not program.missed(rows, True):
        return "unjudged"
    (theirs, lies), (_, eager_lies) = program.run(program.compiled("aot_eager")), program.eager
    same = difference(program.ours, theirs) is None and not (program.strides and lies == eager_lies)
    return "inherited" if same else "wrong"


def judge(op: OpInfo, dtypes: Sequence[torch.dtype], device: str) -> Iterator[list[Outcome]]:
    """The outcomes of all calls of an operator, more exactly each time."""
    floats = [d for d in dtypes if d.is_floating_point or d.is_complex]
    if not any(d in op.supported_dtypes(device) for d in floats):
        dtypes = [*dtypes, torch.int64]
    found = [one for dtype in dict.fromkeys(dtypes) for one in defined(op, dtype, device)]
    calls = [one for one in found if isinstance(one, Call)]
    others = [one for one in found if isinstance(one, Outcome)]
    outcomes: Mapping[int, Outcome] = dict(enumerate(together(calls, device) if calls else []))
    yield [*outcomes.values(), *others]
    if all(one.status == "right" for one in outcomes.values()):
        return
    for number, call in enumerate(calls):
        outcomes = {**outcomes, number: together([call], device)[0]}
        yield [
            *(replace(o, detail="with others: " + o.detail) if i > number else o for i, o in outcomes.items()),
            *others,
        ]


def check(op: OpInfo, dtype: torch.dtype) -> list[Outcome]:
    *_, last = judge(op, [dtype], "cpu")
    return last


def lines_of(error: BaseException) -> str:
    """What it says, in two lines; Dynamo's own first line names the backend alone."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:600]


def operator_named(name: str) -> OpInfo:
    (op,) = (op for op in op_db if op.formatted_name == name)
    return op


__all__ = ["FINE", "Outcome", "check", "judge", "op_db", "operator_named"]
