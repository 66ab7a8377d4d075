"""The work of a kernel, by kind, and its predicted time on a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.cost.tiles import ALIGNED, attention_share, product_us
from tilewright.hardware.floor import cache_us, dram_us, one_sm_us
from tilewright.hardware.kernel_times import UNFITTED, Coefficients
from tilewright.hardware.profiles import DeviceProfile

OWN_PRODUCTS = (
    "attention", "attention_backward", "attention_prefix", "linear_gelu", "product", "skinny_linear",
)  # fmt: skip
MATRIX = frozenset(
    {
        *("product", "convolution", "convolution backward", "attention", "attention backward"),
        *(f"tilewright.{name}" for name in OWN_PRODUCTS),
    }
)
"""Kinds that run on matrix units, each without the comma and the words after it."""
GENERATED = ("pointwise", "gather", "rows", "long rows", "columns")
"""Prefixes of the kinds of generated kernels."""
PHILOX_OPERATIONS = 40
"""32-bit operations per random number: ten rounds (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3")."""
Product = tuple[int, int, int, int]
"""Batch, M, N and K."""
Distances = tuple[tuple[int, int], ...]
"""For each tensor read: its bytes, and the bytes that the program touched since the tensor's last use, its own included
(`cost/memory.py`)."""
COMBINED_PER_US = 200
"""Words that threads of one SM exchange in a microsecond, by shuffles and shared memory."""
STRIPS = 2
"""Programs per SM in a kernel that sums columns; each walks a strip of rows."""
HELD, MISSED = 0.4, 0.8
"""Shares of the last-level cache: a tensor is still there if the program touched fewer bytes than the first since its
last use, and gone after more than the second. Each half of an H200's cache keeps a copy of what its own SMs read."""
HIDDEN = 0.3
"""Share of a pointwise kernel's memory time that hides arithmetic. Gathers hide none: they first wait for addresses."""


@dataclass(frozen=True)
class Work:
    """One launch, or one call of a library. `kind` is as `cost/kinds.py` gives it."""

    kind: str
    bytes_read: int
    bytes_written: int
    flops: int = 0
    transcendentals: int = 0
    dtype: str = "float32"
    programs: int | None = None
    """Independent parts; None where they are many."""
    products: tuple[Product, ...] = ()
    """The matrix products that it consists of; the gradients of a convolution are two."""
    alignment: int = ALIGNED
    """The alignment of their rows in elements, as `cost/products.py` counts it."""
    doubles: int = 0
    """Operations in float64 among those of a generated kernel, sums that accumulate in it included."""
    draws: int = 0
    """Random numbers that are drawn."""
    serial_ns: float = 0.0
    """Time of one thread of a CPU for what no other thread can help with; a GPU does it in parallel."""
    combined: int = 0
    """Words that threads of one program exchange for its sums, or places that they look up or compare."""
    distances: Distances = ()
    """Empty if the program is not known; every read then counts as touched just before."""

    @property
    def is_priced_by_arithmetic(self) -> bool:
        """Whether its time depends on its arithmetic too, as that of matrix products and of generated kernels does."""
        return self.is_matrix or self.kind.startswith(GENERATED)

    @property
    def is_matrix(self) -> bool:
        """Whether it runs on matrix units where the dtype has them."""
        return self.kind.partition(",")[0] in MATRIX

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written


def terms(work: Work, profile: DeviceProfile) -> Sequence[float]:
    """The times that `kernel_times.TERMS` names."""
    missed_read, missed_written = _missed(work, profile)
    hit_written = work.bytes_written - missed_written
    cached = cache_us(work.bytes_read - missed_read + hit_written, hit_written, profile) or 0.0
    dram = dram_us(missed_read + missed_written, missed_written, profile)
    narrow = 0.0
    if work.programs is not None and work.programs < profile.sms:
        narrow = one_sm_us(work.bytes, work.bytes_written, profile) / max(work.programs, 1)
    arithmetic = _arithmetic_us(work, profile)
    if work.kind == "pointwise":
        arithmetic = max(arithmetic - HIDDEN * (cached + dram), 0.0)
    vector = profile.vector_TFLOPs * 1e6
    waves = (work.programs or 0) / profile.sms
    return (
        1.0,
        float(work.bytes_read > 0),
        cached,
        dram,
        arithmetic,
        2 * work.doubles / vector,
        PHILOX_OPERATIONS * work.draws / vector,
        narrow,
        min(waves, 1.0),
        work.combined * (min(waves, STRIPS) if work.kind.startswith("columns") else waves) / COMBINED_PER_US,
    )


def _missed(work: Work, profile: DeviceProfile) -> tuple[int, int]:
    """Bytes read and bytes written that the last-level cache does not hold."""

    def share(nbytes: int) -> float:
        if profile.l2_GBps is None:
            return 1.0
        return min(max((nbytes / (profile.l2_bytes or 1) - HELD) / (MISSED - HELD), 0.0), 1.0)

    whole = share(work.bytes)
    known = sum(size for size, _ in work.distances)
    cold = sum(size * share(distance) for size, distance in work.distances) / known if known else whole
    return round(work.bytes_read * cold), round(work.bytes_written * whole)


def _arithmetic_us(work: Work, profile: DeviceProfile) -> float:
    vector = profile.vector_TFLOPs
    rate = profile.matmul_TFLOPs.get(work.dtype, vector) if work.is_matrix else vector
    simple, special = work.flops / rate / 1e6, work.transcendentals * profile.flops_per_transcendental / vector / 1e6
    has_tiles = work.products and profile.device == "cuda"
    if "attention" in work.kind:
        # A pair's exponential waits for its products, so the times add up.
        return (simple + special) * (attention_share(work.products[0], work.flops, profile.sms) if has_tiles else 1.0)
    if has_tiles:
        return sum(product_us(*product, rate, profile.sms, work.alignment) for product in work.products)
    return max(simple, special)


def predicted_us(work: Work, profile: DeviceProfile, *, with_start: bool = True) -> float:
    """Microseconds by the coefficients of the work's kind; `with_start=False` if another launch computes the work."""
    coefficients = _coefficients(work, profile) or UNFITTED
    first, on_cpu = 0 if with_start else 1, profile.device == "cpu"
    serial_us = work.serial_ns / 1e3 if on_cpu else 0.0
    if on_cpu and coefficients is UNFITTED:
        # That of a GPU's kernels is known; a CPU's calls start as its small operators were measured to.
        coefficients = (profile.launch_us, *coefficients[1:])
    return serial_us + sum(c * term for c, term in zip(coefficients[first:], terms(work, profile)[first:], strict=True))


def _coefficients(work: Work, profile: DeviceProfile) -> Coefficients | None:
    kind, times = work.kind, profile.kernel_times
    while kind not in times and ", " in kind:
        kind = kind.rpartition(", ")[0]
    return times.get(kind)
