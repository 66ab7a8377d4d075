"""The same homework's softmax as one Triton kernel.

tilewright claims --only "H4*"
"""

from __future__ import annotations

from tilewright.records.case import Case
from tilewright.report.quantity import duration

from .claim import Claim, Document, Finding, elsewhere, equal, holds
from .lab import Lab, Profile, after, before, nbytes

N, M = 100, 5000
SMALL = "naive_softmax.py:small"


def eager(lab: Lab) -> Profile:
    """200 calls of the five steps on 100×5000."""
    return lab.profile(SMALL, 200)


def triton(lab: Lab) -> Profile:
    """200 calls of one Triton kernel on the same."""
    softmax = lab.example("claims/triton_kernels.py").softmax
    made = Case("triton_softmax", lambda: softmax, lab.case(SMALL).inputs, training=False)
    return lab.profile("the Triton kernel on 100×5000", 200, case=made)


def one_kernel(lab: Lab) -> Finding:
    faster = triton(lab).table.device_ns < eager(lab).table.device_ns
    return elsewhere(triton(lab).launches == 200 and faster, duration(triton(lab).table.device_ns / 200e3))


def triton_host(lab: Lab) -> Finding:
    host = triton(lab).value(
        "SELECT avg(dur) / 1e3 FROM slice WHERE name = 'phase forward' AND category = 'user_annotation'"
    )
    launch = triton(lab).launch_us
    return holds(host > 2 * launch, f"{host:.1f} µs of host time per call, {launch:.1f} of it the launch")


def allocation(lab: Lab) -> Finding:
    row = triton(lab).operator("empty_like")
    each, kernel = row.cpu_total / row.calls / 1e3, triton(lab).table.device_ns / triton(lab).calls / 1e3
    return elsewhere(each > kernel, f"empty_like {each:.1f} µs, kernel {kernel:.1f} µs")


def one_for_five(lab: Lab) -> Finding:
    each = {name: found(lab).launches / 200 for name, found in (("eager", eager), ("Triton", triton))}
    return holds(each == {"eager": 5, "Triton": 1}, ", ".join(f"{name} {count:g}" for name, count in each.items()))


def traffic(lab: Lab) -> Finding:
    program = lab.program(SMALL)
    unit = N * M * 4
    old, new = nbytes(before(program)) / unit, nbytes(after(program)) / unit
    return holds(abs(old - 8) < 0.01 and abs(new - 2) < 0.01, f"{old:.4g} NM → {new:.4g} NM")


def speed_follows(lab: Lab) -> Finding:
    times = lab.bench("softmax", "100x5000", "fp32", "eager", "tilewright-triton")
    faster = times["eager"].median_us / times["tilewright-triton"].median_us
    return holds(abs(faster - 4) <= 0.8, f"{faster:.1f} × the speed from 4 × less traffic, L2 flushed")


def in_shared(lab: Lab) -> Finding:
    (view,) = lab.kernels("softmax", "100x5000", "tilewright-triton")
    shared, registers = view.launch.shared_bytes, view.launch.registers * view.launch.threads * 4
    return holds(shared >= 4 * M, f"{shared} B of shared memory, {registers:,} B of registers for a row of {4 * M:,} B")


def fills(lab: Lab) -> Finding:
    (view,) = lab.kernels("softmax", "100x5000", "tilewright-triton")
    assert view.waves
    waves = view.waves
    return holds(waves.programs >= waves.sms, f"{waves.programs} programs, {waves.sms} SMs: {waves.waves:.2f} waves")


def flushes(lab: Lab) -> Finding:
    count = eager(lab).value("SELECT count(*) FROM wait")
    return holds(count >= 800, f"{count:.0f} synchronisations in 1000 launches")


CLAIMS = (
    Claim("H40", "One Triton kernel does it.", "3.0 µs, all of the GPU's time",
          one_kernel,
          "4 MB in 3 µs is more than their DRAM gives: L2 holds the data.", "cuda"),
    Claim("H41", "The host's time in operators is all empty_like.", "99.6 % of 1.84 ms",
          lambda lab: elsewhere(triton(lab).longest(1, host=True, total=True) == ["empty_like"],
                                f"longest: {triton(lab).longest(1, host=True, total=True)[0]}"),
          "Triton's Python and its launch are no operators, so such a table leaves them out.", "cuda"),
    Claim("H42", "One kernel replaces five, and no ATen arithmetic is left.", "1 against 5", one_for_five,
          "Launches per call.", "cuda"),
    Claim("H43", "Triton's launch is dominated by specialising arguments, not by launching.",
          "about 20 µs of host time",
          triton_host, "How much depends on Triton's version.", "cuda"),
    Claim("H44", "Allocating the output is now the visible cost.", "9.1 µs, kernel 3 µs", allocation,
          "Smaller than Triton's own host time.", "cuda"),
    Claim("H45", "Fusion cuts the traffic.", "8NM → 2NM", traffic, "4N values more before, 0 after."),
    Claim("H46", "Softmax is bound by HBM, so its speed follows the traffic.", "a multiple", speed_follows,
          "Theirs is 8.7 × from 4 × less: launches and L2 decide at 2 MB, and their card has no HBM.", "cuda"),
    Claim("H47", "Triton keeps the row in shared memory.", "1 read, 1 write", in_shared,
          "Shared memory only joins the warps' partial results; the row is in registers."),
    Claim("H48", "Launches fall.", "1000 → 200", lambda lab: equal([eager(lab).launches, triton(lab).launches],
          [1000, 200]),
          "One per call.", "cuda"),
    Claim("H49", "Every eager step flushes and synchronises globally.", "–", flushes,
          "Kernels of one stream follow each other in order; nothing waits or goes to DRAM for it.", "cuda"),
    Claim("H50", "The block size keeps the SMs busy.", "–", fills,
          "A program per row is less than one wave for 100 rows."),
)  # fmt: skip
DOCUMENT = Document("Profiling homework: one Triton kernel", "RTX 4090 D, i5-12400F, torch 2.3.1", CLAIMS)
