"""The table of `benchmarks/models.py`: tilewright beside Inductor, by calls and by replay, losers first."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tilewright.records.measurement import Measurement

PAIRS = {"calls": ("tilewright", "inductor"), "replay": ("tilewright-reduce-overhead", "inductor-reduce-overhead")}
"""Entrants that are compared: launched call by call, or replayed as CUDA graphs."""
HEADINGS = (
    "case",
    "by",
    "eager ms",
    "Inductor ms",
    "ours ms",
    "ratio",
    "GPU ms",
    "host ms",
    "launches",
    "MB",
    "first s",
)


@dataclass(frozen=True)
class Line:
    """One case: eager, the peer and tilewright by the same means."""

    case: str
    kind: str
    by: str
    eager: Measurement | None
    peer: Measurement
    ours: Measurement

    @property
    def ratio(self) -> float:
        """How many times as fast as the peer."""
        return self.peer.median_us / self.ours.median_us

    @property
    def memory(self) -> float | None:
        """Peak of memory as a multiple of the peer's."""
        if not self.ours.peak_bytes or not self.peer.peak_bytes:
            return None
        return self.ours.peak_bytes / self.peer.peak_bytes

    @property
    def gpu(self) -> float | None:
        """How many times as fast as the peer in GPU time."""
        return self.peer.gpu_us / self.ours.gpu_us if self.ours.gpu_us and self.peer.gpu_us else None

    @property
    def of_eager(self) -> float | None:
        return self.eager.median_us / self.ours.median_us if self.eager else None

    @property
    def first(self) -> float | None:
        """Time of the first call as a multiple of the peer's."""
        ours, peer = self.ours.first_call_us, self.peer.first_call_us
        return ours / peer if ours and peer else None


def lines(rows: Iterable[Measurement]) -> list[Line]:
    """Tilewright beside its peer wherever both were measured, the slowest beside its peer first."""
    found = {(row.case, row.direction, row.impl): row for row in rows}
    made = []
    for case, direction, impl in found:
        for by, (mine, other) in PAIRS.items():
            if impl == mine and (peer := found.get((case, direction, other))):
                kind = "train" if direction == "step" else "decode" if " decode " in case else "infer"
                ours, eager = found[case, direction, impl], found.get((case, direction, "eager"))
                made.append(Line(case, kind, by, eager, peer, ours))
    return sorted(made, key=lambda line: line.ratio)


def table(rows: Iterable[Measurement]) -> str:
    """One line a case, the geometric means of each kind, and notes on results outside the contract."""
    rows = list(rows)
    made = lines(rows)
    cells = [HEADINGS, *(_cells(line) for line in made)]
    widths = [max(len(cell) for cell in column) for column in zip(*cells, strict=True)]
    text = [
        "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ]
    text += [_means(kind, by, made) for kind in ("infer", "train", "decode") for by in PAIRS if _of(kind, by, made)]
    text += [f"{row.case} {row.direction} {row.impl}: {row.note}" for row in rows if row.note]
    return "\n".join(text)


def _cells(line: Line) -> tuple[str, ...]:
    ours, peer = line.ours, line.peer
    model, _, rest = line.case.partition(" ")
    return (
        f"{model} {line.kind} {rest.removeprefix('decode ')}",
        line.by,
        _ms(line.eager.median_us if line.eager else None),
        _ms(peer.median_us),
        _ms(ours.median_us),
        f"{line.ratio:.2f}",
        f"{_ms(peer.gpu_us)} / {_ms(ours.gpu_us)}",
        f"{_ms(peer.host_us)} / {_ms(ours.host_us)}",
        f"{_or_dash(peer.launches)} / {_or_dash(ours.launches)}",
        f"{_scaled(peer.peak_bytes, 1e6)} / {_scaled(ours.peak_bytes, 1e6)}",
        f"{_scaled(peer.first_call_us, 1e6)} / {_scaled(ours.first_call_us, 1e6)}",
    )


def _ms(us: float | None) -> str:
    return "–" if us is None else f"{us / 1e3:.2f}"


def _scaled(value: float | None, unit: float) -> str:
    return "–" if value is None else f"{value / unit:.1f}"


def _or_dash(value: int | None) -> str:
    return "–" if value is None else str(value)


def _of(kind: str, by: str, made: Sequence[Line]) -> list[Line]:
    return [line for line in made if line.kind == kind and line.by == by]


def _means(kind: str, by: str, made: Sequence[Line]) -> str:
    """Geometric means and the worst of each figure beside the peer."""
    found = _of(kind, by, made)
    figures: dict[str, tuple[Callable[[Line], float | None], Callable[[list[float]], float]]] = {
        "× Inductor": (lambda line: line.ratio, min),
        "× eager": (lambda line: line.of_eager, min),
        "× in GPU time": (lambda line: line.gpu, min),
        "of its memory": (lambda line: line.memory, max),
        "of its first call": (lambda line: line.first, max),
    }
    parts = []
    for name, (figure, worst) in figures.items():
        values = [value for line in found if (value := figure(line)) is not None]
        if values:
            parts.append(f"{statistics.geometric_mean(values):.2f} {name} (worst {worst(values):.2f})")
    return f"{kind}, {by}, {len(found)} cases: " + ", ".join(parts)
