"""The same homework's online softmax as a loop in Python, and its attention written out.

tilewright claims --only "H5*,H6*,H7*"
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tilewright.records.measurement import Measurement
from tilewright.records.program import Operator
from tilewright.report.quantity import duration

from .claim import Claim, Document, Finding, elsewhere, equal, holds, percent
from .lab import Lab, Profile, before, named

N, M = 100, 5000
B, S, D = 32, 1024, 128
STEPS = ("max", "sub", "exp", "sum", "div")
COLUMN = ("exp", "sub", "maximum", "mul", "add")


def naive(lab: Lab) -> Profile:
    return lab.profile("naive_softmax.py:small", 200)


def online(lab: Lab) -> Profile:
    """Two of the 200 calls; a warm-up counts the events of one."""
    return lab.profile("online_softmax.py:online", 2, "--warmup=1", "--events=3000000")


def calls(lab: Lab, name: str) -> float:
    """Calls of an operator in one iteration of the loop."""
    return online(lab).operator(name).calls / online(lab).table.steps


def raced(lab: Lab) -> dict[str, Measurement]:
    return lab.bench("softmax", "100x5000", "fp32", "eager", "online-loop")


def bounded(lab: Lab) -> Finding:
    sql = "SELECT steps_kept, step_events, events, most_events FROM recording"
    ((kept, each, events, most),) = online(lab).sql(sql)
    ours = f"{200 * each / 1e6:.1f} M events for 200 calls; kept {kept} calls, {events:,} of at most {most:,} events"
    return holds(200 * each > 1e6 and events <= most, ours)


def counts(lab: Lab) -> Finding:
    ours = {name: calls(lab, name) for name in COLUMN}
    on_host = sum(ours.values()) + sum(calls(lab, name) for name in ("div", "fill_", "zero_"))
    kernels = online(lab).launches / online(lab).table.steps if lab.on_gpu else on_host
    ours_int = {name: int(count) for name, count in (ours | {"launches": kernels}).items()}
    theirs = {"exp": 10_001, "sub": 10_001, "maximum": 5000, "mul": 5000, "add": 5000, "launches": 35_005}
    return equal(ours_int, theirs)


def per_call(profile: Profile, count: int) -> tuple[float, float]:
    """Microseconds of a call on the host and on the GPU."""
    return profile.table.cpu_ns / count / 1e3, profile.table.device_ns / count / 1e3


def host_dominates(lab: Lab) -> Finding:
    host, gpu = per_call(online(lab), online(lab).table.steps)
    launch = online(lab).launching()[0] / online(lab).table.cpu_ns
    ours = f"host {duration(host)}, {percent(launch)} of it launches; GPU {duration(gpu)}"
    return elsewhere(host > gpu and 0.1 < launch < 0.5, ours)


def mean_us(lab: Lab, name: str) -> float:
    """Device time of one kernel of the loop's operator."""
    row = online(lab).operator(name)
    return row.device_self / row.launches / 1e3


def means(lab: Lab, *names: str) -> str:
    return ", ".join(f"{name} {mean_us(lab, name):.2f} µs" for name in names)


def mul_is_free(lab: Lab) -> Finding:
    return elsewhere(mean_us(lab, "mul") < 0.1 * mean_us(lab, "exp"), means(lab, *COLUMN))


def whole_microseconds(lab: Lab) -> Finding:
    return elsewhere(abs(mean_us(lab, "maximum") - 1) < 0.005, means(lab, "exp", "sub", "maximum"))


def against_naive(lab: Lab) -> Finding:
    loop, once = per_call(online(lab), online(lab).table.steps), per_call(naive(lab), 200)
    launches = online(lab).launching()[1] / online(lab).table.steps / (naive(lab).launches / 200)
    ours = f"{launches:,.0f} × the launches; CPU:GPU {loop[0] / loop[1]:.1f} against {once[0] / once[1]:.1f}"
    return elsewhere(launches > 5000 and loop[0] / loop[1] > once[0] / once[1], ours)


def latency(lab: Lab) -> Finding:
    launch, ratio = online(lab).launch_us, mean_us(lab, "sub") / mean_us(lab, "exp")
    ours = f"launch {launch:.2f} µs; {means(lab, 'exp', 'sub')}, {ratio:.2f} of it"
    return holds(launch > 2 * mean_us(lab, "exp") and abs(ratio - 0.5) < 0.1, ours)


def loop_order(lab: Lab) -> Finding:
    names = ", ".join(f"'aten::{name}'" for name in COLUMN)
    found = online(lab).sql(f"SELECT name FROM slice WHERE name IN ({names}) ORDER BY ts LIMIT 7")
    ours = [str(name)[6:] for (name,) in found]
    return equal(list(dict.fromkeys(ours)), ["sub", "exp", "maximum", "mul", "add"])


def strides(lab: Lab) -> Finding:
    column = lab.once("a column of a row-major matrix", lambda: torch.empty(N, M).unbind(1)[0])
    stride = column.stride(0) * column.element_size()
    return holds(stride <= 32, f"a column's elements lie {stride:,} B apart: a sector of 32 B for each 4 B")


def unsuitable(lab: Lab) -> Finding:
    times = raced(lab)
    slower = times["online-loop"].median_us / times["eager"].median_us
    return holds(slower > 1, f"{slower:,.0f} × the time of the five steps")


def attention(lab: Lab, run: str = "") -> Profile:
    return lab.profile("attention.py:attention", 10, run=run)


def operators(lab: Lab, length: int = S) -> list[Operator]:
    """Attention at a length, captured and priced."""
    if length == S:
        return before(lab.program("attention.py:attention"))
    made = lab.example("attention.py").case(N=length, name=f"N={length}")
    return before(lab.program(f"attention.py:case(N={length})", case=made))


def repeats(lab: Lab) -> Finding:
    shares = [attention(lab, run).share("bmm") for run in ("", "again")]
    return elsewhere(abs(shares[0] / shares[1] - 1) < 0.2, f"bmm {percent(shares[0])}, then {percent(shares[1])}")


def products(lab: Lab) -> list[tuple[str, float]]:
    """The kernels of the products, and milliseconds of ten calls."""
    sql = "SELECT name, sum(dur) / 1e6 FROM device_slice WHERE operator = 'aten::bmm' GROUP BY name ORDER BY 2 DESC"
    return [(str(name), float(ms)) for name, ms in attention(lab).sql(sql)]


def forty(lab: Lab) -> Finding:
    ours = f"{attention(lab).launches} launches; " + ", ".join(f"{name[:50]} {ms:.2f} ms" for name, ms in products(lab))
    return elsewhere(attention(lab).launches == 40, ours)


def parent_below_child(lab: Lab) -> Finding:
    parent, child = (attention(lab).operator(name).device_total / 1e6 for name in ("softmax", "_softmax"))
    return elsewhere(parent < child, f"softmax {parent:.3f} ms, _softmax {child:.3f} ms")


def memory_bound(lab: Lab) -> Finding:
    share = attention(lab).share("_softmax") + attention(lab).share("div")
    bounds = {it.bound for it in named(operators(lab), "_softmax", "div")}
    return holds(share > 0.5 and bounds == {"DRAM-bound"}, f"{percent(share)}, {', '.join(map(str, bounds))}")


def compute_bound(lab: Lab) -> Finding:
    found = named(operators(lab), "bmm")
    ours = ", ".join(f"{it.cost.intensity:.0f} FLOP/B: {it.bound}" for it in found)
    each = duration(attention(lab).spent("bmm") / 20e3)
    return holds(all(it.bound == "compute-bound" for it in found), f"{ours}; {each} per product")


def passes(lab: Lab) -> Finding:
    moved = sum(it.cost.reads + it.cost.writes for it in operators(lab))
    return equal((moved - 4 * B * S * D) // (B * S * S), 6)


def growth(lab: Lab) -> Finding:
    old, new = operators(lab), operators(lab, 2 * S)
    time = sum(it.cost.flops for it in new) / sum(it.cost.flops for it in old)
    space = max(it.cost.writes for it in new) / max(it.cost.writes for it in old)
    return equal([time, space], [4.0, 4.0])


def counted(lab: Lab) -> Finding:
    first = named(operators(lab), "bmm")[0].cost
    light = [it.cost.flops / it.cost.bytes for it in named(operators(lab), "div", "_softmax")]
    right = (first.flops, first.reads + first.writes) == (2 * B * S * S * D, B * (2 * S * D + S * S))
    ours = f"{first.flops_symbolic} FLOPs, {first.reads_symbolic} + {first.writes_symbolic} elements"
    return holds(right and max(light) < 1, f"{ours}; div, softmax {light[0]:.2g}, {light[1]:.2g} FLOP/B")


def eightfold(lab: Lab) -> Finding:
    old, new = (named(operators(lab, length), "bmm")[0].cost.bytes_written for length in (S, 8 * S))
    return equal(new // old, 64)


def parts(lab: Lab, length: int) -> dict[str, float]:
    """Microseconds of the products, and of scale and softmax, at a length."""
    q = torch.randn(8 if lab.on_gpu else 2, length, D, device=lab.device)
    scores, k = q @ q.transpose(1, 2), q.transpose(1, 2)
    functions: dict[str, Callable[[], object]] = {
        "QKᵀ": partial(torch.matmul, q, k),
        "PV": partial(torch.matmul, scores, q),
        "softmax": lambda: torch.softmax(scores / 11.3, -1),
    }
    found = lab.race(f"the steps of attention, N={length}", functions)
    return {name: timing.median_us for name, timing in found.items()}


def more_extreme(lab: Lab) -> Finding:
    shares = [times["softmax"] / sum(times.values()) for times in (parts(lab, 512), parts(lab, 2048))]
    return holds(shares[1] > 1.2 * shares[0], f"{percent(shares[0])} at N=512, {percent(shares[1])} at N=2048")


def tensor_cores(lab: Lab) -> Finding:
    name = products(lab)[0][0]
    grows = sum(parts(lab, 2048).values()) / sum(parts(lab, 512).values())
    used = any(mark in name for mark in ("tensorop", "s1688", "s16816", "tf32", "hgmma"))
    return holds(used and abs(grows / 16 - 1) < 0.2, f"{name[:60]}; 4 N takes {grows:.1f} × as long")


CLAIMS = (
    Claim("H51", "Softmax in one pass over the columns, with a running maximum and a rescaled sum, equals softmax.",
          "equal", lambda lab: holds("online-loop" in raced(lab),
          f"relative error {raced(lab)['online-loop'].error:.1e}"),
          "The bench gives a row only to what keeps the numbers contract against float64."),
    Claim("H52", "Profiling 200 calls makes millions of events, which exhausted the memory.",
          "millions against a thousand", bounded,
          "The number of events is theirs; `tilewright profile` counts them in a warm-up and keeps what fits."),
    Claim("H53", "What one call of the loop runs.", "35,005 launches; exp, sub 10,001; maximum, mul, add 5,000", counts,
          "7M + 5: seven operators a column."),
    Claim("H54", "Host time of the loop, first run.", "244 ms, 35 % in launches", host_dominates,
          "Dispatch costs more than the launch itself.", "cuda"),
    Claim("H55", "On the GPU mul and add cost nothing beside exp.", "exp 9.72, sub 5.00, maximum 5.00, mul 0.005 ms",
          mul_is_free, "Durations cut to whole microseconds become 0 or 1; all these kernels are alike.", "cuda"),
    Claim("H56", "A kernel of the loop takes one microsecond.", "1.000 µs each", whole_microseconds,
          "Exactly 1.000 is the resolution of their profiler.", "cuda"),
    Claim("H57", "The loop against the five steps, per call.", "7,000 × the launches; CPU:GPU 12.4 against about 10",
          against_naive, "Both wait for the host; their printed tables give 7.5 and 10.3 for the steps.", "cuda"),
    Claim("H58", "The five steps spend most on exp.", "–",
          lambda lab: holds(max(STEPS, key=naive(lab).spent) == "exp", naive(lab).words(STEPS)),
          "On a GPU the reductions have too few rows to fill it."),
    Claim("H59", "A launch takes far longer than a kernel, and sub needs half of exp.", "2.4 µs; 0.55 and 1.0 µs",
          latency, "In the table half of sub's durations were cut to 0.", "cuda"),
    Claim("H60", "The body of the loop on the timeline.", "sub, exp, max, mul, add", loop_order,
          "exp of a difference to the maximum needs the maximum first."),
    Claim("H61", "The loop's accesses cost little: a maximum and a sum per row.", "O(1) state", strides,
          "The columns of a row-major matrix are strided; each element brings a sector of its own."),
    Claim("H62", "The loop may be even slower than the five steps.", "–", unsuitable, "It is 35,005 operators for 5."),
    Claim("H63", "Attention written out, first run.", "bmm 46.9 %, softmax 27.6 %, div 25.6 % of 11.1 ms",
          lambda lab: attention(lab).ordered("bmm", "_softmax", "div"),
          "Products go by the matrix rate, the rest by the bandwidth: the shares depend on their ratio."),
    Claim("H64", "A second run gives the same shares.", "bmm 46.75 after 46.87 %", repeats,
          "Two recordings of ten calls."),
    Claim("H65", "The kernels of attention.", "40 launches; sgemm nn 2.86, tn 2.34 ms", forty,
          "Equal FLOPs in different layouts; cuBLAS chooses by device and shape.", "cuda"),
    Claim("H66", "softmax spends less in total than the _softmax that it calls.", "2.37 and 3.62 ms",
          parent_below_child,
          "A total holds its children's: their table lost some of the time.", "cuda"),
    Claim("H67", "Softmax and the scaling take more than the products, and are memory-bound.", "53.1 %", memory_bound,
          "How much that is depends on the matrix rate beside the bandwidth."),
    Claim("H68", "The products are compute-bound, with a high intensity.", "5.2 ms per call", compute_bound,
          "5.2 ms are 20 products; at d = 128 the intensity is at most 64 FLOP/B, near the ridge in fp32."),
    Claim("H69", "How often the N×N matrix is written or read.", "6 times", passes,
          "Scores written; scale and softmax read and write; PV reads."),
    Claim("H70", "Time is O(B·N²·d), space O(B·N²).", "–", growth,
          "Growth of FLOPs and of the largest tensor for 2 N."),
    Claim("H71", "One product, and the steps between.", "2N²d FLOPs, 2Nd + N² elements; O(1) FLOP/B", counted,
          "Counted from the captured graph."),
    Claim("H72", "A sequence of 8k instead of 1k.", "64 × the memory", eightfold, "Bytes of the scores."),
    Claim("H73", "The share of softmax and scaling becomes more extreme with N.", "53 %", more_extreme,
          "Everything grows as N²; only d and the device change the share."),
    Claim("H74", "Tensor Cores make the products fast, and time grows as N².", "–", tensor_cores,
          "fp32 without TF32 runs as sgemm, without Tensor Cores.", "cuda"),
)  # fmt: skip
DOCUMENT = Document("Profiling homework: online softmax and attention", "RTX 4090 D, i5-12400F, torch 2.3.1", CLAIMS)
