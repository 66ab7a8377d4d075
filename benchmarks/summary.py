"""Every speed bar of the kernels beside what was measured: `python -m benchmarks.summary [DIR]`.

Reads the result files of `tilewright bench … --out` (default: benchmarks/results/h200), prints one table
and ends with exit code 1 if a bar is missed. A bar without a row says so and counts as missed.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.cute_attention import TIMES_CUDNN
from benchmarks.todays import is_todays
from tilewright.measure.racing.results import read_results
from tilewright.records.measurement import Measurement

ROOT = Path(__file__).parent / "results"
OURS = "tilewright"
NOISE = 0.98
"""Interleaved medians of the same kernel differ by so much."""
GIB = 2**30
ROW_KERNELS = ("softmax", "layer_norm", "rms_norm", "cross_entropy")
NUMBERS = ("required", "measured", "rows", "of old sources")
LARGE = 2**27
"""Elements from which a row kernel's workload is one of bandwidth: about 1 GiB of traffic."""
PEERS = ("torch", "eager", "inductor", "inductor-max-autotune", "liger")
TOKENS, HIDDEN, VOCABULARY = 8192, 4096, 131072
"""Sizes of the linear layer before cross entropy."""


@dataclass(frozen=True)
class Results:
    """All rows of one device."""

    rows: Sequence[Measurement]

    def of(self, *suites: str, direction: str, case: str = "") -> list[Measurement]:
        """Tilewright's own rows of these suites; `case` is a regular expression that the case's name matches."""
        return [
            row
            for row in self.rows
            if row.impl == OURS and row.suite in suites and row.direction == direction and re.search(case, row.case)
        ]

    def beside(self, row: Measurement, impls: Sequence[str]) -> list[Measurement]:
        """The rows of other implementations in the same race."""
        race = (row.suite, row.case, row.direction, row.device)
        return [r for r in self.rows if (r.suite, r.case, r.direction, r.device) == race and r.impl in impls]

    def copy_GBps(self) -> float:
        """The measured copy bandwidth: what the shares of the suites that are held against it are shares of."""
        rows = self.of("softmax", "layer_norm", "rms_norm", direction="fwd")
        limits = [row.GBps / row.of_ceiling for row in rows if row.GBps and row.of_ceiling]
        return statistics.median(limits) if limits else float("nan")


@dataclass(frozen=True)
class Bar:
    """One figure that must not be below a bound, for each of some rows or for all together."""

    group: str
    what: str
    bound: float
    rows: Callable[[Results], list[Measurement]]
    figure: Callable[[Results, Measurement], float | None]
    together: bool = False
    """The geometric mean over the rows instead of the worst of them."""


def of_copy(results: Results, row: Measurement) -> float | None:
    """Share of the measured copy bandwidth, whatever limit the row itself names."""
    return None if row.GBps is None else row.GBps / results.copy_GBps()


def of_limit(_: Results, row: Measurement) -> float | None:
    """Share of the limit that the suite names."""
    return row.of_ceiling


def of_best_peer(results: Results, row: Measurement) -> float | None:
    """How many times as fast as the fastest of PyTorch, Inductor and Liger in the same race."""
    return _times(row, results.beside(row, PEERS))


def of_inductor(results: Results, row: Measurement) -> float | None:
    """How many times as fast as Inductor in the same race."""
    return _times(row, results.beside(row, ["inductor"]))


def of_cublas(results: Results, row: Measurement) -> float | None:
    """Speed as a share of the bare matrix product's in the same race."""
    return _times(row, results.beside(row, ["cublas-bare"]))


def of_best_attention(results: Results, row: Measurement) -> float | None:
    """How many times as fast as cuDNN and FlashAttention in the same race, its CuTe kernels by their ratio to cuDNN
    where they were not raced."""
    raced = bool(results.beside(row, ["flash-cute"]))
    times = 1.0 if raced else TIMES_CUDNN.get((row.case, row.direction), 1.0)
    return _of_attention(results, row, times, "cudnn", "flash2", "flash-cute")


def of_shipped_attention(results: Results, row: Measurement) -> float | None:
    """How many times as fast as the better of cuDNN and FlashAttention-2, as PyTorch ships them, in the same race."""
    return _of_attention(results, row, 1.0, "cudnn", "flash2")


def _of_attention(results: Results, row: Measurement, times_cudnn: float, *impls: str) -> float | None:
    """Against a peer that is so many times as fast as cuDNN, too; a race without cuDNN says nothing."""
    peers = results.beside(row, impls)
    if "cudnn" not in [peer.impl for peer in peers]:
        return None
    times = [peer.median_us / (max(times_cudnn, 1.0) if peer.impl == "cudnn" else 1.0) for peer in peers]
    return min(times) / row.median_us


def of_flash2(results: Results, row: Measurement) -> float | None:
    """How many times as fast as FlashAttention-2 in the same race."""
    return _times(row, results.beside(row, ["flash2"]))


def of_best_in_chunks(results: Results, row: Measurement) -> float | None:
    """How many times as fast as those that never hold all logits: chunks under Inductor, Liger and QuACK."""
    return _times(row, results.beside(row, ["inductor", "liger", "liger-cute", "quack"]))


def useful_TFLOPs(_: Results, row: Measurement) -> float | None:
    """TFLOP/s of the work the operator needs."""
    return row.TFLOPs


def gib_within(_: Results, row: Measurement) -> float | None:
    """1 GiB over what was held beyond inputs and gradients (both of the activations and the weight, bf16)."""
    gradients = 2 * HIDDEN * (TOKENS + VOCABULARY)
    return None if row.peak_bytes is None else GIB / max(row.peak_bytes - gradients, 1)


def _times(row: Measurement, others: Sequence[Measurement]) -> float | None:
    return min((other.median_us for other in others), default=float("nan")) / row.median_us if others else None


def row_kernels(direction: str) -> Callable[[Results], list[Measurement]]:
    """Row kernels on workloads of full size."""

    def rows(results: Results) -> list[Measurement]:
        found = results.of(*ROW_KERNELS, direction=direction)
        return [row for row in found if elements(row.case) >= LARGE]

    return rows


def of(suite: str, direction: str, case: str = "") -> Callable[[Results], list[Measurement]]:
    """Tilewright's rows of one suite, direction and, as a regular expression, case."""
    return lambda results: results.of(suite, direction=direction, case=case)


def portable(direction: str) -> Callable[[Results], list[Measurement]]:
    """The attention kernels that run on any GPU."""
    return lambda results: [
        row
        for row in results.rows
        if (row.suite, row.impl, row.direction) == ("attention", "tilewright-triton", direction)
    ]


def elements(case: str) -> int:
    sizes = re.match(r"\d+(x\d+)*", case)
    elements = 1
    for size in sizes[0].split("x") if sizes else ():
        elements *= int(size)
    return elements


SQUARE = r"^16384x16384 bf16"
BARS = [
    Bar("rows", "row kernels forward, of copy, together", 0.96, row_kernels("fwd"), of_copy, together=True),
    Bar("rows", "row kernels forward, of copy", 0.92, row_kernels("fwd"), of_copy),
    Bar("rows", "row kernels forward, × best peer", NOISE, row_kernels("fwd"), of_best_peer),
    Bar("rows", "row kernels backward, of copy, together", 0.92, row_kernels("bwd"), of_copy, together=True),
    Bar("rows", "row kernels backward, of copy", 0.85, row_kernels("bwd"), of_copy),
    Bar("elements", "GELU+dropout+residual forward, of copy", 0.85, of("dropout_add", "fwd", SQUARE), of_copy),
    Bar("elements", "GELU+dropout+residual backward, of copy", 0.80, of("dropout_add", "bwd", SQUARE), of_copy),
    Bar("elements", "GeLU, of copy", 0.97, of("gelu", "fwd", r"^16384x16384 "), of_copy),
    Bar("elements", "weighted sum forward, of read", 0.97, of("weighted_sum", "fwd", SQUARE), of_limit),
    Bar("elements", "weighted sum backward, of copy", 0.92, of("weighted_sum", "bwd", SQUARE), of_copy),
    Bar("products", "GEMM+bias+GELU (erf), × bare cuBLAS", 0.97, of("linear_gelu", "fwd"), of_cublas),
    Bar("products", "GEMM+bias+GELU (tanh), × bare cuBLAS", 0.97, of("linear_gelu_tanh", "fwd"), of_cublas),
    Bar(
        "loss",
        "linear + cross entropy, × best in chunks",
        1.15,
        of("linear_cross_entropy", "fwd+bwd"),
        of_best_in_chunks,
    ),
    Bar("loss", "linear + cross entropy, TFLOP/s", 540.0, of("linear_cross_entropy", "fwd+bwd"), useful_TFLOPs),
    Bar("loss", "linear + cross entropy, 1 GiB over memory", 1.0, of("linear_cross_entropy", "fwd+bwd"), gib_within),
    Bar("attention", "forward, × best peer, together", 1.03, of("attention", "fwd"), of_best_attention, together=True),
    Bar("attention", "forward, × best peer", 0.92, of("attention", "fwd"), of_best_attention),
    Bar("attention", "backward, × best peer, together", 1.0, of("attention", "bwd"), of_best_attention, together=True),
    Bar("attention", "backward, × best peer", 0.85, of("attention", "bwd"), of_best_attention),
    Bar("attention", "one query, of copy", 0.90, of("attention_decode", "fwd"), of_copy),
    Bar("attention", "portable forward, × FlashAttention-2, together", 1.35, portable("fwd"), of_flash2, together=True),
    Bar("attention", "portable backward, × FlashAttention-2, together", 1.0, portable("bwd"), of_flash2, together=True),
]


@dataclass(frozen=True)
class Verdict:
    """A bar, its figure, and the row that is furthest from it."""

    bar: Bar
    figure: float | None
    rows: int
    worst: str
    old: int = 0
    """Rows that were measured from other sources than today's."""

    @property
    def reached(self) -> bool:
        return self.figure is not None and self.figure >= self.bar.bound


def verdicts(results: Results) -> Iterator[Verdict]:
    """Every bar held against the rows."""
    for bar in BARS:
        pairs = [(bar.figure(results, row), row) for row in bar.rows(results)]
        known = [(figure, row) for figure, row in pairs if figure is not None]
        if not known:
            yield Verdict(bar, None, 0, "")
            continue
        least, row = min(known, key=lambda pair: pair[0])
        figure = statistics.geometric_mean([f for f, _ in known]) if bar.together else least
        old = sum(not is_todays(row) for _, row in known)
        yield Verdict(bar, figure, len(known), f"{least:.3g} at {row.suite} {row.case}", old)


def read_all(folder: Path) -> Results:
    """All bench rows in the files of a folder; files of other kinds are left alone."""
    rows: list[Measurement] = []
    for path in sorted(folder.glob("*.jsonl")):
        with path.open(encoding="utf-8") as file:
            if '"median_us"' in file.readline():
                rows += read_results(path)
    return Results(rows)


def main(folder: Path) -> int:
    results = read_all(folder)
    table = Table(title=f"{folder} · copy {results.copy_GBps():,.0f} GB/s", title_justify="left")
    for heading in ("kernels", "bar", "required", "measured", "rows", "of old sources", "least", ""):
        table.add_column(heading, justify="right" if heading in NUMBERS else "left", no_wrap=heading == "bar")
    found = list(verdicts(results))
    for v in found:
        figure = "no row" if v.figure is None else f"{v.figure:.3g}"
        mark = "[green]reached" if v.reached else "[red]missed"
        table.add_row(v.bar.group, v.bar.what, f"{v.bar.bound:g}", figure, str(v.rows), str(v.old or ""), v.worst, mark)
    Console(width=150).print(table)
    return 0 if all(v.reached for v in found) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "h200"))
