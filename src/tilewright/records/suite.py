"""A suite: one operator, the sizes it is measured at, and every way of computing it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tilewright.records.measurement import Direction

if TYPE_CHECKING:
    import torch

Language = Literal["torch", "inductor", "library", "triton", "gluon", "cuda"]


@dataclass(frozen=True)
class Work:
    """The least that a direction of a workload must do, and the measured ceiling it is held against."""

    nbytes: int
    """Each input read once, each result written once."""
    flops: int = 0
    limit: Literal["copy", "read", "write", "matmul"] = "copy"


@dataclass(frozen=True)
class Workload:
    """One row of a suite's table: inputs of given sizes and dtype, and the work each direction is."""

    name: str
    """As result files show it: `65536x8192 bf16`."""
    sizes: tuple[int, ...]
    dtype: str
    """As PyTorch names it: `bfloat16`."""
    make: Callable[[torch.device, torch.Generator], tuple[Any, ...]]
    """Fresh random arguments on a device; tensors that get a gradient have `requires_grad`."""
    work: Mapping[Direction, Work]


def _takes_all(_: Workload) -> str | None:
    return None


@dataclass(frozen=True)
class Variant:
    """One way of computing a suite's operator.

    `function` takes what `Workload.make` returns and gives a tensor or a tuple of tensors; a variant
    with the direction `bwd` gives results that autograd can go back through.
    """

    name: str
    """`tilewright` (what a user gets), `tilewright-<way>`, or a peer: `eager`, `torch`, `inductor`, ..."""
    language: Language
    function: Callable[..., Any]
    note: str = ""
    """What limits this way, in a line."""
    directions: Sequence[Direction] = ("fwd", "bwd")
    refuses: Callable[[Workload], str | None] = _takes_all
    """Why a workload cannot be computed this way, or None."""
    consumes: bool = False
    """It may write over its inputs and incoming gradients, and says so; a bench notes it in its rows."""
    unjudged: str = ""
    """Why its values are not held against float64 (it draws another mask, it does the product alone), or ""."""


@dataclass(frozen=True)
class Suite:
    """One operator side by side: `tilewright bench NAME`."""

    name: str
    summary: str
    """The formula, in a line."""
    reference: Callable[..., Any]
    """The formula in plain PyTorch operators of any dtype; in float64 it is the truth."""
    workload: Callable[[tuple[int, ...], str], Workload]
    """The workload of some sizes in a dtype."""
    variants: Sequence[Variant]
    """`tilewright` first. One is named `eager` (plain PyTorch steps) or `torch`: its error is the yardstick."""
    sizes: Sequence[tuple[int, ...]]
    """The sizes measured by default, largest traffic about 1 GiB."""
    dtypes: Sequence[str] = ("bfloat16", "float32")
    draws: Callable[..., tuple[torch.Tensor, ...]] | None = None
    """What eager would draw for those arguments from the generator as it stands (a dropout mask).

    Handed to `reference` after the arguments; None for an operator that draws nothing.
    """
    sweeps: Mapping[str, Sequence[tuple[int, ...]]] = field(default_factory=dict)
    """Named series of sizes for plots: `columns`, `rows`, ..."""

    def variant(self, name: str) -> Variant:
        """The variant of that name; KeyError if there is none."""
        return {variant.name: variant for variant in self.variants}[name]
