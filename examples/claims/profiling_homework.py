"""A homework on profiling softmax: operator tables, SQL over a trace, and why a GPU was slow.

tilewright claims --only "H*"
"""

from __future__ import annotations

from functools import partial

import torch

from tilewright.measure.timing.benchmark import Timing
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
from .lab import Lab, Profile, before, named

N, M = 100, 5000
SMALL = "naive_softmax.py:small"
STEPS = ("max", "sub", "exp", "sum", "div")
MEAN = "SELECT AVG(dur) / 1e9 FROM slice WHERE name = 'aten::exp'"


def eager(lab: Lab) -> Profile:
    """200 calls of the five steps on 100×5000."""
    return lab.profile(SMALL, 200)


def totals(profile: Profile, *names: str) -> Finding:
    """The same with everything that the operators call on the host."""
    times = [profile.operator(name).cpu_total for name in names]
    ours = ", ".join(f"{name} {duration(time / 1e3)}" for name, time in zip(names, times, strict=True))
    return elsewhere(times == sorted(times, reverse=True), ours)


def race(lab: Lab) -> dict[str, Timing]:
    """The steps alone, into memory already mapped."""
    x = torch.randn(N, M, device=lab.device)
    row, out, few = x.amax(1, keepdim=True), torch.empty_like(x), torch.empty(N, device=lab.device)
    return lab.race(
        "the steps of softmax with out=",
        {
            "exp out": lambda: torch.exp(x, out=out),
            "sub out": lambda: torch.sub(x, row, out=out),
            "div out": lambda: torch.div(x, row, out=out),
            "sum": lambda: torch.sum(x, 1, out=few),
            "max": lambda: x.max(1),
            "amax": lambda: torch.amax(x, 1, out=few),
        },
    )


def ratio(times: dict[str, Timing], one: str, other: str) -> float:
    return times[one].median_us / times[other].median_us


def machine(lab: Lab) -> Finding:
    from tilewright.hardware.detect import detect
    from tilewright.hardware.summary import machine_report

    rows = dict(lab.once("tilewright doctor: the machine", lambda: machine_report(detect())))
    kept = {"CPU", "GPU", "memory", "OS", "kernel", "Python", "PyTorch", "Triton"}
    return elsewhere(kept <= rows.keys(), "; ".join(rows[name] for name in rows if name in kept))


def accesses(lab: Lab) -> dict[str, tuple[str | None, str | None]]:
    """Symbolic elements read and written of each step."""
    found = before(lab.program(SMALL))
    return {name: (it.cost.reads_symbolic, it.cost.writes_symbolic) for it, name in zip(found, STEPS, strict=True)}


def in_units(lab: Lab) -> Finding:
    """Elements of all steps in NM and N."""
    found = before(lab.program(SMALL))
    sums = (("read", sum(it.cost.reads for it in found)), ("write", sum(it.cost.writes for it in found)))
    ours = ", ".join(f"{what} {count // (N * M)}NM+{count % (N * M) / N:g}N" for what, count in sums)
    return equal(ours, "read 5NM+2N, write 3NM+2N")


def helpers(lab: Lab) -> Finding:
    row = eager(lab).operator("unsqueeze")
    all_ns = eager(lab).table.cpu_ns
    ours = f"unsqueeze {row.calls} calls, {percent(row.cpu_total / all_ns)} of host time"
    return elsewhere(row.calls == 400 and row.cpu_total < 0.05 * all_ns, ours)


def one_off(lab: Lab) -> Finding:
    found = [f"{row.name} {duration(row.cpu_total / 1e3)}" for row in eager(lab).table.rows if row.one_off]
    return elsewhere(any("Synchronize" in name for name in found), ", ".join(found) or "none")


def children_explain(name: str, wanted: str) -> partial[Finding]:
    """Whether the children that fill the gap between total and self of an operator have a name with `wanted`."""

    def check(lab: Lab) -> Finding:
        inside = eager(lab).called_by(name)
        row = eager(lab).operator(name)
        ours = f"gap {duration((row.cpu_total - row.cpu_self) / 1e3)}: {', '.join(inside) or 'no child'}"
        return holds(any(part in child for child in inside for part in wanted.split("|")), ours)

    return partial(check)


def totals_add_up(lab: Lab) -> Finding:
    rows = [row for row in eager(lab).table.rows if row.kind == "operator"]
    wrong = [it.name for it in rows if it.cpu_total != it.cpu_self + sum(eager(lab).called_by(it.name[6:]).values())]
    return holds(not wrong, f"{len(rows) - len(wrong)} of {len(rows)} operators to the nanosecond")


def order(lab: Lab) -> Finding:
    names = ", ".join(f"'aten::{name}'" for name in STEPS)
    found = eager(lab).sql(f"SELECT name FROM slice WHERE name IN ({names}) AND category = 'cpu_op' ORDER BY ts")
    calls = [tuple(name[6:] for (name,) in found[i : i + 5]) for i in range(0, len(found), 5)]
    return holds(set(calls) == {STEPS} and len(calls) == 200, f"{len(calls)} times {', '.join(calls[0])}")


def mean_by_sql(lab: Lab) -> Finding:
    row = eager(lab).operator("exp")
    by_sql, by_table = eager(lab).value(MEAN) * 1e6, row.cpu_total / row.calls / 1e3
    return holds(abs(by_sql / by_table - 1) < 0.01, f"SQL {by_sql:.3f} µs, table {by_table:.3f} µs")


def sum_by_sql(lab: Lab) -> Finding:
    by_sql = eager(lab).value("SELECT SUM(dur) FROM slice WHERE name = 'aten::exp'")
    table = eager(lab).operator("exp").cpu_total
    return holds(abs(by_sql / table - 1) < 0.01, f"SQL {by_sql / 1e6:.3f} ms, table {table / 1e6:.3f} ms")


def of_function(lab: Lab) -> float:
    """exp's share of the time in `naive_softmax`, over five steps."""
    inside = {it.name[6:]: it for it in eager(lab).table.inside if it.outer_name == "phase forward"}
    return inside["exp"].dur / inside["exp"].outer_dur


def both_denominators(lab: Lab) -> Finding:
    exp = eager(lab).operator("exp").cpu_self
    of_self, of_trace = exp / eager(lab).table.cpu_ns, exp / eager(lab).value("SELECT trace_dur()")
    ours = f"{percent(of_self)} of summed self time, {percent(of_trace)} of the trace's length"
    return holds(abs(of_self / of_trace - 1) < 0.05, ours)


def kernel_names(lab: Lab) -> dict[str, str]:
    """The kernel behind each step."""
    rows = eager(lab).sql("SELECT DISTINCT operator, name FROM device_slice WHERE kind = 'kernel'")
    return {str(operator).removeprefix("aten::"): str(name) for operator, name in rows}


def reads_like(lab: Lab, wanted: dict[str, str]) -> Finding:
    found = {step: name for step, name in kernel_names(lab).items() if step in wanted}
    ours = ", ".join(f"{step} {name.removeprefix('void at::native::')[:40]}" for step, name in found.items())
    return holds(all(wanted[step] in found.get(step, "") for step in wanted), ours)


def fresh_like_warm(lab: Lab) -> Finding:
    """All five steps into fresh memory, and into memory already mapped."""
    from resource import RUSAGE_SELF, getrusage

    fresh, x = lab.example("naive_softmax.py").naive_softmax, torch.randn(N, M)
    row, index, wide = torch.empty(N, 1), torch.empty(N, 1, dtype=torch.int64), torch.empty_like(x)

    def warm() -> None:
        torch.max(x, 1, keepdim=True, out=(row, index))
        torch.exp(torch.sub(x, row, out=wide), out=wide)
        torch.div(wide, torch.sum(wide, 1, keepdim=True, out=row), out=wide)

    def faults() -> float:
        began = getrusage(RUSAGE_SELF).ru_minflt
        for _ in range(50):
            fresh(x)
        return (getrusage(RUSAGE_SELF).ru_minflt - began) / 50

    times = lab.race("the five steps, fresh and with out=", {"fresh": partial(fresh, x), "warm": warm})
    more = ratio(times, "fresh", "warm")
    each = lab.once("page faults of 50 calls", faults)
    return holds(more < 1.2, f"fresh outputs take {more:.1f} × as long; {each:,.0f} page faults a call")


def short_launch(lab: Lab) -> Finding:
    launch, kernel = eager(lab).launch_us, eager(lab).operator("max").device_self / 200e3
    return elsewhere(launch < kernel, f"{launch:.2f} against {kernel:.2f} µs")


def launch_share(lab: Lab) -> float:
    """The launches' share of the host's time."""
    return eager(lab).launching()[0] / eager(lab).table.cpu_ns


def busy(profile: Profile) -> float:
    """Share of the time from the first to the last kernel in which the GPU computed."""
    extent = profile.value("SELECT max(ts + dur) - min(ts) FROM device_slice WHERE kind = 'kernel'")
    return profile.table.device_ns / extent


def iteration(profile: Profile) -> tuple[float, float]:
    """Microseconds of an iteration: the host between first and last launch, and the GPU's work."""
    host = profile.value("SELECT max(launch_ts + launch_dur) - min(launch_ts) FROM launch_lag")
    return host / profile.calls / 1e3, profile.table.device_ns / profile.calls / 1e3


def runs_ahead(lab: Lab) -> Finding:
    depth = eager(lab).value("SELECT max(depth) FROM queue_depth")
    lag = eager(lab).value("SELECT median(lag_ns) / 1e3 FROM launch_lag")
    return holds(depth >= 2, f"up to {depth:.0f} launches queued, median lag {lag:.1f} µs")


def bandwidth_bound(lab: Lab) -> Finding:
    share = busy(eager(lab))
    return holds(share > 0.5, f"the GPU computes {percent(share)} of the time; the rest it waits for launches")


def jit(lab: Lab) -> Finding:
    found = dict(eager(lab).sql("SELECT launch, count(*) FROM device_slice WHERE kind = 'kernel' GROUP BY launch"))
    ours = ", ".join(f"{count} by {name}" for name, count in found.items())
    return holds(any("cuLaunch" in str(name) for name in found), ours)


def issues_faster(lab: Lab) -> Finding:
    host, gpu = iteration(eager(lab))
    return elsewhere(host < gpu, f"host {host:.1f} µs, GPU busy {gpu:.1f} µs per iteration")


def exp_is_launch(lab: Lab) -> Finding:
    row = eager(lab).operator("exp")
    launch = sum(ns for name, ns in eager(lab).called_by("exp").items() if "Launch" in name) / row.cpu_total
    more = eager(lab).operator("sub").cpu_self > row.cpu_self
    ours = f"launch is {percent(launch)} of exp; sub's self time is {'above' if more else 'below'} exp's"
    return holds(launch > 0.5 and more, ours)


def slow_max(lab: Lab) -> Finding:
    top, times = eager(lab).longest(3), race(lab)
    more = ratio(times, "max", "amax")
    return holds(
        top == ["max", "sum", "div"] and more > 1.2, f"{', '.join(top)}; max {more:.2f} × amax, which has no index"
    )


CLAIMS = (
    Claim("H1", "A table says on what machine the figures were measured.",
          "i5-12400F, RTX 4090 D, Linux 6.14, torch 2.3.1",
          machine,
          "Their table pairs torch 2.3.1 with a Triton that it does not pin; its CUDA 13 is the driver's limit."),
    Claim("H2", "Elements that each step reads and writes.", "max NM/N, sub NM+N/NM, exp NM/NM, sum NM/N, div NM+N/NM",
          lambda lab: equal(accesses(lab), {
              "max": ("M*N", "N"), "sub": ("M*N + N", "M*N"), "exp": ("M*N", "M*N"), "sum": ("M*N", "N"),
              "div": ("M*N + N", "M*N")}),
          "max also writes N indices that nobody reads; they are counted apart."),
    Claim("H3", "The five steps together.", "read 5NM+2N, write 3NM+2N",
          in_units,
          "Unused indices, counted apart, would make it 3N writes."),
    Claim("H4", "A broadcast vector counts its own N elements.", "N, not NM",
          lambda lab: equal(named(before(lab.program(SMALL)), "sub")[0].cost.reads - N * M, N),
          "A row's value is loaded once and stays in a register or a cache."),
    Claim("H5", "Host time of the operators themselves.", "exp 27.3, div 25.2, sub 24.2, max 9.0, sum 1.9 of 172 ms",
          lambda lab: eager(lab).ordered("exp", "div", "sub", "max", "sum"),
          "Fresh outputs are paged in, vector units differ: the order belongs to the CPU.", "cpu"),
    Claim("H6", "Totals of the two reductions.", "max 9.27, sum 1.90 ms", lambda lab: totals(eager(lab), "max", "sum"),
          "Their sum reads 211 GB/s, more than a desktop's memory gives: the data was cached.", "cpu"),
    Claim("H7", "Views cost next to nothing.", "unsqueeze_ 400 calls, 0.24 ms", helpers,
          "A view is bookkeeping on the host; each indexing with None makes one.", "cpu"),
    Claim("H8", "Entries that happen once do not belong to the steady state.",
          "synchronize 79.9 ms, device queries 3.9 ms",
          one_off, "They stem from profiling CUDA; `tilewright profile` marks them.", "cuda"),
    Claim("H9", "The longest operators on a CPU.", "exp, div, sub",
          lambda lab: holds(set(eager(lab).longest(3)) == {"exp", "div", "sub"}, ", ".join(eager(lab).longest(3))),
          "These three write NM values into fresh memory.", "cpu"),
    Claim("H10", "They are slow because each writes NM values.", "sum writes N: 1.9 ms",
          fresh_like_warm,
          "Writes into warm memory are as many; fresh outputs leave the cache, and may be paged in at every call.",
          "cpu"),
    Claim("H11", "exp leads as a transcendental, and division takes more cycles than subtraction.",
          "27.3 > 25.2 > 24.2 ms",
          lambda lab: slower(race(lab), "exp out", "div out", "sub out"),
          "With warm outputs the arithmetic shows; vectorised, it may hide behind memory.", "cpu"),
    Claim("H12", "Self time excludes children, total includes them.", "total = self + children", totals_add_up,
          "It holds for every operator of the table."),
    Claim("H13", "exp, div and sub call nothing.", "self = total",
          lambda lab: equal([n for n in ("exp", "div", "sub") if eager(lab).called_by(n)], []),
          "Listed are those that have children.", "cpu"),
    Claim("H14", "max has a gap between total and self because it allocates two outputs.", "0.27 ms",
          children_explain("max", "empty|resize"), "The children of max in the trace decide.", "cpu"),
    Claim("H15", "sum's smaller gap comes from allocating.", "0.03 ms", children_explain("sum", "empty|resize"),
          "The children of sum in the trace decide.", "cpu"),
    Claim("H16", "The timeline shows the lines of the source in order, 200 times.", "max, sub, exp, sum, div", order,
          "Eager runs operators as they are called."),
    Claim("H17", "AVG(dur) over the trace equals the table's mean.", "136.5 µs", mean_by_sql,
          "Both come from the same events; the query gives seconds."),
    Claim("H18", "SUM(dur) over the trace agrees with the table.", "27.40 and 27.31 ms", sum_by_sql,
          "Both come from the same events."),
    Claim("H19", "exp's share of its caller.", "29.6 %",
          lambda lab: elsewhere(of_function(lab) > eager(lab).operator("exp").cpu_self / eager(lab).table.cpu_ns,
                                percent(of_function(lab))),
          "The denominator is the function's own range; the direction is that it exceeds the share of everything.",
          "cpu"),
    Claim("H20", "The smaller share is of the whole trace.", "15.9 %", both_denominators,
          "A table's denominator is the sum of self times, not the length of the trace.", "cpu"),
    Claim("H21", "Taking out the synchronisation turns one share into the other.", "15.85 / (100 − 46.36) = 29.5 %",
          lambda lab: close(lab.once("arithmetic on their shares", lambda: 15.85 / (100 - 46.36) * 100), 29.55, " %",
          0.01),
          "The quotient agrees; in part by accident, for the rest keeps device queries and lacks Python's time."),
    Claim("H22", "exp is the bottleneck of softmax proper.", "about 30 %",
          lambda lab: holds(max(STEPS, key=eager(lab).spent) == "exp", eager(lab).words(STEPS)),
          "On their CPU div and sub follow within 13 %.", "cpu"),
    Claim("H23", "On a GPU, launching takes most of the host's time.", "83 % of 53.8 ms",
          lambda lab: elsewhere(launch_share(lab) > 0.5, percent(launch_share(lab))),
          "Their first launches load modules; ours come after a warm-up.", "cuda"),
    Claim("H24", "Device time of the steps, first run.", "max 2.82, sum 1.40, sub 0.40, div 0.40, exp 0.21 of 5.23 ms",
          lambda lab: eager(lab).ordered("max", "sum", "sub", "exp"),
          "Few rows leave most SMs without a row in the reductions.", "cuda"),
    Claim("H25", "Device time of the steps, second run.", "max 2.82, sum 1.40, sub 0.40, div 0.40, exp 0.21 of 5.24 ms",
          lambda lab: lab.profile(SMALL, 200, run="again").ordered("max", "sum", "div", "exp"),
          "Their rates exceed the card's memory: the 2 MB stay in L2, and durations are whole microseconds.", "cuda"),
    Claim("H26", "Host time of the operators with what they call.", "max 13.5, exp 8.7, sub 6.3, sum 5.4, div 4.8 ms",
          lambda lab: totals(eager(lab), "max", "exp", "sub", "sum", "div"),
          "Their first calls of each operator load its kernel; without these the order changes.", "cuda"),
    Claim("H27", "max, exp and sub cost the host most; max for its two outputs.", "16.8, 11.4, 9.2 ms",
          lambda lab: holds(eager(lab).longest(3, host=True, total=True) == ["max", "exp", "sub"],
                            ", ".join(eager(lab).longest(3, host=True, total=True))),
          "Theirs ranks loads of kernels that happen once.", "cuda"),
    Claim("H28", "exp's time is mostly its launch; sub's own time exceeds exp's through broadcasting.",
          "1.27 of 11.4 ms",
          exp_is_launch, "div broadcasts as well.", "cuda"),
    Claim("H29", "max is slowest on the GPU, through its indices.", "2.82, 1.45, 0.57 ms", slow_max,
          "100 indices are 800 bytes; amax, which writes none, tells what they cost.", "cuda"),
    Claim("H30", "sum costs half of max because it has no index.", "1.40 / 2.82",
          lambda lab: close(ratio(race(lab), "sum", "max"), 1.40 / 2.82), "Both alone, L2 flushed.", "cuda"),
    Claim("H31", "div takes twice as long as exp because it reads two inputs.", "0.57 / 0.30",
          lambda lab: close(ratio(race(lab), "div out", "exp out"), 0.57 / 0.30),
          "The second input is 400 bytes; exp's kernel is vectorised, div's broadcasting one is not.", "cuda"),
    Claim("H32", "The kernels behind the steps.", "reduce_kernel<512,1>, elementwise_kernel<128,2>",
          lambda lab: reads_like(lab, {"max": "reduce_kernel<512, 1", "sum": "reduce_kernel<512, 1",
                                       "sub": "elementwise_kernel<128, 2", "div": "elementwise_kernel<128, 2"}),
          "PyTorch's templates change with its version.", "cuda"),
    Claim("H33", "Five launches per call.", "1000 in 200 calls", lambda lab: equal(eager(lab).launches, 1000),
          "One per step; views launch nothing.", "cuda"),
    Claim("H34", "The CPU runs ahead of the GPU and queues work.", "visible lag", runs_ahead,
          "It can only while the GPU is slower than the host.", "cuda"),
    Claim("H35", "A launch is short beside a reduction.", "1.85 against 14 µs",
          short_launch,
          "The median launch; means hold the first ones.", "cuda"),
    Claim("H36", "The CPU issues an iteration faster than the GPU runs it.", "40 against 50 µs", issues_faster,
          "Their own table has 26 µs of GPU work per iteration.", "cuda"),
    Claim("H37", "So the GPU's bandwidth is the bottleneck.", "–", bandwidth_bound,
          "A GPU that waits for launches is launch-bound, whatever its kernels are bound by.", "cuda"),
    Claim("H38", "The tracks show a design that compiles just in time.", "–", jit,
          "Kernels built ahead come through cudaLaunchKernel; cuLaunchKernel starts those built at run time.", "cuda"),
    Claim("H39", "Gaps on the GPU are small, its pipeline is full.", "–",
          lambda lab: holds(busy(eager(lab)) > 0.8, f"busy {percent(busy(eager(lab)))} of the time"),
          "Their figures give 26 of 50 µs.", "cuda"),
)  # fmt: skip
DOCUMENT = Document("Profiling homework", "RTX 4090 D, i5-12400F, torch 2.3.1", CLAIMS)
