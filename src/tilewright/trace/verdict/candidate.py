"""What could make a step slow, the step that it is a part of, and the sentences on it."""

from __future__ import annotations

from dataclasses import dataclass

MOST_WORKERS = 8


@dataclass(frozen=True)
class Candidate:
    """What could make the host slow, in milliseconds of the mean bare step; `inner_…` is most of what it spends."""

    file_id: int
    kind: str
    source: str | None
    what: str
    ms: float
    calls: float
    inner_what: str | None
    inner_source: str | None
    inner_ms: float | None


@dataclass(frozen=True)
class Step:
    """The mean bare step of a process, and what tells its remedies apart."""

    bare_ms: float
    busy_ms: float = 0.0
    """The time in which its device works: no gain of the host is more than the rest."""
    has_workers: bool = False
    cores: int = MOST_WORKERS
    reason: str = ""
    """Why PyTorch compiled again, in its words."""
    threads: int = 0
    """PyTorch's threads for one operator, if the run knows them."""
    workers: int = 0
    """Processes of DataLoaders, and the processor time of all of them in a step."""
    workers_ms: float = 0.0
    workers_queued_ms: float = 0.0
    """How long they had no processor, since others used it."""
    tf32_times: float = 1.0
    """How many times as fast as fp32 its device multiplies matrices in TF32."""
    bf16_times: float = 1.0
    beside: str = ""
    """Another thread, and the line at which it is most often."""
    restarts: bool = False
    """Whether most of the time for data is in steps in which a DataLoader starts."""


@dataclass(frozen=True)
class Advice:
    """The sentences of a cause, without shares; `win_ms` is what the action saves of a step."""

    slow: str
    why: str
    action: str
    win_ms: float


def spent(ms: float) -> str:
    """
    >>> spent(12.345), spent(0.0123), spent(12345.6)
    ('12.3 ms', '12.3 µs', '12.3 s')
    """
    value, unit = (ms / 1e3, "s") if ms >= 1e3 else (ms, "ms") if ms >= 0.1 else (ms * 1e3, "µs")
    return f"{value:.3g} {unit}"


def at(source: str | None) -> str:
    return f" at {source}" if source else ""


def share(ms: float, whole: float) -> str:
    """
    >>> share(1, 3), share(0.1, 100)
    ('33 %', '0.1 %')
    """
    percent = 100 * ms / whole if whole else 0.0
    return f"{percent:.0f} %" if percent >= 1 else f"{percent:.1f} %"
