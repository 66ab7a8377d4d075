"""The races in which another implementation is faster than tilewright's, by operator and implementation."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.summary import NOISE, OURS, Results
from benchmarks.todays import mark
from tilewright.bench.catalogue import SUITES
from tilewright.records.measurement import Measurement

NO_PEERS = ("cublas-bare", "generated")
"""They do less, or are the compiler's own."""


def slower_than(results: Results) -> dict[tuple[str, str, str], list[tuple[float, Measurement]]]:
    """By suite, direction and peer: the peer's time as a share of ours, and our row, where that is below the noise."""
    others = {
        (row.suite, row.direction, row.case, row.device, row.impl): row
        for row in results.rows
        if not row.impl.startswith(OURS) and row.impl not in NO_PEERS
    }
    found: dict[tuple[str, str, str], list[tuple[float, Measurement]]] = {}
    ours = {
        (row.suite, row.direction, row.case, row.device): row
        for row in results.rows
        if row.impl == OURS and row.suite in SUITES
    }
    for (suite, direction, case, device, impl), row in others.items():
        mine = ours.get((suite, direction, case, device))
        if mine is not None and (share := row.median_us / mine.median_us) < NOISE:
            found.setdefault((row.suite, row.direction, impl), []).append((share, mine))
    return found


def second(markdown: Callable[..., str], results: Results) -> str:
    """One line for each operator, direction and peer that is faster somewhere; the worst first."""
    lines = []
    for (name, direction, impl), races in sorted(slower_than(results).items(), key=lambda item: min(item[1])[0]):
        share, row = min(races, key=lambda race: race[0])
        raced = sum((r.suite, r.direction, r.impl) == (name, direction, impl) for r in results.rows)
        package = next((r.package for r in results.rows if (r.suite, r.impl) == (name, impl) and r.package), "")
        marked = f"{share:.2f}" + mark(row for _, row in races)
        lines.append([f"`{name}` {direction}", package or impl, f"{len(races)} of {raced}", marked, row.case])
    return markdown(["operator", "faster", "races", "its time / ours, at least", "at"], lines)
