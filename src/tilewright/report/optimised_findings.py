"""Sentences on an optimised case: the outcome, what is still slow, why, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.records.measurement import Ceiling, Measurement
from tilewright.records.program import Operator, Program, Region
from tilewright.report.quantity import duration, nbytes, ratio

VECTOR = 8
"""16-bit elements of 16 bytes, at whose multiples the fast kernels of libraries need rows to begin."""
_NAMED = 3
_DISTURBED = 1.5
"""Times that launches may take, timed one by one, of the program that they make up; caches and clocks explain less."""
_FAR_OFF = 2
"""Times that a prediction may be off before it is worth a sentence."""


NOISE = 0.02
"""Medians of one run nearer than this are equal."""


def outcome(rows: Sequence[Measurement]) -> list[str]:
    """The sentence on what was timed, and how much faster or slower tilewright is than each peer; none without it."""
    ours = next((row for row in rows if row.impl == "tilewright"), None)
    if ours is None:
        return []
    what = "Inference (--training adds backward)" if ours.direction == "infer" else "Training (forward and backward)"
    compared = " and ".join(_compared(ours, row) for row in rows if row is not ours)
    return [f"{what}: tilewright takes {duration(ours.median_us)}" + (f", {compared}." if compared else ".")]


def _compared(ours: Measurement, peer: Measurement) -> str:
    """`2.10× faster than eager (252 µs)`; `1.05× the speed of inductor (106 µs; within the noise)`, where a median lies
    in the spread of the other."""
    faster = peer.median_us / ours.median_us
    spreads = (ours.p20_us <= peer.median_us <= ours.p80_us, peer.p20_us <= ours.median_us <= peer.p80_us)
    if any(spreads) or abs(faster - 1) <= NOISE:
        return f"{ratio(faster)} the speed of {peer.impl} ({duration(peer.median_us)}; within the noise)"
    how = f"{ratio(faster)} faster" if faster > 1 else f"{ratio(1 / faster)} slower"
    return f"{how} than {peer.impl} ({duration(peer.median_us)})"


def findings(program: Program, rows: Sequence[Measurement] = (), ceilings: Sequence[Ceiling] = ()) -> list[str]:
    """Sentences on the launches of the plan, whose times were measured; none where none was. `rows`: the whole case;
    `ceilings`: of its device."""
    launches = [op for op in program.operators if op.stage == "after" and op.measured_us and not op.is_view]
    if not launches:
        return []
    whole = sum(map(_time, launches))
    slowest = sorted(launches, key=_time, reverse=True)[:_NAMED]
    named = ", ".join(f"{op.name} {duration(_time(op))} ({_time(op) / whole:.0%})" for op in slowest)
    many = f"all {len(launches):,} launches" if len(launches) > 1 else "the one launch"
    sentences = [f"Of the {duration(whole)} of {many} most goes to {named}."]
    together = next((row.median_us for row in rows if row.impl == "tilewright"), whole)
    if disturbed := whole > _DISTURBED * together:
        sentences.append(
            f"Timed one by one they take {ratio(whole / together)} as long as in the program, so other programs used "
            "this machine meanwhile: times of single launches are too long; run it again when the machine is idle."
        )
    elif together > _DISTURBED * whole:
        sentences.append(
            f"A call takes {duration(together)}. The rest is time of the host, or of other programs on this machine."
        )
    if unknown := [op for op in launches if op.floor_us is None]:
        longest = max(unknown, key=_time)
        sentences.append(
            f"{sum(map(_time, unknown)) / whole:.0%} of it is in operators of which no floor is known, most in "
            f"{longest.name}."
        )
    worst, lost = max(launches, key=_lost), sum(map(_lost, launches))
    if round(100 * lost / whole):
        sentences.append(
            f"{lost / whole:.0%} of that time is above the floors, most in {worst.name}, which takes "
            f"{ratio(_time(worst) / worst.floor_us if worst.floor_us else None)} its floor"
            + (f" and is {worst.bound}." if worst.bound else ".")
        )
        sentences.append(" ".join([_advice(worst, program.regions, ceilings), *_refused(program)]))
    elif len(unknown) < len(launches):
        sentences.append("The others are at their floors." if unknown else "All are at their floors.")
    return sentences if disturbed else [*sentences, *_mispredicted(launches)]


def _time(op: Operator) -> float:
    return op.measured_us or 0.0


def _lost(op: Operator) -> float:
    """The time above the floor."""
    return 0.0 if op.floor_us is None else max(_time(op) - op.floor_us, 0.0)


def _mispredicted(launches: Sequence[Operator]) -> list[str]:
    """How many predictions are off, and that which is off by most time: a factor says little of a short launch."""
    priced = [op for op in launches if op.predicted_us]
    wrong = [op for op in priced if max(_time(op) / _predicted(op), _predicted(op) / _time(op)) > _FAR_OFF]
    if not wrong:
        return []
    worst = max(wrong, key=lambda op: abs(_time(op) - _predicted(op)))
    return [
        f"{len(wrong):,} of {len(priced):,} predictions are off by more than {_FAR_OFF} times. The largest error is "
        f"{worst.name}'s: {duration(_predicted(worst))} predicted, {duration(_time(worst))} measured. Predictions of "
        "such kernels are not fitted to this device yet; `tilewright doctor --kernels` does that."
    ]


def _predicted(op: Operator) -> float:
    return op.predicted_us or 0.0


def _advice(op: Operator, regions: Sequence[Region], ceilings: Sequence[Ceiling]) -> str:
    if op.bound == "launch-bound":
        return (
            "Only its launch takes time: give it a larger batch, or on a GPU let CUDA graphs launch all kernels at "
            "once (`mode='reduce-overhead'`)."
        )
    region = next((one for one in regions if one.name == op.region), None)
    if region is not None and region.language == "c++":
        query = f"SELECT source_code FROM region WHERE name = '{region.name}'"
        return f'It is a generated C++ kernel: `tilewright sql "{query}"` prints it.'
    if op.region is not None:
        return f"It is a generated kernel: `tilewright kernel` with `--impl tilewright` shows what limits {op.name}."
    ways = ["a lower precision"] if _gains_from_16_bits(op.dtype, ceilings) else []
    if op.shape and op.shape[-1] % VECTOR:
        ways.append(f"rows whose length is a multiple of {VECTOR}")
    faster = f": {' or '.join(ways)} may be faster" if ways else ": dtype and sizes suit its kernels, so leave both"
    return f"PyTorch's library runs {op.name}{faster}."


def _gains_from_16_bits(dtype: str, ceilings: Sequence[Ceiling]) -> bool:
    """Whether products of `dtype` are slower than those of 16 bits; a CPU without units for these is no faster."""
    rates = {row.dtype: row.value for row in ceilings if row.kind == "matmul"}
    narrow = max(rates.get("bfloat16", 0.0), rates.get("float16", 0.0))
    return dtype == "float64" or (dtype == "float32" and (not narrow or narrow > rates.get(dtype, 0.0)))


def _refused(program: Program) -> list[str]:
    """The fusion that was not made and would have saved most."""
    refused = [one for one in program.decisions if one.verdict != "taken" and one.bytes_saved]
    if not refused:
        return []
    largest = max(refused, key=lambda one: one.bytes_saved or 0)
    return [
        f"The largest fusion not made, {largest.producer} → {largest.consumer}, would save "
        f"{nbytes(largest.bytes_saved or 0)}: {largest.reason}."
    ]
