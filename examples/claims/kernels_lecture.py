"""A lecture on kernels: memory and threads, benchmarking, and one function written five ways.

tilewright claims --only "K*"
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F

from tilewright.backend import backend
from tilewright.bench.catalogue import suite
from tilewright.hardware.geometry import KernelView
from tilewright.hardware.profiles import profile_for
from tilewright.measure.timing.benchmark import Timing
from tilewright.records.case import Case, InputSpec
from tilewright.records.measurement import Measurement
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
from .lab import Lab, Profile, after, before

MANUAL = "manual_gelu.py:gelu"


def memories(lab: Lab) -> Finding:
    rates = lab.ceilings()
    if "cache" not in rates:
        return Finding("other programs keep the cache busy, so its rate is left out", "undecided")
    ours = f"last-level cache {rates['cache']:,.3g}, DRAM {rates['copy']:,.3g} GB/s"
    return holds(rates["cache"] > rates["copy"], ours)


def one_sm_each(lab: Lab) -> Finding:
    ids = lab.once("the %smid of 264 programs", lambda: lab.example("claims/triton_kernels.py").multiprocessors(264))
    ours = f"{sum(it >= 0 for it in ids)} of {len(ids)} programs stayed on one SM; a barrier across blocks is a launch"
    return holds(all(it >= 0 for it in ids), f"{ours}, {lab.ceilings()['launch']:.2f} µs")


def gelu_kernel(lab: Lab) -> KernelView:
    (view,) = lab.kernels("gelu", "4096x4096", "tilewright")
    return view


def third_bound(lab: Lab) -> Finding:
    found = before(lab.program("transformer_block.py:block"))
    bounds = sorted({str(it.bound) for it in found})
    return holds(set(bounds) <= {"compute-bound", "DRAM-bound", "cache-bound"}, ", ".join(bounds))


def compute_outgrows(lab: Lab) -> Finding:
    found = before(lab.program("transformer_block.py:block_large"))
    memory = sum(it.bound != "compute-bound" for it in found)
    names = ("a100", "h200")
    old, new = (lab.once(f"datasheet of the {name}", partial(profile_for, name)) for name in names)
    compute = new.matmul_TFLOPs["bfloat16"] / old.matmul_TFLOPs["bfloat16"]
    bandwidth = new.copy_GBps / old.copy_GBps
    ours = (
        f"A100 → H200: {compute:.1f} × the FLOPs, {bandwidth:.1f} × the bandwidth; {memory} of {len(found)} operators"
    )
    return holds(compute > bandwidth and 2 * memory > len(found), ours)


def squares(lab: Lab) -> dict[int, Timing]:
    sizes = (512, 1024, 2048) if lab.on_gpu else (128, 256, 512)
    x = {n: torch.randn(n, n, device=lab.device) for n in sizes}
    found = lab.race("square products", {str(n): partial(torch.mm, x[n], x[n]) for n in sizes})
    return {n: found[str(n)] for n in sizes}


def workload_matters(lab: Lab) -> Finding:
    rates = {n: 2 * n**3 / timing.median_us / 1e6 for n, timing in squares(lab).items()}
    ours = ", ".join(f"{n}³ {rate:.3g} TFLOP/s" for n, rate in rates.items())
    return holds(max(rates.values()) > 1.2 * min(rates.values()), ours)


def one_figure(lab: Lab) -> Finding:
    profile = lab.profile("naive_softmax.py:small", 200)
    parts = sum(row.kind == "operator" for row in profile.table.rows)
    figures = list(softmaxes(lab)).count("eager")
    return holds(figures == 1 and parts > 1, f"a race gives {figures} time a function, a profile {parts} operators")


def first_calls(lab: Lab) -> tuple[float, float]:
    """Microseconds of the first call of a compiled function, and of later ones."""

    def make() -> tuple[float, float]:
        def function(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x) * x + torch.cos(x)

        compiled = torch.compile(function, backend=backend, dynamic=False)
        x = torch.randn(1024, 1024, device=lab.device)
        times = [lab.wall_us(partial(compiled, x)) for _ in range(20)]
        return times[0], median(times[10:])

    return lab.once("the first 20 calls of a compiled function", make)


def warm_up(lab: Lab) -> Finding:
    first, steady = first_calls(lab)
    return holds(first > 2 * steady, f"first {duration(first)}, later {duration(steady)}")


def submission(lab: Lab) -> Finding:
    def make() -> tuple[float, float]:
        x = torch.randn(4096, 4096, device=lab.device)
        call = partial(torch.mm, x, x)
        times = {wait: [lab.wall_us(call, wait) for _ in range(7)][2:] for wait in (False, True)}
        return median(times[False]), median(times[True])

    returned, ended = lab.once("a product of 4096³ timed without and with synchronising", make)
    return holds(returned < 0.5 * ended, f"{duration(returned)} without, {duration(ended)} with")


def growth(lab: Lab) -> Finding:
    sizes = squares(lab)
    middle, large = sorted(sizes)[1:]
    mlp = lab.example("mlp.py")
    x = torch.randn(256, 512, device=lab.device)
    models = {str(layers): mlp.MLP(512, layers).to(lab.device) for layers in (4, 8)}
    layers = lab.race("an MLP of 4 and 8 layers", {name: partial(model, x) for name, model in models.items()})
    product = sizes[large].median_us / sizes[middle].median_us
    deeper = layers["8"].median_us / layers["4"].median_us
    return holds(product > 2 and abs(deeper - 2) < 0.4, f"2 n takes {product:.1f} ×, 2 L {deeper:.1f} × as long")


def chosen_kernels(lab: Lab) -> Finding:
    def make() -> list[str]:
        from tilewright.anatomy.kernel_views import Request, kernel_views

        found = kernel_views(Request("matmul", ("256x256x256", "4096x4096x4096"), "cublas", "bf16"))
        return [views[0].launch.name for _, views in found]

    names = lab.once("tilewright kernel matmul 256x256x256 4096x4096x4096 --impl cublas", make)
    return holds(len(set(names)) == 2, "; ".join(name[:60] for name in names))


def mlp(lab: Lab) -> Profile:
    made = lab.example("mlp.py").case(dimension=1024, layers=8, batch=128)
    return lab.profile("mlp.py:mlp(1024, 8, 128)", 20, "--training", "--optimizer=adam", case=made)


def layers_named(lab: Lab) -> Finding:
    names = [row.name for row in mlp(lab).table.rows if row.name.startswith("layer ")]
    return holds(len(names) == 8, f"{len(names)} layers: {', '.join(sorted(names)[:3])}, …")


def runs_ahead(lab: Lab) -> Finding:
    depth = mlp(lab).value("SELECT max(depth) FROM queue_depth")
    return holds(depth >= 2, f"up to {depth:.0f} launches queued in the MLP's training")


def printing(lab: Lab) -> Finding:
    def make() -> tuple[float, float, str]:
        import tilewright
        from tilewright.store.query import query

        x, w = (torch.randn(1024, 1024, device=lab.device) for _ in range(2))
        losses: list[float] = []

        def loop(shown: bool) -> None:
            for _ in range(50):
                loss = torch.mm(torch.mm(torch.mm(x, w), w), w).mean()
                if shown:
                    losses.append(loss.item())

        times = {shown: [lab.wall_us(partial(loop, shown)) for _ in range(5)][2:] for shown in (False, True)}
        with tilewright.profile("printed loss", memory=False) as run:
            loop(True)
        _, rows = query(run.path, "SELECT source FROM synchronisation ORDER BY calls DESC LIMIT 1")
        return median(times[False]), median(times[True]), str(rows[0][0]) if rows else ""

    without, shown, source = lab.once("a loop that reads its loss, under tilewright.profile()", make)
    ours = f"found at {source.rpartition('/')[2]}; {shown / without:.2f} × the time"
    return holds("kernels_lecture" in source and shown > 1.02 * without, ours)


def python_hidden(lab: Lab) -> Finding:
    profile = lab.profile("naive_softmax.py:small", 200)
    extent = profile.value("SELECT max(ts + dur) - min(ts) FROM device_slice WHERE kind = 'kernel'")
    busy = profile.table.device_ns / extent
    return holds(busy > 0.8, f"at 100×5000 the GPU computes {percent(busy)} of the time")


def one_trip(lab: Lab) -> Finding:
    program = lab.program(MANUAL)
    unit = 4096 * 4096
    old, new = (
        sum(it.cost.reads + it.cost.writes for it in found) / unit for found in (before(program), after(program))
    )
    return holds(new == 2, f"{old:g} NM values → {new:g} NM")


def launches_of_gelu(lab: Lab) -> Finding:
    spec = InputSpec.parse("fp32[N=4096,M=4096]")
    library = lab.program("F.gelu", case=Case("gelu", lambda: F.gelu, [spec], training=False))
    counts = len(before(lab.program(MANUAL))), len(before(library))
    return holds(counts[0] > 1 and counts[1] == 1, f"{counts[0]} against {counts[1]}")


def gelus(lab: Lab) -> dict[str, Timing]:
    """GeLU by tanh: written out, PyTorch's, compiled, and on a GPU erf in Triton and CUDA C++."""

    def make() -> dict[str, Callable[[], object]]:
        manual = lab.example("manual_gelu.py").manual_gelu
        x = torch.randn(16384 if lab.on_gpu else 2048, 16384 if lab.on_gpu else 2048, device=lab.device)
        found: dict[str, Callable[[], object]] = {
            "manual": partial(manual, x),
            "PyTorch": partial(F.gelu, x, approximate="tanh"),
            "compiled": partial(torch.compile(manual, dynamic=False), x),
        }
        if lab.on_gpu:
            from tilewright.bench.peers import no_cuda_cpp
            from tilewright.records.errors import UsageError

            workload = suite("gelu").workload((16384, 16384), "float32")
            if refusal := no_cuda_cpp(workload):
                raise UsageError(refusal)
            by_hand = lab.example("kernels/gelu.py")
            found |= {"Triton": partial(by_hand.in_triton, x), "CUDA": partial(by_hand.gelu, x)}
        return found

    return lab.race("GeLU five ways", lab.once("GeLU five ways, fp32", make))


def as_theirs(found: Finding) -> Finding:
    """An order of another machine's times."""
    return elsewhere(found.verdict == "reproduced", found.ours)


def ratio(lab: Lab, one: str, other: str) -> float:
    return gelus(lab)[one].median_us / gelus(lab)[other].median_us


def compiled_beats(lab: Lab) -> Finding:
    """Undecided where it beats neither outside the spread, and loses to neither."""
    verdicts = {slower(gelus(lab), it, "compiled").verdict for it in ("CUDA", "Triton")}
    ours = f"CUDA {ratio(lab, 'CUDA', 'compiled'):.3f}, Triton {ratio(lab, 'Triton', 'compiled'):.3f} × its time"
    return Finding(ours, next(it for it in ("refuted", "undecided", "reproduced") if it in verdicts))


def ragged(lab: Lab) -> Finding:
    def make() -> float:
        x = torch.randn(1_000_003, device=lab.device)
        exact = F.gelu(x.double())
        return float((lab.example("kernels/gelu.py").gelu(x) - exact).norm() / exact.norm())

    error = lab.once("examples/kernels/gelu.cu on 1,000,003 elements against float64", make)
    return holds(error < 4 * 2**-23, f"relative error {error:.1e}")


def vector_loads(lab: Lab) -> Finding:
    instructions = gelu_kernel(lab).instructions
    assert instructions is not None
    widths = instructions.widths("global", "load")
    return holds(16 in widths, ", ".join(f"{count} loads of {width} B a thread" for width, count in widths.items()))


def row_kernel(lab: Lab) -> Finding:
    (view,) = lab.kernels("softmax", "100x5000", "tilewright-triton")
    row, held = 5000 * 4, view.launch.registers * view.launch.threads * 4
    ours = f"{view.launch.grid[0]} programs for 100 rows; {held:,} B of registers for a row of {row:,} B"
    return holds(view.launch.grid[0] == 100 and held >= row and view.launch.shared_bytes < row, ours)


def softmaxes(lab: Lab, shape: str = "4000x5000") -> dict[str, Measurement]:
    impls = ("eager", "torch", "inductor", *(("tilewright-triton",) if lab.on_gpu else ()))
    return lab.bench("softmax", shape, "fp32", *impls)


def comparable(lab: Lab) -> Finding:
    found, right = [], True
    for shape in ("100x5000", "4000x5000", "65536x1024"):
        times = {name: row.median_us for name, row in softmaxes(lab, shape).items()}
        ours = times["tilewright-triton"]
        right &= times["eager"] > 2 * ours and all(abs(times[it] / ours - 1) <= 0.2 for it in ("torch", "inductor"))
        found.append(f"{shape}: " + ", ".join(f"{name} {time / ours:.2f}" for name, time in times.items()))
    return holds(right, "; ".join(found))


def compile_first(lab: Lab) -> Finding:
    found = softmaxes(lab)
    eager, compiled = found["eager"], found["inductor"]
    ours = f"softmax 4000×5000: compiled {eager.median_us / compiled.median_us:.1f} × the speed of the steps"
    return holds(compiled.p80_us < eager.p20_us, ours)


def five_ways(lab: Lab) -> Finding:
    def ways(name: str) -> set[str]:
        variants = suite(name).variants
        return {v.name for v in variants} & {"eager", "torch", "inductor"} | {v.language for v in variants}

    found = {name: ways(name) for name in ("softmax", "gelu")}
    wanted = {"eager", "torch", "inductor", "cuda", "triton"}
    ours = "; ".join(f"{name}: {', '.join(sorted(it & wanted))}" for name, it in found.items())
    return holds(lab.once("the suites of the bench", lambda: all(wanted <= it for it in found.values())), ours)


def through_shared(lab: Lab) -> Finding:
    found = lab.bench("matmul", "512x512x512", "fp32", "tilewright-cuda", "eager-steps")
    tiled, steps = found["tilewright-cuda"], found["eager-steps"]
    return holds(tiled.p80_us < steps.p20_us, f"{steps.median_us / tiled.median_us:,.0f} × the speed")


CLAIMS = (
    Claim("K1", "DRAM is large and slow, caches are faster, registers fastest.", "–", memories, "Measured ceilings."),
    Claim("K2", "A block runs on one SM, and crossing blocks is costly.", "–", one_sm_each,
          "Clusters of blocks soften it from the H100 on.", "cuda"),
    Claim("K3", "A warp is the unit of scheduling.", "32 threads", lambda lab: equal(
              gelu_kernel(lab).launch.threads // int(gelu_kernel(lab).launch.constants["num_warps"]), 32),
          "Threads of a compiled kernel over its warps."),
    Claim("K4", "An operator is compute-bound or memory-bound, by its intensity.", "FLOPs / bytes", third_bound,
          "Small ones are neither: launches or latency bound them."),
    Claim("K5", "Compute grows faster than bandwidth; most operators but products are memory-bound.", "–",
          compute_outgrows, "Rates in bf16, and operators of a block that are not compute-bound."),
    Claim("K6", "Always measure: hardware and workload matter.", "–", workload_matters,
          "The rate of one operator over sizes."),
    Claim("K7", "A benchmark gives end-to-end time and cannot locate it.", "–", one_figure,
          "That is what a profile is for."),
    Claim("K8", "First runs pay for compilation and set-up.", "–", warm_up, "The first call compiles."),
    Claim("K9", "Without synchronising one times the submission.", "–", submission,
          "A CUDA call returns when its work is queued.", "cuda"),
    Claim("K10", "Time grows faster than linearly with a product's size and linearly with layers.", "–", growth,
          "Flat where launches bound it."),
    Claim("K11", "The kernel behind matmul depends on its size.", "cuBLAS, CUTLASS", chosen_kernels,
          "cuBLAS chooses by heuristics.", "cuda"),
    Claim("K12", "For an MLP a table is not enough: ranges show each layer.", "–", layers_named,
          "`tilewright profile` puts a range around each layer."),
    Claim("K13", "The CPU runs ahead and queues kernels.", "–", runs_ahead, "Where kernels take longer than launches.",
          "cuda"),
    Claim("K14", "Printing the loss forces a synchronisation.", "–", printing,
          "The profile names the line; the loop is timed without and with it.", "cuda"),
    Claim("K15", "Asynchrony keeps Python from being the bottleneck.", "–", python_hidden,
          "Not for kernels shorter than their launches.", "cuda"),
    Claim("K16", "Fusion replaces many trips to DRAM by one in and one out.", "1 and 1", one_trip, "GeLU written out."),
    Claim("K17", "F.gelu is one kernel, GeLU written out many.", "1 against several", launches_of_gelu,
          "The default of F.gelu is erf; the formula by tanh is its approximation."),
    Claim("K18", "The fused one is faster.", "nearly 8 ×", lambda lab: elsewhere(
              slower(gelus(lab), "manual", "PyTorch").verdict == "reproduced",
              f"{ratio(lab, 'manual', 'PyTorch'):.1f} ×"),
          "8.1 / 1.1 is 7.4."),
    Claim("K19", "A CUDA kernel checks bounds, and is built at run time.", "–", ragged, "A prime number of elements.",
          "cuda"),
    Claim("K20", "Times of GeLU.", "manual 8.1, CUDA 1.8, PyTorch 1.1 ms",
          lambda lab: as_theirs(slower(gelus(lab), "manual", "CUDA", "PyTorch")), "No setting is given.", "cuda"),
    Claim("K21", "The CUDA kernel is very near PyTorch's.", "1.8 against 1.1 ms",
          lambda lab: close(ratio(lab, "CUDA", "PyTorch"), 1, " × PyTorch's time"),
          "Theirs is 64 % slower; ours loads 16 bytes a thread.", "cuda"),
    Claim("K22", "Triton handles coalescing by itself.", "–", vector_loads, "Widths of loads in the machine code."),
    Claim("K23", "Triton equals CUDA.", "about equal", lambda lab: close(ratio(lab, "Triton", "CUDA"), 1,
          " × CUDA's time"),
          "Both read and write memory once.", "cuda"),
    Claim("K24", "Compiling GeLU written out slightly beats CUDA and Triton.", "–",
          compiled_beats,
          "All move the same bytes; Inductor emits Triton on a GPU.", "cuda"),
    Claim("K25", "Triton's softmax gives each row to a program, which holds it in registers.", "grid = rows",
          row_kernel,
          "A row must fit a block."),
    Claim("K26", "It far outruns the steps and is comparable with PyTorch and torch.compile.", "–", comparable,
          "Times over Triton's; at 100 rows launches decide, so that all three shapes must agree.", "cuda"),
    Claim("K27", "Try torch.compile first.", "–", compile_first, "One kernel for five operators, without writing one."),
    Claim("K28", "Five ways per function.", "manual, PyTorch, compiled, CUDA, Triton", five_ways,
          "What `tilewright bench` races."),
    Claim("K29", "Minimise memory traffic; tile a product through shared memory.", "–", through_shared,
          "Against products written to memory, 512³.", "cuda"),
)  # fmt: skip
DOCUMENT = Document("Kernels lecture", "a GPU that is not named", CLAIMS)
