"""A suite of a user's functions: inputs from shapes and dtypes, bytes and FLOPs derived unless given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tilewright.measure.inputs import draw
from tilewright.measure.truth.proof import ERROR_BASELINES, tensors_of
from tilewright.pytorch.state import without_elements
from tilewright.records.case import InputSpec
from tilewright.records.errors import UsageError
from tilewright.records.measurement import Direction
from tilewright.records.suite import Suite, Variant, Work, Workload

_FLOPS_A_BYTE = 100
"""Above this arithmetic intensity, matrix products and not memory are the limit on every known device."""


def user_suite(
    name: str, functions: Mapping[str, Callable[..., Any]], inputs: str | Sequence[InputSpec], *,
    reference: Callable[..., Any], nbytes: int | None = None, flops: int | None = None,
    directions: Sequence[Direction] = ("fwd",),
) -> Suite:  # fmt: skip
    """A suite that races `functions`, by name, with `tilewright bench file.py:NAME`.

    `inputs` is as on the command line, `"bf16[N=4096,M=8192], bf16[M]"`. `--shapes` sets the named sizes in
    order of appearance; `--dtype` replaces the dtype of the first input, wherever it appears.
    `reference` is the formula in plain PyTorch operators: results are compared with it in float64, and it races
    as `eager` unless `functions` has that name. Bytes: each input read once and each result written once; in a
    backward the gradients too. FLOPs: those of matrix products; in a backward twice as many. Both are derived
    from the reference's shapes unless given.

    Raises UsageError for no function or an input without a size.

    >>> suite = user_suite("twice", {"add": lambda x: x + x}, "fp32[N=8,M=4]", reference=lambda x: 2 * x)
    >>> work = suite.workload((8, 4), "float32")
    >>> work.name, work.work["fwd"]
    ('N8 M4 float32', Work(nbytes=256, flops=0, limit='copy'))
    """
    specs = InputSpec.parse_many(inputs) if isinstance(inputs, str) else tuple(inputs)
    if not functions:
        raise UsageError(f"{name}: nothing to race, no function was given")
    variants = [Variant(key, "torch", function, directions=directions) for key, function in functions.items()]
    if not any(variant.name in ERROR_BASELINES for variant in variants):
        variants.append(Variant("eager", "torch", reference, directions=directions))
    names = list(dict.fromkeys(name for spec in specs for name in spec.names if name))
    known = {name: size for spec in specs for name, size in zip(spec.names, spec.shape, strict=True) if name}

    def workload(sizes: tuple[int, ...], dtype: str) -> Workload:
        if len(sizes) != len(names):
            raise UsageError(f"{name} has the sizes {', '.join(names) or 'of its inputs alone'}, not {len(sizes)}")
        resized = [_resized(spec, dict(zip(names, sizes, strict=True)), specs[0].dtype, dtype) for spec in specs]
        label = " ".join([*(f"{key}{size}" for key, size in zip(names, sizes, strict=True)), dtype])
        work = {d: _work(reference, resized, d, nbytes, flops) for d in directions}
        return Workload(label, sizes, dtype, lambda device, generator: _make(resized, generator), work)

    sizes = tuple(known[key] for key in names)
    return Suite(name, name, reference, workload, variants, sizes=[sizes], dtypes=(specs[0].dtype,))


def _resized(spec: InputSpec, sizes: Mapping[str, int], first: str, dtype: str) -> InputSpec:
    shape = tuple(sizes.get(name or "", size) for name, size in zip(spec.names, spec.shape, strict=True))
    return replace(spec, shape=shape, dtype=dtype if spec.dtype == first else spec.dtype)


def _make(specs: Sequence[InputSpec], generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    drawn = [draw(spec, generator) for spec in specs]
    return tuple(tensor.requires_grad_(tensor.is_floating_point()) for tensor in drawn)


def _work(
    reference: Callable[..., Any],
    specs: Sequence[InputSpec],
    direction: Direction,
    nbytes: int | None,
    flops: int | None,
) -> Work:
    """The least bytes and FLOPs of a direction, from running the reference on fake tensors."""
    from torch.utils.flop_counter import FlopCounterMode

    with without_elements(), FlopCounterMode(display=False) as counter:
        fakes = [torch.empty(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs]
        results = tensors_of(reference(*fakes))
        read, written = sum(t.nbytes for t in fakes), sum(t.nbytes for t in results)
        gradients = sum(t.nbytes for t in fakes if t.is_floating_point())
    # A backward reads the inputs and the results' gradients, and has two products for each one of the forward.
    moved = {"fwd": read + written, "bwd": read + written + gradients}
    moved["fwd+bwd"] = moved["fwd"] + moved["bwd"]
    counted = counter.get_total_flops() * {"fwd": 1, "bwd": 2, "fwd+bwd": 3}[direction]
    nbytes = moved[direction] if nbytes is None else nbytes
    flops = counted if flops is None else flops
    return Work(nbytes, flops, "matmul" if flops > _FLOPS_A_BYTE * nbytes else "copy")
