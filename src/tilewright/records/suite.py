"""A suite: one operator, the sizes it is measured at, and its implementations."""

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
    """The least traffic and arithmetic of one direction of a workload, and the ceiling that bounds it."""

    nbytes: int
    """Each input read once, each result written once."""
    flops: int = 0
    limit: Literal["copy", "read", "write", "matmul"] = "copy"


@dataclass(frozen=True)
class Workload:
    """One row of a suite's table: inputs of given sizes and dtype, and the work of each direction."""

    name: str
    """As result files show it: `65536x8192 bf16`."""
    sizes: tuple[int, ...]
    dtype: str
    """As PyTorch names it: `bfloat16`."""
    make: Callable[[torch.device, torch.Generator], tuple[Any, ...]]
    """Fresh random arguments on a device; tensors that get a gradient have `requires_grad`."""
    work: Mapping[Direction, Work]


def _supports_all(_: Workload) -> str | None:
    return None


@dataclass(frozen=True)
class Variant:
    """One implementation of a suite's operator.

    `function` takes the arguments that `Workload.make` returns and gives a tensor or a tuple of tensors;
    if `directions` has `bwd`, its results require a gradient.
    """

    name: str
    """`tilewright` (what a user gets), `tilewright-<impl>`, or a peer: `eager`, `torch`, `inductor`, ..."""
    language: Language
    function: Callable[..., Any]
    note: str = ""
    """The limit of this implementation, in a line."""
    directions: Sequence[Direction] = ("fwd", "bwd")
    refuses: Callable[[Workload], str | None] = _supports_all
    """The reason why a workload is unsupported, or None."""
    overwrites_inputs: bool = False
    """It may overwrite its inputs and incoming gradients, by its documentation; a bench notes it in its rows."""
    sources: Sequence[str] | None = None
    """Tilewright's sources that it runs (`records/sources.py`); None: those of the suite if it is tilewright's."""
    package: str = ""
    """The distribution that has it, if it is neither tilewright's nor PyTorch's."""
    unverified: str = ""
    """Why its values are not compared with float64 (another dropout mask, the matrix product alone), or ""."""


@dataclass(frozen=True)
class Suite:
    """One operator side by side: `tilewright bench NAME`."""

    name: str
    summary: str
    """The formula, in a line."""
    reference: Callable[..., Any]
    """The formula in plain PyTorch operators of any dtype; results are compared with it in float64."""
    workload: Callable[[tuple[int, ...], str], Workload]
    """The workload of given sizes and dtype."""
    variants: Sequence[Variant]
    """`tilewright` first. One is named `eager` (plain PyTorch steps) or `torch`: its error sets the bound."""
    sizes: Sequence[tuple[int, ...]]
    """The sizes measured by default; the largest moves about 1 GiB."""
    dtypes: Sequence[str] = ("bfloat16", "float32")
    draws: Callable[..., tuple[torch.Tensor, ...]] | None = None
    """The random tensors (a dropout mask) that eager would draw for these arguments from the generator's state.

    `reference` takes them after the arguments. None for an operator without randomness.
    """
    sweeps: Mapping[str, Sequence[tuple[int, ...]]] = field(default_factory=dict)
    """Named series of sizes for plots: `columns`, `rows`, ..."""
    sources: Sequence[str] = ()
    """What tilewright's implementations are made from (`records/sources.py`)."""
    is_generated: bool = False
    """Whether tilewright's kernels for it are all generated: then `generated` differs by the host's time alone."""

    def variant(self, name: str) -> Variant:
        """The variant of that name; KeyError if there is none."""
        return {variant.name: variant for variant in self.variants}[name]

    def sources_of(self, impl: str) -> Sequence[str]:
        """The sources of tilewright that a row of `impl` measures; none for a peer."""
        known = {variant.name: variant.sources for variant in self.variants}.get(impl)
        if known is None:
            return self.sources if impl.startswith("tilewright") else ()
        return known
