"""`bench` of a case: its implementations in one interleaved race."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from tilewright.records import progress
from tilewright.records.case import Case
from tilewright.records.errors import CaptureError, UsageError, VerificationError
from tilewright.records.measurement import Direction, Measurement, Verified
from tilewright.records.program import Program
from tilewright.verbs.subject import Subject

PEERS = ("eager", "inductor")
REPLAYED = ("inductor-reduce-overhead", "tilewright-reduce-overhead")
"""Implementations that become CUDA graphs, on a GPU only. A graph keeps its memory between calls, so no call has a
peak."""
BENCH_IMPLS = ("eager", "eager-sdpa", "inductor", "inductor-out", "tilewright", *REPLAYED)
CALLS_UNTIL_REPLAYED = 3


def bench_case(
    case: Case,
    *,
    suite: str,
    impls: Sequence[str] = (),
    device: str = "cpu",
    seconds: float = 20.0,
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[Program, list[Measurement]]:
    """Time the implementations of `case` in one interleaved run, after each was compared with float64.

    `impls` are of `BENCH_IMPLS`; default all that the case allows. Raises UsageError for another
    name, VerificationError where the numbers contract does not hold.
    """
    from tilewright.compile.price import price_case
    from tilewright.hardware.profiles import local_profile
    from tilewright.hardware.target import Target
    from tilewright.verbs.pieces import program_in_pieces

    unknown = [name for name in impls if name not in BENCH_IMPLS]
    if unknown:
        raise UsageError(f"no implementation {', '.join(unknown)}; known: {', '.join(BENCH_IMPLS)}")
    tell("capturing")
    profile = local_profile(device=device)
    try:
        program = price_case(case, Target(profile)).program
        subject = Subject(case, device)
    except CaptureError as error:
        subject = Subject(case, device)
        program = program_in_pieces(subject, profile, error)
    wanted = [name for name in impls or BENCH_IMPLS if name in subject.functions]
    tell("verifying")
    worst: dict[str, Verified] = {}
    notes: dict[str, str] = {}
    for impl in dict.fromkeys(("tilewright", *wanted)):
        for _ in range(CALLS_UNTIL_REPLAYED if impl in REPLAYED else 1):
            subject.compile(impl)
        verified = subject.verified(impl)
        if broken := ", ".join(v.tensor for v in verified if not v.ok):
            if impl.startswith("tilewright"):
                raise VerificationError(f"{case.name}: the numbers contract is broken for {broken}")
            notes[impl] = f"outside the numbers contract: {broken}"
        if verified:
            worst[impl] = max(verified, key=lambda v: v.error)
    tell(f"timing {', '.join(wanted)}")
    rows = measure(subject, program, suite=suite, seconds=seconds, impls=wanted)
    return program, [
        replace(row, error=known.error, eager_error=known.eager_error, note=notes.get(row.impl, ""))
        if (known := worst.get(row.impl))
        else row
        for row in rows
    ]


def measure(
    subject: Subject, program: Program, *, suite: str, seconds: float, impls: Sequence[str] = (*PEERS, "tilewright")
) -> list[Measurement]:
    """One interleaved run of all implementations of a case, with the peak memory of each."""
    from tilewright.hardware.ceilings import device_name
    from tilewright.hardware.detect import detect
    from tilewright.measure.memory import peak_bytes
    from tilewright.measure.racing.results import environment, measurement, sources_of_programs
    from tilewright.measure.timing.benchmark import benchmark

    direction: Direction = "fwd+bwd" if subject.case.training else "infer"
    calls = {impl: partial(subject.call, impl) for impl in impls}
    for count, call in enumerate(calls.values()):
        progress.tell("implementations compiled", count, len(calls))
        call()
    progress.tell("implementations compiled", len(calls), len(calls))
    peaks = {impl: None if impl in REPLAYED else peak_bytes(call, subject.device) for impl, call in calls.items()}
    timings = benchmark(calls, device=subject.device, max_seconds=seconds, min_repeats=7)
    where = environment(device_name(detect(), subject.device))
    launches = [o for o in program.operators if o.stage == "after"]
    nbytes = sum(o.cost.bytes for o in launches)
    flops = sum(o.cost.flops for o in launches)
    predicted = sum(o.predicted_us or 0.0 for o in launches)
    return [
        measurement(
            timing,
            where,
            suite=suite,
            case=case_label(subject.case),
            impl=impl,
            direction=direction,
            nbytes=nbytes if impl == "tilewright" else None,
            flops=flops,
            predicted_us=predicted if impl == "tilewright" else None,
            peak_bytes=peaks[impl],
            made_from=sources_of_programs(impl),
        )
        for impl, timing in timings.items()
    ]


def case_label(case: Case) -> str:
    """`D768 H12 B2 S1024 float32`: the case's dimensions and the dtype of its first input."""
    sizes = " ".join(f"{name}{size}" for name, size in case.named_sizes().items())
    dtype = next((spec.dtype for spec in case.specs()), "")
    return f"{sizes} {dtype}".strip()
