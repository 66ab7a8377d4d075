"""What is recorded of a program, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

FEW_STEPS = 20
"""Fewer of one run give no verdict on another's."""
# Kineto holds about 350 bytes per event while it records (640 with shapes and without stacks), and up to
# 5.6 kB while it writes the trace: at most 1.1 GB for 200,000 events.
BYTES_AN_EVENT = 350
DESCRIPTION, DESCRIBED_BY = "tilewright description", "tilewright described by"
"""Keys with the same value in the headers of two traces: the detailed step, and the light steps it describes."""


@dataclass(frozen=True)
class Detail:
    """The details recorded of each event. `docs/profile.md` has the overhead of each."""

    shapes: bool = True
    stacks: bool = True
    memory: bool = True


@dataclass(frozen=True)
class RecordingPlan:
    """The steps of a recording, in this order, and what is recorded of them.

    `wait` steps run without a profiler, and all but the first are timed; `warmup` steps are recorded to count
    their events; one more runs without a profiler; up to `active` steps are kept; then `FEW_STEPS`, and `timed`
    seconds of them, are timed one by one without a profiler, for `tilewright diff`. `events` bounds the events recorded
    in one process: if the steps exceed it fewer are kept, and if one step exceeds it only its beginning.
    With `whole` there are no steps: recording starts at once and ends at the bound.

    Recording every operator of the host can double the time of a step that launches many kernels. If the process
    uses a GPU, `light` therefore records only the device, the CUDA calls and the ranges of the kept steps,
    after one extra step in which the profiler starts, and keeps the last warm-up step, recorded in detail, as
    their description. Otherwise the warm-up is discarded.
    """

    wait: int = 5
    warmup: int = 2
    active: int = 3
    events: int = 200_000
    detail: Detail = field(default_factory=Detail)
    layers: bool = True
    whole: bool = False
    nvtx: bool = False
    light: bool = True
    timed: float = 2.0


@dataclass(frozen=True)
class ProcessorTime:
    """Microseconds of processor time in a step.

    Of the thread that makes the steps, of Python's other threads, of which `other` names the busiest with its line, and
    of the processes that the program started."""

    thread_us: float
    other_us: float = 0.0
    other: str = ""
    workers: int = 0
    workers_us: float = 0.0
    workers_queued_us: float = 0.0
    """How long they could have run, and had no processor."""


@dataclass
class Recording:
    """The recording of one process; times in seconds, those of a step in microseconds of wall-clock time."""

    plan: RecordingPlan
    trace: Path | None = None
    """None if nothing was kept: the program ended too early, or Nsight Systems records."""
    description: Path | None = None
    """The trace of a step recorded in detail, if those of `trace` are light."""
    events: int = 0
    steps_seen: int = 0
    """Steps that ended between the recorder's start and stop, recorded or not."""
    steps_kept: int = 0
    """Whole steps in the trace; 0 if it holds a part of a step, or a program without steps."""
    step_events: int = 0
    """Events of one step, counted in the warm-up; an estimate if the warm-up reached the bound."""
    seconds_kept: float = 0.0
    seconds: float = 0.0
    """From the recorder's start to its stop."""
    bare_us: float | None = None
    recorded_us: float | None = None
    recorded_thread_us: list[float] = field(default_factory=list)
    """Processor time of the thread that makes the steps, in each kept one."""
    recorded_queued_us: list[float] = field(default_factory=list)
    """How long it could have run, and had no processor; empty where the system does not tell."""
    timed_us: list[float] = field(default_factory=list)
    """Each step after those that were kept."""
    timed_queued_us: float | None = None
    """How long their thread could have run in these, and had no processor; None where the system does not tell."""
    processors: ProcessorTime | None = None
    """In a bare step."""
    beside: str = ""
    """Another thread of Python's, and the line of the user's at which it is most often while steps are made."""
    cut: bool = False
    """The bound was reached before the end of a step, or of a program recorded as a whole."""
    compiling_seconds: float = 0.0
    """Of the kept steps, on the threads that compiled; not in `recorded_us`."""
    compiled_in: list[int] = field(default_factory=list)
    """The kept steps, by number, in which PyTorch compiled."""
    lines_ended_early: bool = False
    """There were more source lines than are kept; what ran after them has none."""
    failed: str = ""
    """Why the recorder gave up, if it did; it keeps what it had recorded."""
    gave_way: bool = False
    """The program started another profiler, of PyTorch's or tilewright's, and the recording ended there."""
