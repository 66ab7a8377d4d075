"""A document on fused attention and on tiles: what fusion saves, and which program owns which rows.

tilewright claims --only "F*"
"""

from __future__ import annotations

from functools import partial

import torch

from tilewright.hardware.geometry import KernelView, read, tiles_of
from tilewright.hardware.profiles import profile_for
from tilewright.measure.timing.benchmark import Timing
from tilewright.records.case import Case
from tilewright.records.program import Operator, Program
from tilewright.report.quantity import duration

from .claim import (
    Claim,
    Document,
    Finding,
    close,
    elsewhere,
    equal,
    holds,
    percent,
    slower,
)  # fmt: skip
from .lab import Lab, after, before, flops, named, nbytes

S, D = 4096, 16
KIB = 1024


def batch(lab: Lab) -> int:
    """8 fits their figure for memory; a CPU takes one of them."""
    return 8 if lab.on_gpu else 1


def case(lab: Lab, *, training: bool) -> Case:
    from dataclasses import replace

    return replace(lab.example("attention.py").case(B=batch(lab), N=S, d=D, name="attention d16"), training=training)


def program(lab: Lab) -> Program:
    return lab.program(f"attention.py:case(B={batch(lab)}, N={S}, d={D})", case=case(lab, training=False))


def subjects(lab: Lab) -> dict[str, partial[None]]:
    """The four calls: naive and fused, inference and training."""

    def make() -> dict[str, partial[None]]:
        from tilewright.verbs import Subject

        infer, train = (Subject(case(lab, training=training), lab.device) for training in (False, True))
        impls = {"naive": "eager", "fused": "tilewright"}
        return {
            f"{name} {kind}": partial(of.call, impl)
            for kind, of in (("forward", infer), ("step", train))
            for name, impl in impls.items()
        }

    return lab.once(f"tilewright bench examples/attention.py:case(B={batch(lab)}, N={S}, d={D})", make)


def times(lab: Lab) -> dict[str, Timing]:
    return lab.race("attention, naive and fused, forward and forward with backward", subjects(lab))


def peak(lab: Lab, name: str) -> float:
    """MB."""
    return lab.peak(f"attention, {name}", subjects(lab)[name]) / 1e6


def ms(lab: Lab, name: str) -> float:
    """Milliseconds; backward is a training step less a forward."""
    impl, kind = name.split()
    if kind != "backward":
        return times(lab)[name].median_us / 1e3
    return (times(lab)[f"{impl} step"].median_us - times(lab)[f"{impl} forward"].median_us) / 1e3


def gain(lab: Lab, kind: str) -> Finding:
    naive, fused = ms(lab, f"naive {kind}"), ms(lab, f"fused {kind}")
    return elsewhere(fused < naive, f"{naive:.2f} → {fused:.2f} ms, {naive / fused:.1f} ×")


def split(lab: Lab, operators: list[Operator]) -> tuple[float, float]:
    """Milliseconds of arithmetic and of memory at the measured rates of this device."""
    rates = lab.ceilings()
    compute = 0.0
    for it in operators:
        rate = rates["matmul float32"] if it.operator_class in ("compute", "library") else rates["vector"]
        compute += it.cost.flops / rate / 1e9
    return compute, nbytes(operators) / rates["copy"] / 1e6


def predicted(lab: Lab) -> Finding:
    compute, memory = split(lab, before(program(lab)))
    measured = ms(lab, "naive forward")
    ours = f"{compute:.2f} + {memory:.2f} = {compute + memory:.2f} ms; measured {measured:.2f} ms"
    return holds(abs((compute + memory) / measured - 1) < 0.2, ours)


def sum_or_maximum(lab: Lab) -> Finding:
    measured = ms(lab, "naive forward")
    each = [split(lab, [it]) for it in before(program(lab))]
    added, most = sum(map(sum, each)), sum(map(max, each))
    ours = f"sums {added:.2f}, maxima {most:.2f}, measured {measured:.2f} ms"
    return holds(abs(added - measured) < abs(most - measured), ours)


def memory_share(lab: Lab) -> Finding:
    compute, memory = split(lab, before(program(lab)))
    return elsewhere(memory > compute, f"{percent(memory / (compute + memory))} here by the same sum")


def flops_kept(lab: Lab) -> Finding:
    shares = flops(named(before(program(lab)), "bmm")) / flops(after(program(lab)))
    faster = ms(lab, "fused forward") < ms(lab, "naive forward")
    return holds(abs(shares - 1) < 0.2 and faster, f"products {percent(1 / shares)} of FLOPs after; faster: {faster}")


def steps(lab: Lab) -> Finding:
    count = batch(lab) * S * S
    found = {it.name.rstrip("_1"): it.cost.flops for it in before(program(lab))}
    ours = {name: value / count for name, value in found.items()}
    return holds(
        ours["bmm"] == 2 * D and ours["div"] == 1, ", ".join(f"{name} {it:g}·B·S²" for name, it in ours.items())
    )


def of_2080ti(lab: Lab) -> Finding:
    profile = lab.once("the datasheet of the RTX 2080 Ti", lambda: profile_for("2080ti"))
    right = abs(profile.vector_TFLOPs / 19.5 - 1) < 0.05 and abs(profile.copy_GBps / 616 - 1) < 0.05
    return holds(right, f"{profile.vector_TFLOPs:g} TFLOP/s, {profile.copy_GBps:g} GB/s")


def per_number(lab: Lab) -> Finding:
    read_ps, compute_ps = lab.once("arithmetic on their rates", lambda: (4 / 616e9 * 1e12, 1 / 19.5e12 * 1e12))
    right = abs(read_ps / 5000 - 1) < 0.2 and abs(compute_ps / 50 - 1) < 0.2
    return holds(right, f"{read_ps:.1f} and {compute_ps:.3f} ps, {read_ps / compute_ps:.0f} ×")


def waits(lab: Lab) -> Finding:
    found = before(lab.program("transformer_block.py:block_large"))
    shares = [split(lab, [it]) for it in found]
    waiting = sum(max(it) for it in shares if it[1] > it[0]) / sum(map(max, shares))
    return holds(waiting > 0.5, f"{percent(waiting)} of a Transformer block's floor")


def bytes_saved(lab: Lab) -> Finding:
    saved = 1 - nbytes(after(program(lab))) / nbytes(before(program(lab)))
    return holds(0.5 <= saved <= 0.7, f"−{percent(saved)}")


def three_kernels(lab: Lab) -> Finding:
    found = before(program(lab))
    return holds(len(found) == 3, f"{len(found)}: {', '.join(it.name for it in found)}")


def equal_training(lab: Lab) -> Finding:
    naive, fused = peak(lab, "naive step"), peak(lab, "fused step")
    return close(fused / naive, 1, f" × naive: {naive:,.0f} → {fused:,.1f} MB")


def inference_saved(lab: Lab) -> Finding:
    naive, fused = peak(lab, "naive forward"), peak(lab, "fused forward")
    return holds(0.5 <= 1 - fused / naive <= 0.7, f"{naive:,.0f} → {fused:,.2f} MB, −{percent(1 - fused / naive)}")


def training_memory(lab: Lab) -> Finding:
    naive, fused = peak(lab, "naive step"), peak(lab, "fused step")
    return elsewhere(fused >= naive, f"{naive:,.0f} → {fused:,.1f} MB")


def summary(lab: Lab) -> Finding:
    old, new = split(lab, before(program(lab))), split(lab, after(program(lab)))
    ours = {
        "FLOPs": flops(after(program(lab))) / flops(before(program(lab))),
        "memory time": new[1] / old[1],
        "total": ms(lab, "fused forward") / ms(lab, "naive forward"),
        "training memory": peak(lab, "fused step") / peak(lab, "naive step"),
        "inference memory": peak(lab, "fused forward") / peak(lab, "naive forward"),
    }
    theirs = {"FLOPs": 1.0, "memory time": 0.35, "total": 0.42, "training memory": 1.0, "inference memory": 0.3}
    right = all(abs(ours[name] / theirs[name] - 1) <= 0.2 for name in theirs)
    return holds(right, ", ".join(f"{name} {percent(value)}" for name, value in ours.items()))


def both_faster(lab: Lab) -> Finding:
    found = times(lab)
    forward, step = (slower(found, f"naive {kind}", f"fused {kind}") for kind in ("forward", "step"))
    ours = f"{forward.ours}; {step.ours}"
    return holds(forward.verdict == step.verdict == "reproduced", ours)


def tiles(lab: Lab) -> KernelView:
    (view,) = lab.kernels("weighted_sum", "1000x512", "tilewright-16x64", walk=True)
    return view


def rows_of(lab: Lab, program: int) -> tuple[int, int]:
    walk = next(walk for walk in tiles(lab).walks if walk.program[0] == program)
    return next(access.ranges[0] for access in walk.accesses if access.operand == "x")


def grid_follows(lab: Lab) -> Finding:
    view = tiles(lab)
    grids = {1000 // 16 + 1: view.launch.grid[0]} | {
        -(-1000 // it.change["ROWS"]): it.launch.grid[0]
        for it in view.alternatives
        if it.launch is not None and "ROWS" in it.change
    }
    ours = f"{view.launch.grid[0]} blocks; other tiles: {', '.join(map(str, list(grids.values())[1:]))}"
    return holds(all(wanted == found for wanted, found in grids.items()) and len(grids) > 1, ours)


def columns(lab: Lab) -> Finding:
    walk = tiles(lab).walks[0]
    spans = [access.ranges[1] for access in walk.accesses if access.operand == "x"]
    right = spans == [(64 * i, 64 * i + 63) for i in range(8)]
    return holds(
        right and tiles_of(walk) == 8,
        f"{tiles_of(walk)}: columns {spans[0][0]}–{spans[0][1]} … {spans[-1][0]}–{spans[-1][1]}",
    )


def round_robin(lab: Lab) -> Finding:
    """On which multiprocessor each program ran."""
    ids = lab.once("the %smid of 264 programs", lambda: lab.example("claims/triton_kernels.py").multiprocessors(264))
    ours = f"programs 0–7 ran on SMs {', '.join(map(str, ids[:8]))}; {len(set(ids))} SMs in all"
    return holds(ids == [i % len(set(ids)) for i in range(len(ids))], ours)


def tile_loop(lab: Lab) -> Finding:
    """The loop of the document in PyTorch, against float64."""

    def make() -> float:
        x, w = torch.randn(1000, 512, device=lab.device), torch.randn(512, device=lab.device)
        total = torch.zeros(1000, device=lab.device)
        for start in range(0, 512, 64):
            total += (x[:, start : start + 64] * w[start : start + 64]).sum(1)
        exact = x.double() @ w.double()
        return float((total - exact).norm() / exact.norm())

    error = lab.once("the loop over 8 tiles against float64", make)
    return holds(error < 4 * 2**-23, f"relative error {error:.1e}")


def all_at_once(lab: Lab) -> Finding:
    waves = tiles(lab).waves
    assert waves is not None
    return holds(waves.turns == 1, f"{waves.turns} wave of {waves.slots:,} slots on an H200")


def fill_the_device(lab: Lab) -> Finding:
    waves = tiles(lab).waves
    assert waves is not None
    return holds(waves.programs >= 4 * waves.sms, f"{waves.programs} programs for {waves.sms} SMs")


def row_fits(lab: Lab) -> Finding:
    limits = lab.once("the limits of the H200", lambda: profile_for("h200").limits)
    assert limits is not None
    return holds(
        limits.registers * 4 < 16 * 512 * 4, f"16×512 fp32 are 32 KiB of {limits.registers * 4 // KIB} KiB of registers"
    )


def in_shared(lab: Lab) -> Finding:
    view = tiles(lab)
    x_once = sum(read(walk) for walk in view.walks[:1]) == 16 * 512 + 512
    ours = f"{view.launch.shared_bytes} B of shared memory for a tile of {16 * 64 * 4:,} B; x read once: {x_once}"
    return holds(view.launch.shared_bytes >= 16 * 64 * 4, ours)


def hierarchy(lab: Lab) -> Finding:
    view = tiles(lab)
    return equal(view.launch.threads // int(view.launch.constants["num_warps"]), 32)


def other_tiles(lab: Lab) -> Finding:
    found = lab.bench("weighted_sum", "1000x512", "fp32", "tilewright", "tilewright-16x64")
    ours = ", ".join(f"{name} {duration(row.median_us)}" for name, row in found.items())
    return holds(found["tilewright"].p80_us < found["tilewright-16x64"].p20_us, ours)


CLAIMS = (
    Claim("F1", "Fusion keeps the FLOPs and saves time.", "FLOPs 100 %", flops_kept,
          "A flash kernel also rescales, and recomputes in backward."),
    Claim("F2", "FLOPs of each step.", "QKᵀ 2·B·S²·d, scale S²", steps,
          "A multiply-add is two FLOPs; exponentials are counted apart."),
    Claim("F3", "What an RTX 2080 Ti can do.", "19.5 TFLOP/s, 616 GB/s", of_2080ti, "19.5 is the A100's figure."),
    Claim("F4", "Reading a number takes 100 × as long as computing with it.", "5 ns and 0.05 ns", per_number,
          "Their own rates give picoseconds: both are off by about a thousand."),
    Claim("F5", "Most of the time waits for memory.", "–", waits, "Not where large products are most of the work."),
    Claim("F6", "Naive attention forward, d 16, S 4096.", "1281 ms",
          lambda lab: elsewhere(ms(lab, "naive forward") > ms(lab, "fused forward"),
          f"{ms(lab, 'naive forward'):.2f} ms"),
          "Batch, dtype and repeats are not stated; the direction is naive above fused."),
    Claim("F7", "Its time is arithmetic plus memory traffic.", "150 + 1130 = 1280 ms", predicted,
          "Their parts are round numbers; ours come from the measured ceilings."),
    Claim("F8", "Memory's share of it.", "88 %", memory_share, "1130 of 1280 is 88 %."),
    Claim("F9", "Fused attention forward.", "542 ms",
          lambda lab: elsewhere(ms(lab, "fused forward") < ms(lab, "naive forward"),
          f"{ms(lab, 'fused forward'):.2f} ms"),
          "The same setting as naive."),
    Claim("F10", "Savings of fusion: memory time and total.", "−65 %, −58 %",
          lambda lab: holds(*lab.once("arithmetic on their savings", lambda: (
              abs(1 - 390 / 1130 - 0.65) < 0.01 and abs(1 - 542 / 1281 - 0.58) < 0.01,
              f"−{percent(1 - 390 / 1130)}, −{percent(1 - 542 / 1281)}"))),
          "The figures of the document agree with each other."),
    Claim("F11", "Naive attention runs three kernels.", "3", three_kernels, "Its own table has the scaling apart."),
    Claim("F12", "The fused kernel writes neither scores nor weights, which halves the traffic or more.", "−50–70 %",
          bytes_saved, "Without N² tensors almost nothing is left."),
    Claim("F13", "Training needs both matrices, so fusing saves no memory.", "about equal", equal_training,
          "Backward can recompute them from one number per row."),
    Claim("F14", "At inference fusing saves memory.", "−50–70 %", inference_saved,
          "A flash kernel keeps no N² tensor, which is all that naive attention allocates."),
    Claim("F15", "Fused is faster forward.", "1281 → 542 ms, 2.4 ×", lambda lab: gain(lab, "forward"),
          "How much depends on bandwidth beside the matrix rate."),
    Claim("F16", "Fused is faster backward.", "4383 → 1861 ms, 2.4 ×", lambda lab: gain(lab, "backward"),
          "A training step less a forward pass."),
    Claim("F17", "Memory in training.", "1048 → 1049 MB", training_memory,
          "Two N² tensors at batch 8 in fp32 are 1074 MB."),
    Claim("F18", "Fused as a share of naive.",
          "FLOPs 100, memory time 35, total 42, training memory 100, inference memory 30 %", summary,
          "All five must agree within 20 %."),
    Claim("F19", "Time is FLOPs over rate plus bytes over bandwidth.", "a sum", sum_or_maximum,
          "The two overlap, so that a kernel's time is nearer to their maximum."),
    Claim("F20", "Fuse in training and at inference.", "–", both_faster, "Both races, outside their spread."),
    Claim("F21", "A block is the unit that the GPU schedules; the tile is chosen by the programmer.", "–", grid_follows,
          "The tile sets the grid: both are the programmer's."),
    Claim("F22", "1000×512 in tiles of 16×64.", "63 programs", lambda lab: equal(tiles(lab).launch.programs, 63),
          "⌈1000 / 16⌉."),
    Claim("F23", "A program walks its tiles one after another.", "8: columns 0–63 … 448–511", columns, "512 / 64."),
    Claim("F24", "Which program owns which rows.", "0: 0–15, 1: 16–31, 62: 992–999",
          lambda lab: equal([rows_of(lab, i) for i in (0, 1, 62)], [(0, 15), (16, 31), (992, 999)]),
          "The last has 8 rows, so it must check the bound."),
    Claim("F25", "All 63 run at once.", "63", all_at_once, "As many as fit; it depends on the GPU."),
    Claim("F26", "Programs are dealt to the multiprocessors in turn.", "SM0: 0, 8, 16, … of 8 SMs", round_robin,
          "No document of NVIDIA promises an order; each program reports its multiprocessor.", "cuda"),
    Claim("F27", "The loop over tiles computes the weighted sum.", "8 steps", tile_loop, "Compared with float64."),
    Claim("F28", "63 programs use the hardware fully.", "63", fill_the_device,
          "Another of the documents asks for four programs per SM."),
    Claim("F29", "A full row of tiles does not fit into fast memory.", "tens of KB", row_fits,
          "The whole matrix does not; 16 rows do."),
    Claim("F30", "Tiles go to shared memory, which cuts the traffic.", "–", in_shared,
          "They are loaded into registers; x is read once whatever the tile."),
    Claim("F31", "A warp has 32 threads.", "32", hierarchy, "Threads of the compiled kernel over its warps."),
    Claim("F32", "Choose tiles that stay in fast memory and enough blocks.", "–", other_tiles,
          "tilewright's own tiles give more programs than 16×64.", "cuda"),
)  # fmt: skip
DOCUMENT = Document("Fusion and tiles", "RTX 2080 Ti named; settings unstated", CLAIMS)
