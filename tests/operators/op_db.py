"""PyTorch's operator database, compiled: how many operators give eager's results and gradients, at which dtypes.

    python -m tests.operators.op_db [--dtypes float32,bfloat16] [--ops REGEX] [--samples 3] [--part 0/2] [--out FILE]

One line for each operator and dtype, and counts at the end. `right`: results, gradients and strides keep the numbers
contract; `no row`: right, and an operator of the graph is none of the table's; `eager refuses`: PyTorch raises as well,
or has no such samples; `undefined`: two runs of eager differ; `wrong`; `crash`: tilewright raises in strict mode.
Strides of gradients may also be those of AOTAutograd, which decomposes some operators before it differentiates them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tilewright.backend import Recording, backend, recording
from tilewright.measure.truth.contract import compare
from tilewright.operators.table import row_of

DTYPES = ("float32", "float64", "bfloat16", "float16", "int64")
WIDE = {torch.float32: torch.float64, torch.bfloat16: torch.float64, torch.float16: torch.float64}
WIDE[torch.complex64] = torch.complex128
LONGEST_S = 180
Run = Callable[..., list[torch.Tensor]]


@dataclass(frozen=True)
class Outcome:
    """What came of one operator at one dtype."""

    op: str
    dtype: str
    status: str
    detail: str = ""
    rowless: tuple[str, ...] = ()
    """Operators of its graphs without a row."""


class Samples:
    """Some of an operator's samples as one program: tensors, and a function of them."""

    def __init__(self, op: OpInfo, dtype: torch.dtype, samples: Sequence[SampleInput]) -> None:
        self.op, self.dtype = op, dtype
        leaves, self.spec = tree_flatten([(s.input, s.args, s.kwargs) for s in samples])
        self.others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors = [leaves[place].detach() for place in self.places]
        self.asks = [leaves[place].requires_grad for place in self.places]

    def function(self, *tensors: torch.Tensor) -> list[Any]:
        leaves = list(self.others)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return [self.op.op(first, *args, **kwargs) for first, args, kwargs in tree_unflatten(leaves, self.spec)]

    def run(self, function: Callable[..., Any], wide: bool = False) -> list[torch.Tensor]:
        """Results and gradients; `wide` for those of float64."""
        torch.manual_seed(7)
        inputs = [copied(t, WIDE.get(t.dtype, t.dtype) if wide else t.dtype) for t in self.tensors]
        for tensor, asks in zip(inputs, self.asks, strict=True):
            tensor.requires_grad_(asks)
        found = [leaf for leaf in tree_leaves(function(*inputs)) if isinstance(leaf, torch.Tensor)]
        self.results = len(found)
        ask = [tensor for tensor in inputs if tensor.requires_grad]
        roots = [result for result in found if result.requires_grad]
        gradients: Sequence[torch.Tensor | None] = ()
        if ask and roots:
            generator = torch.Generator().manual_seed(3)
            cotangents = []
            for root in roots:
                narrow = root.dtype if not wide else next((n for n, w in WIDE.items() if w is root.dtype), root.dtype)
                narrow = self.dtype if wide and WIDE.get(self.dtype) is root.dtype else narrow
                drawn = torch.randn(root.shape, generator=generator).to(narrow)
                # A compiled backward is given gradients that lie as the results do.
                cotangents.append(torch.empty_like(root).copy_(drawn))
            gradients = torch.autograd.grad(roots, ask, cotangents, allow_unused=True)
        return [result.detach() for result in found] + [g for g in gradients if g is not None]


def copied(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy with its strides, gaps and overlaps."""
    if not tensor.numel() or tensor.is_conj() or tensor.is_neg():
        return tensor.resolve_conj().resolve_neg().to(dtype, copy=True)
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,)).to(dtype, copy=True).as_strided(tensor.shape, tensor.stride())


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    old = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


def samples_of(op: OpInfo, dtype: torch.dtype, count: int) -> list[SampleInput]:
    """The first samples that have no sparse tensors."""
    gradient = bool(op.supports_autograd and (dtype.is_floating_point or dtype.is_complex))
    gradient = gradient and dtype in op.supported_backward_dtypes("cpu")
    found = []
    for sample in op.sample_inputs("cpu", dtype, requires_grad=gradient):
        tensors = [t for t in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(t, torch.Tensor)]
        if all(t.layout is torch.strided and not t.is_quantized for t in tensors):
            found.append(sample)
        if len(found) == count:
            break
    return found


def same_bits(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and torch.equal(x.isnan(), y.isnan())
        and torch.equal(x.masked_fill(x.isnan(), 0), y.masked_fill(y.isnan(), 0))
        for x, y in zip(a, b, strict=True)
    )  # fmt: skip


def other_strides(ours: torch.Tensor, eager: torch.Tensor) -> bool:
    sizes = zip(ours.shape, ours.stride(), eager.stride(), strict=True)
    return ours.numel() > 1 and any(n > 1 and a != b for n, a, b in sizes)


def not_overflown(eager: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Eager's values, without those that overflow in fp16 on the way to a number that fp16 has."""
    if eager.dtype is not torch.float16 or truth.dtype is not torch.float64:
        return eager
    return eager.where(eager.isfinite() | ~(narrow := truth.to(eager.dtype)).isfinite(), narrow)


def difference(ours: Sequence[torch.Tensor], eager: Sequence[torch.Tensor], truth: Sequence[torch.Tensor]) -> str:
    """What is wrong with our values; empty if nothing is."""
    if len(ours) != len(eager):
        return f"{len(ours)} results for {len(eager)}"
    for place, (mine, theirs) in enumerate(zip(ours, eager, strict=True)):
        if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            return f"result {place}: {mine.dtype} {tuple(mine.shape)} for {theirs.dtype} {tuple(theirs.shape)}"
        if same_bits([mine], [theirs]):
            continue
        exact = truth[place] if len(truth) == len(eager) and truth[place].shape == theirs.shape else theirs
        if theirs.is_complex() or exact.is_complex():
            mine, theirs, exact = (torch.view_as_real(t.resolve_conj()) for t in (mine, theirs, exact))
        theirs = not_overflown(theirs, exact)
        figures = compare(mine, theirs, exact.to(torch.float64) if mine.is_floating_point() else exact)
        if not figures.ok:
            return f"result {place}: {figures}"
    return ""


def strides(program: Samples, ours: Sequence[torch.Tensor], eager: Sequence[torch.Tensor]) -> str:
    """What is wrong with the strides of our results and gradients."""
    others = [n for n, pair in enumerate(zip(ours, eager, strict=True)) if other_strides(*pair)]
    if others and others[0] >= program.results:
        torch._dynamo.reset()
        traced = program.run(torch.compile(program.function, backend="aot_eager"))
        others = [n for n in others if other_strides(ours[n], traced[n])]
    return "".join(f"result {n}: strides {ours[n].stride()} for {eager[n].stride()}" for n in others[:1])


def rowless(record: Recording) -> tuple[str, ...]:
    nodes = [node for graph in record.graphs for node in graph.plan.graph.nodes if node.op == "call_function"]
    return tuple(sorted({str(node.target) for node in nodes if row_of(node.target) is None}))


def check(op: OpInfo, dtype: torch.dtype, count: int = 3) -> Outcome:
    """Compile the operator's first samples and compare."""
    name, kind = op.formatted_name, str(dtype).removeprefix("torch.")
    try:
        if dtype not in op.supported_dtypes("cpu"):
            return Outcome(name, kind, "eager refuses", "no such dtype")
        program = Samples(op, dtype, samples_of(op, dtype, count))
        if not program.places:
            return Outcome(name, kind, "eager refuses", "no samples of tensors")
        eager = program.run(program.function)
        if any(t.layout is not torch.strided for t in eager):
            return Outcome(name, kind, "eager refuses", "results that are not strided")
        state = torch.get_rng_state()
        defined = same_bits(eager, program.run(program.function))
    except Exception as error:
        return Outcome(name, kind, "eager refuses", first_line(error))
    torch.manual_seed(7)
    truth = eager
    if torch.equal(state, torch.get_rng_state()):
        try:
            truth = program.run(program.function, wide=True)
        except Exception:
            truth = eager
    return _compiled(program, name, kind, eager, truth, defined)


def _compiled(
    program: Samples, name: str, kind: str, eager: list[torch.Tensor], truth: list[torch.Tensor], defined: bool
) -> Outcome:
    torch._dynamo.reset()
    try:
        with recording() as record, at_most(LONGEST_S):
            ours = program.run(torch.compile(program.function, backend=backend))
    except Exception as error:
        return Outcome(name, kind, "crash", f"{type(error).__name__}: {first_line(error)}")
    missing = rowless(record)
    if not defined:
        return Outcome(name, kind, "undefined", rowless=missing)
    if wrong := difference(ours, eager, truth) or strides(program, ours, eager):
        return Outcome(name, kind, "wrong", wrong, missing)
    return Outcome(name, kind, "no row" if missing else "right", rowless=missing)


def first_line(error: BaseException) -> str:
    """What it says, in one line; Dynamo's own first line names the backend alone."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])[:300] if lines else type(error).__name__


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--ops", default="")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ.setdefault("TILEWRIGHT_STRICT", "1")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    part, parts = map(int, given.part.split("/"))
    wanted = [op for op in op_db if re.search(given.ops, op.formatted_name)][part::parts]
    done = set()
    if given.out and given.out.exists():
        done = {(row["op"], row["dtype"]) for row in map(json.loads, given.out.read_text().splitlines())}
    counts: Counter[tuple[str, str]] = Counter()
    for kind in given.dtypes.split(","):
        for op in wanted:
            if (op.formatted_name, kind) in done:
                continue
            outcome = check(op, getattr(torch, kind), given.samples)
            counts[kind, outcome.status] += 1
            line = json.dumps(asdict(outcome))
            if given.out:
                with given.out.open("a") as file:
                    file.write(line + "\n")
            elif outcome.status not in ("right", "eager refuses"):
                print(line, flush=True)
    for (kind, status), count in sorted(counts.items()):
        print(f"{kind:10} {status:14} {count}")


if __name__ == "__main__":
    main()
