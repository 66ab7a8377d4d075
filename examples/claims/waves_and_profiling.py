"""Waves of blocks, a benchmark and a profiler in a few lines, and NVTX ranges in an MLP's training.

tilewright claims --only "W*"
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import fmean, median

import torch
from torch import nn

from tilewright.hardware.occupancy import Waves
from tilewright.measure.timing.benchmark import Timing
from tilewright.records.case import Case, InputSpec
from tilewright.report.quantity import duration

from .claim import Claim, Document, Finding, equal, holds, percent, slower
from .lab import Lab, Profile

STEPS = 20
SIZES = (1024, 8, 128)
"""Width, layers and batch of the example run."""
H200_SMS = 132


def spun(lab: Lab) -> dict[str, Timing]:
    """One full wave of blocks of 32 warps, of which an SM holds two, and one block more."""
    spin, sms = lab.example("claims/triton_kernels.py").spin, multiprocessors()
    out = torch.empty(8 * sms, dtype=torch.int32, device=lab.device)
    counts = {"one wave": 2 * sms, "one more": 2 * sms + 1}
    return lab.race("equal blocks", {name: partial(spin, out, count, 32) for name, count in counts.items()})


def multiprocessors() -> int:
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


def last_wave(lab: Lab) -> Finding:
    times = spun(lab)
    more = times["one more"].median_us / times["one wave"].median_us
    return holds(more > 1.2, f"one block more than a wave: {more:.2f} × the time")


def multiples(lab: Lab) -> Finding:
    full, more = lab.once(
        "idle slots by the geometry of waves",
        lambda: [Waves(n, H200_SMS, 1).idle for n in (4 * H200_SMS, 4 * H200_SMS + 1)],
    )
    return holds(full == 0 < more, f"idle in the last wave: {percent(full)} at 528 blocks, {percent(more)} at 529")


def many_blocks(lab: Lab) -> Finding:
    def lost(waves: int) -> float:
        made = Waves(waves * H200_SMS + 1, H200_SMS, 1)
        return 1 - made.waves / made.turns

    one, four = lab.once("time lost by the geometry of waves", lambda: (lost(1), lost(4)))
    return holds(four < 0.05, f"at worst {percent(one)} is lost after one wave, {percent(four)} after four")


def count_hidden(lab: Lab) -> Finding:
    ids = lab.once("the %smid of 264 programs", lambda: lab.example("claims/triton_kernels.py").multiprocessors(264))
    hidden = len(set(ids)) != multiprocessors()
    return holds(hidden, f"the device says {multiprocessors()} SMs, programs report {len(set(ids))}")


def trials(lab: Lab) -> list[float]:
    """Microseconds of 60 products of 1000 × 1000 after one warm-up."""

    def make() -> list[float]:
        x = torch.randn(1000, 1000, device=lab.device)
        return [lab.wall_us(partial(torch.mm, x, x)) for _ in range(61)][1:]

    return lab.once("60 products of 1000×1000, each on the wall clock", make)


def mean_of_three(lab: Lab) -> Finding:
    x = torch.randn(1000, 1000, device=lab.device)
    steady = lab.race("a product of 1000×1000", {"product": partial(torch.mm, x, x)})["product"].median_us
    ours = fmean(trials(lab)[:3])
    return holds(abs(ours / steady - 1) <= 0.2, f"mean of 3 {duration(ours)}, interleaved median {duration(steady)}")


def three_suffice(lab: Lab) -> Finding:
    means = [fmean(trials(lab)[i : i + 3]) for i in range(0, 60, 3)]
    spread = max(means) / min(means) - 1
    return holds(spread < 0.05, f"20 means of 3 differ by up to {percent(spread)}")


def first_calls(lab: Lab) -> tuple[float, float]:
    """Microseconds of the first call of a new operator on a new size, and of later ones."""

    def make() -> tuple[float, float]:
        x = torch.randn(3, 7, 1023, device=lab.device)
        times = [lab.wall_us(partial(torch.cumsum, x, 2)) for _ in range(20)]
        return times[0], median(times[10:])

    return lab.once("the first 20 calls of an eager operator", make)


def warm_up(lab: Lab) -> Finding:
    first, steady = first_calls(lab)
    return holds(first > 2 * steady, f"first {duration(first)}, later {duration(steady)}")


def returns_at_once(lab: Lab) -> Finding:
    x = torch.randn(4096, 4096, device=lab.device)
    timing = lab.race("a product of 4096³", {"product": partial(torch.mm, x, x)})["product"]
    assert timing.host_us is not None
    ours = f"the call returns after {duration(timing.host_us)}, its work ends after {duration(timing.median_us)}"
    return holds(timing.host_us < 0.5 * timing.median_us, ours)


def set_up_included(lab: Lab) -> Finding:
    x = torch.randn(1000, 1000, device=lab.device)

    def example() -> object:
        a, b = (torch.randn(1000, 1000).to(lab.device) for _ in range(2))
        return a @ b

    times = lab.race("a product of 1000×1000 with and without set-up", {"product": lambda: x @ x, "example": example})
    share = times["product"].median_us / times["example"].median_us
    return holds(share > 0.8, f"the product is {percent(share)} of what is timed")


def old_name(lab: Lab) -> Finding:
    def make() -> int:
        from torch.profiler import ProfilerActivity, profile

        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if lab.on_gpu else [])]
        x = torch.randn(64, 64, device=lab.device)
        with profile(activities=kinds, acc_events=True) as profiler:
            for function in (torch.exp, torch.sin, torch.cos, torch.tanh, torch.sqrt, torch.neg) * 2:
                function(x)
        table = profiler.key_averages().table(sort_by="cuda_time_total", row_limit=4, max_name_column_width=80)
        return sum("aten::" in line for line in table.splitlines())

    rows = lab.once("torch.profiler's table by cuda_time_total", make)
    return holds(0 < rows <= 4, f"the old name is accepted; {rows} rows of operators for a limit of 4")


def stack_cost(lab: Lab) -> Finding:
    def recorded(*options: str) -> tuple[float, float]:
        profile = lab.profile("mlp.py:mlp", 5, "--training", "--warmup=1", *options)
        ((us, events),) = profile.sql("SELECT recorded_us, events FROM recording")
        return float(us), float(events)

    (plain, fewer), (stacks, more) = recorded(), recorded("--stacks")
    return holds(
        more > fewer and stacks > plain, f"{more / fewer:.1f} × the events, {stacks / plain:.1f} × the time of a step"
    )


def stack_files(lab: Lab) -> Finding:
    def make() -> tuple[int, bool]:
        from torch.profiler import ProfilerActivity, profile

        with tempfile.TemporaryDirectory() as folder:
            text, picture = Path(folder) / "stacks.txt", Path(folder) / "stacks.svg"
            config = torch._C._profiler._ExperimentalConfig(verbose=True)
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if lab.on_gpu else [])]
            with profile(activities=kinds, with_stack=True, experimental_config=config, acc_events=True) as profiler:
                torch.randn(64, 64, device=lab.device).exp()
            profiler.export_stacks(str(text), "self_cuda_time_total")
            return len(text.read_text().splitlines()), picture.exists()

    lines, picture = lab.once("torch.profiler's export_stacks", make)
    return holds(lines > 0 and picture, f"{lines} lines of text; a picture: {picture}")


def training(lab: Lab, optimizer: str = "adam") -> Profile:
    width, layers, batch = SIZES
    made = lab.example("mlp.py").case(dimension=width, layers=layers, batch=batch)
    options = ("--training", *((f"--optimizer={optimizer}",) if optimizer else ()))
    return lab.profile(f"mlp.py:mlp({width}, {layers}, {batch})", STEPS, *options, case=made)


def ranges(profile: Profile, prefix: str) -> list[str]:
    return sorted(row.name for row in profile.table.rows if row.kind == "range" and row.name.startswith(prefix))


def layer_ranges(lab: Lab) -> Finding:
    layers, whole = ranges(training(lab), "layer "), ranges(training(lab), "phase forward")
    return holds(len(layers) == SIZES[1] and len(whole) == 1, f"{len(layers)} layers, the whole forward: {len(whole)}")


def without_cuda(lab: Lab) -> Finding:
    def make() -> str:
        try:
            torch.cuda.nvtx.range_push("step")
            torch.cuda.nvtx.range_pop()
        except RuntimeError as error:
            return f"nvtx raises: {str(error).partition('.')[0]}"
        return ""

    found = lab.once("an NVTX range in this build of PyTorch", make)
    return holds(not found, found or "nvtx accepts ranges")


def starts_late(lab: Lab) -> Finding:
    steps = lab.once("the condition step > 10", lambda: [step for step in range(100) if step > 10])
    return holds(steps[0] == 10, f"step {steps[0]} is the first, after {100 - len(steps)} steps")


def tree(lab: Lab) -> Finding:
    inside = {(it.name, it.outer_name) for it in training(lab).table.inside}
    wanted = {
        ("phase forward", "ProfilerStep*"),
        ("phase backward", "ProfilerStep*"),
        ("layer linears.0", "phase forward"),
    }
    return holds(wanted <= inside, "; ".join(f"{inner} in {outer}" for inner, outer in sorted(wanted & inside)))


def step_ranges(lab: Lab) -> Finding:
    profile = training(lab)
    forward = profile.operator("phase forward").calls
    return holds(forward == STEPS, f"{forward} forward ranges in {STEPS} steps; set-up is outside the recording")


def zeroing(lab: Lab) -> Finding:
    model = lab.example("mlp.py").MLP(256, 8).to(lab.device)
    optimizer = torch.optim.Adam(model.parameters())
    gradients = [torch.zeros_like(it) for it in model.parameters()]

    def after(zero: Callable[[], object]) -> None:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        zero()

    return slower(
        lab.race(
            "two ways to drop gradients",
            {
                "optimizer": partial(after, optimizer.zero_grad),
                "model": partial(after, partial(model.zero_grad, set_to_none=True)),
            },
        ),
        "optimizer",
        "model",
    )


def with_optimizer(lab: Lab) -> Finding:
    phases = [ranges(training(lab, optimizer), "phase ") for optimizer in ("adam", "")]
    words = ["phase backward", "phase forward"]
    ours = "; ".join(", ".join(name.removeprefix("phase ") for name in found) for found in phases)
    return holds(phases == [[*words, "phase optimizer"], words], ours)


def example_run(lab: Lab) -> Finding:
    def make() -> tuple[float, list[float]]:
        losses: list[torch.Tensor] = []
        with torch.device(lab.device):
            train = lab.example("mlp.py").train
            us = lab.wall_us(lambda: losses.append(train(*SIZES, 100)))
        return us, [float(it) for it in losses[0]]

    us, losses = lab.once("examples/mlp.py train(1024, 8, 128, steps=100) with Adam", make)
    ours = f"{len(losses)} steps in {duration(us)}, loss {losses[0]:.3f} → {losses[-1]:.3f}"
    return holds(len(losses) == 100 and losses[-1] < losses[0], ours)


def exact_ranges(lab: Lab) -> Finding:
    rows = [row for row in training(lab).table.rows if row.name.startswith("layer ")]
    host, device = (sum(getattr(row, what) for row in rows) / STEPS / 1e3 for what in ("cpu_total", "device_total"))
    return holds(abs(host / device - 1) <= 0.2, f"ranges {duration(host)} of host time, kernels {duration(device)}")


def exception_safe(lab: Lab) -> Finding:
    def make() -> dict[str, int]:
        depth, left = 0, {}
        kept = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop

        def push(_: str) -> None:
            nonlocal depth
            depth += 1

        def pop() -> None:
            nonlocal depth
            depth -= 1

        def pushed() -> None:
            torch.cuda.nvtx.range_push("layer")
            raise ValueError
            torch.cuda.nvtx.range_pop()

        def within() -> None:
            with torch.cuda.nvtx.range("layer"):
                raise ValueError

        torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = push, pop
        try:
            for name, function in (("push and pop", pushed), ("context manager", within)):
                depth = 0
                try:
                    function()
                except ValueError:
                    left[name] = depth
        finally:
            torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = kept
        return left

    left = lab.once("a layer that raises inside its NVTX range", make)
    ours = ", ".join(f"{name} leaves {count} open" for name, count in left.items())
    return holds(left["context manager"] < left["push and pop"], ours)


def slow_layer(lab: Lab) -> Finding:
    def build() -> nn.Module:
        widths = ((512, 512), (512, 8192), (8192, 512), (512, 512))
        return nn.Sequential(*(nn.Linear(*shape) for shape in widths))

    made = Case("uneven", build, [InputSpec.parse("fp32[B=512,D=512]")], training=False)
    profile = lab.profile("an MLP with two wide layers", 5, case=made)
    rows = [row for row in profile.table.rows if row.name.startswith("layer ")]
    longest = sorted(rows, key=lambda row: -(row.device_total if profile.on_device else row.cpu_total))
    names = [row.name.removeprefix("layer ") for row in longest]
    return holds(set(names[:2]) == {"1", "2"}, f"longest layers: {', '.join(names)}")


def known_peak(lab: Lab) -> Finding:
    found = lab.peak("64 MiB", lambda: torch.empty(2**24, device=lab.device))
    return equal(found, 2**26)


def training_example(lab: Lab) -> Finding:
    def make() -> dict[str, bool]:
        from tilewright.case_names import EXAMPLES

        text = (EXAMPLES / "gpt" / "train.py").read_text(encoding="utf-8")
        return {word: word in text for word in ("cosine", "DistributedDataParallel", "checkpoint")}

    found = lab.once("examples/gpt/train.py", make)
    return holds(all(found.values()), ", ".join(word for word, there in found.items() if there))


CLAIMS = (
    Claim("W1", "Blocks run in waves; a last wave that is not full idles SMs.", "–", last_wave,
          "A wave is what all SMs hold at once: SMs × resident blocks.", "cuda"),
    Claim("W2", "Make blocks a multiple of the SMs.", "–", multiples, "Wave quantization is the name of the problem."),
    Claim("W3", "Launch many blocks, and the last wave no longer matters.", "at least 4 × SMs", many_blocks,
          "k full waves can still lose 1 / (k + 1); below 5 % does not matter."),
    Claim("W4", "Programs cannot know the number of SMs.", "–", count_hidden,
          "It can be queried, and persistent kernels use it.", "cuda"),
    Claim("W5", "One warm-up, three trials and their mean time a function.", "mean of 3", mean_of_three,
          "Beside the median of interleaved calls, L2 flushed."),
    Claim("W6", "Three trials balance precision and cost.", "3", three_suffice,
          "Spread of such means, under 5 % to hold."),
    Claim("W7", "A warm-up takes out loading, caches and allocation.", "–", warm_up,
          "The first call of an operator of this process."),
    Claim("W8", "CUDA calls return at once; synchronize waits for all work.", "–", returns_at_once,
          "One call's host time.", "cuda"),
    Claim("W9", "The example measures a product.", "1000×1000, fp32", set_up_included,
          "It also draws random numbers on the CPU and copies both operands."),
    Claim("W10", "The profile's table is ordered by cuda_time_total.", "10 rows, names of 80", old_name,
          "Newer versions say device_time_total."),
    Claim("W11", "Call stacks cost overhead.", "–", stack_cost, "The same steps recorded without and with them."),
    Claim("W12", "Stacks are exported as text and as a picture.", "2 formats", stack_files,
          "PyTorch writes text alone; `tilewright report --flame` draws it."),
    Claim("W13", "An MLP has a range per layer and one around the forward pass.", "L + 1", layer_ranges,
          "Their class has no range around the whole."),
    Claim("W14", "Without CUDA the script falls back to the CPU.", "–", without_cuda,
          "Its NVTX calls need a CUDA build."),
    Claim("W15", "Profiling starts after 10 warm-up steps.", "step > 10", starts_late,
          "Counted from 0, step 11 is the twelfth."),
    Claim("W16", "The ranges of a step form a tree.", "step → forward, backward; forward → layers", tree,
          "In tilewright's timeline; their nsys command gives no capture range, so it records every step."),
    Claim("W17", "Every step has its range.", "step_i", step_ranges, "Counted in the timeline."),
    Claim("W18", "model.zero_grad(set_to_none=True) beats optimizer.zero_grad().", "–", zeroing,
          "Both set gradients to None by default since 2.0."),
    Claim("W19", "Without an optimizer a step is forward and backward alone.", "–", with_optimizer,
          "Phases of two recordings."),
    Claim("W20", "The example run.", "width 1024, 8 layers, batch 128, 100 steps", example_run,
          "It trains on random data."),
    Claim("W21", "Ranges time each layer exactly.", "–", exact_ranges,
          "A range covers the submission of a layer's kernels, not their run.", "cuda"),
    Claim("W22", "A context manager is better than push and pop.", "–", exception_safe,
          "Ranges left open by an exception."),
    Claim("W23", "Ranges help to find slow layers.", "–", slow_layer, "Two of four layers are 16 × as wide."),
    Claim("W24", "Reset the peak, then read the most memory allocated.", "–", known_peak,
          "The allocator's view, of a tensor whose size is known."),
    Claim("W25", "A schedule, real data and several GPUs are to be added.", "–", training_example,
          "The repository's training example has them."),
)  # fmt: skip
DOCUMENT = Document("Waves and profiling", "none: nothing is timed", CLAIMS)
