"""Experiments that check the claims: tilewright's own verbs on its examples, each run once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from tilewright.case_names import EXAMPLES
from tilewright.report.quantity import duration
from tilewright.store.run_paths import runs_in

from .claim import Finding, elsewhere, percent

if TYPE_CHECKING:
    from tilewright.hardware.geometry import KernelView
    from tilewright.measure.timing.benchmark import Timing
    from tilewright.records.case import Case
    from tilewright.records.measurement import Measurement
    from tilewright.records.program import Operator, Program
    from tilewright.trace.operators.operator_table import OperatorTable, OperatorTime

Result = TypeVar("Result")
EVENTS = 9_000_000
"""Never reached: the bound on events is kept by the process's memory, which a case's tensors fill too."""
SECONDS = 0.5
"""Time given to one race."""


class Profile:
    """A recorded run: its operator table, and SQL over its timeline."""

    def __init__(self, run: Path, table: OperatorTable, calls: int) -> None:
        self.run, self.table, self.calls = run, table, calls
        self.on_device = table.on_device

    def operator(self, name: str) -> OperatorTime:
        """The row of `aten::name` or of `name`; KeyError if it was not called."""
        found = {row.name: row for row in self.table.rows}
        return found.get(f"aten::{name}") or found[name]

    def spent(self, name: str) -> int:
        """Nanoseconds in the operator itself: on the device if one worked, else on the host."""
        row = self.operator(name)
        return row.device_self if self.on_device else row.cpu_self

    def share(self, name: str) -> float:
        """The operator's share of all time in operators, on the device if one worked."""
        return self.spent(name) / (self.table.device_ns if self.on_device else self.table.cpu_ns)

    def longest(self, count: int, *, host: bool = False, total: bool = False) -> list[str]:
        """The names of the longest operators, without `aten::`."""
        rows = [row for row in self.table.rows if row.kind == "operator"]
        if total:
            rows.sort(key=lambda row: -row.cpu_total)
        else:
            rows.sort(key=lambda row: -(row.cpu_self if host or not self.on_device else row.device_self))
        return [row.name.removeprefix("aten::") for row in rows[:count]]

    def words(self, names: Sequence[str]) -> str:
        """`exp 27.3 ms (15.9 %), …` of the operators themselves."""
        return ", ".join(f"{it} {duration(self.spent(it) / 1e3)} ({percent(self.share(it))})" for it in names)

    def ordered(self, *names: str) -> Finding:
        """Whether each operator took longer than the next."""
        times = [self.spent(name) for name in names]
        return elsewhere(times == sorted(times, reverse=True), self.words(names))

    @property
    def launches(self) -> int:
        """Kernels that the device ran."""
        return int(self.value("SELECT count(*) FROM device_slice WHERE kind = 'kernel'"))

    def launching(self) -> tuple[int, int]:
        """Nanoseconds of the host in launches, and their number."""
        rows = [row for row in self.table.rows if row.kind == "call" and "Launch" in row.name]
        return sum(row.cpu_self for row in rows), sum(row.calls for row in rows)

    @property
    def launch_us(self) -> float:
        """The median launch on the host."""
        return self.value("SELECT median(launch_dur) / 1e3 FROM launch_lag")

    def called_by(self, name: str) -> dict[str, int]:
        """Nanoseconds of the operators and calls directly inside `aten::name`."""
        return {it.name: it.dur for it in self.table.inside if it.outer_name == f"aten::{name}"}

    def sql(self, query: str) -> list[tuple[Any, ...]]:
        from tilewright.store.query import query as ask

        return ask(self.run, query)[1]

    def value(self, query: str) -> float:
        """The one number that `query` gives; 0 for NULL."""
        return float(self.sql(query)[0][0] or 0)


class Lab:
    """The experiments on one device, whose runs are in the folder `runs`, not among the user's.

    Each runs once; `used` lists the commands since it was last cleared.
    """

    def __init__(self, device: str, runs: Path, tell: Callable[[str], None] = lambda _: None) -> None:
        self.device, self.on_gpu = device, device != "cpu"
        self.runs = runs
        self.used: list[str] = []
        self.tell = tell
        self._results: dict[str, object] = {}

    def once(self, command: str, make: Callable[[], Result]) -> Result:
        """The result of an experiment, which is made when first asked for; a failure is kept and raised again."""
        if command not in self.used:
            self.used.append(command)
        if command not in self._results:
            self.tell(command)
            try:
                with runs_in(self.runs):
                    self._results[command] = make()
            except Exception as error:
                self._results[command] = error
        result = self._results[command]
        if isinstance(result, Exception):
            raise result
        return cast(Result, result)

    def example(self, file: str) -> Any:
        """The module `examples/<file>`."""
        from tilewright.bench.peers import example_module

        return example_module(file)

    def profile(self, target: str, calls: int, *options: str, case: Case | None = None, run: str = "") -> Profile:
        """`calls` recorded calls of a case after a warm-up, all of them, or with --warmup=1 those within --events.

        Further options are --training, --impl, --optimizer and --stacks, as of the command; `run` tells the second
        recording of the same from the first.
        """

        def make() -> Profile:
            from tilewright.measure.recording.plan import Detail, RecordingPlan
            from tilewright.profiling.steps import profile_case

            given = dict(option.lstrip("-").partition("=")[::2] for option in options)
            plan = RecordingPlan(
                wait=1,
                warmup=1,
                active=calls,
                whole=whole,
                light=False,
                events=int(given.get("events", EVENTS)),
                detail=Detail(shapes=True, stacks="stacks" in given, memory=False),
            )
            done = profile_case(
                case or self.case(target, training="training" in given),
                plan,
                impl=given.get("impl", "eager"),
                optimizer=given.get("optimizer", ""),
                device=self.device,
                command=f"tilewright claims ({command})",
            )
            assert done is not None, "no NVTX was asked for"
            return Profile(done.run, done.table, calls)

        whole = "--warmup=1" not in options
        words = ["--no-memory", *["--no-stacks"] * ("--stacks" not in options), *["--whole"] * whole, *options]
        words += [f"--events={EVENTS}"] * (not any(word.startswith("--events") for word in words))
        what = f"a recording of {target}:" if case else f"tilewright profile examples/{target}"
        command = f"{what} --active {calls} {' '.join(words)} {run}".rstrip()
        return self.once(command, make)

    def case(self, target: str, *, training: bool = False) -> Case:
        from tilewright.case_names import load_case

        return load_case(str(EXAMPLES / target), training=training)

    def program(
        self, target: str, on: str | None = None, *, training: bool = False, case: Case | None = None
    ) -> Program:
        """A case captured and priced for this device, or for a known one."""

        def make() -> Program:
            from tilewright.verbs import explain_case

            return explain_case(case or self.case(target, training=training), on).program

        what = f"the costs of {target}" if case else f"tilewright explain examples/{target}"
        command = f"{what}{' --training' * training}{f' --on {on}' if on else ''}"
        return self.once(command, make)

    def kernels(
        self, operator: str, size: str, impl: str, dtype: str = "fp32", *, walk: bool = False
    ) -> list[KernelView]:
        """The kernels of an operator compiled for an H200, none of them run; with `walk`, what programs access."""

        def make() -> list[KernelView]:
            from tilewright.anatomy.kernel_views import Request, kernel_views

            asked = Request(operator, (size,), impl, dtype, on="h200", code_only=not walk)
            return [view for _, views in kernel_views(asked) for view in views]

        return self.once(f"tilewright kernel {operator} {size} --impl {impl} --dtype {dtype} --on h200", make)

    def bench(self, suite: str, shape: str, dtype: str, *impls: str) -> dict[str, Measurement]:
        """One race of an operator's implementations, forward, verified, the cache flushed before each call."""

        def make() -> dict[str, Measurement]:
            from tilewright.bench import bench_suite, suite_named
            from tilewright.records.suite_filter import SuiteFilter

            wanted = SuiteFilter.parse(impl=",".join(impls), shapes=shape, dtype=dtype, direction="fwd")
            found = suite_named(suite)
            assert found is not None
            races = bench_suite(found, wanted, device=self.device, seconds=SECONDS * len(impls))
            return {row.impl: row for race in races for row in race.rows}

        options = f"--shapes {shape} --dtype {dtype} --direction fwd --impl {','.join(impls)}"
        return self.once(f"tilewright bench {suite} {options}", make)

    def race(self, name: str, functions: Mapping[str, Callable[[], object]]) -> dict[str, Timing]:
        """Functions timed in one interleaved run; on a GPU the L2 is flushed before each call."""
        from tilewright.measure.timing.benchmark import benchmark

        return self.once(
            f"a race: {name}",
            lambda: benchmark(functions, device=self.device, max_seconds=SECONDS * len(functions), min_repeats=7),
        )

    def wall_us(self, function: Callable[[], object], wait: bool = True) -> float:
        """One call on the wall clock; with `wait`, to the end of its work on the device."""
        import torch

        if self.on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        function()
        if wait and self.on_gpu:
            torch.cuda.synchronize()
        return (time.perf_counter() - began) * 1e6

    def peak(self, name: str, function: Callable[[], object]) -> int:
        """Peak bytes of a call above those live before it."""
        from tilewright.measure.memory import peak_bytes

        def make() -> int:
            function()
            return peak_bytes(function, self.device)

        return self.once(f"peak memory: {name}", make)

    def ceilings(self) -> dict[str, float]:
        """Measured rates of this device by kind, GB/s; `launch` in µs, `matmul …` and `vector …` in TFLOP/s."""

        def make() -> dict[str, float]:
            from tilewright.hardware.profiles import local_ceilings

            _, found = local_ceilings(False, self.device)
            return {f"{it.kind} {it.dtype}".strip() if it.kind == "matmul" else it.kind: it.value for it in found}

        return self.once("tilewright doctor", make)


def before(program: Program) -> list[Operator]:
    """The operators of the forward graph that move or compute something."""
    return [it for it in program.operators if (it.graph, it.stage) == ("forward", "before") and it.cost.bytes]


def after(program: Program) -> list[Operator]:
    """The launches of the optimised forward graph."""
    return [it for it in program.operators if (it.graph, it.stage) == ("forward", "after") and it.cost.bytes]


def named(operators: list[Operator], *names: str) -> list[Operator]:
    """The operators with these ATen names, such as `bmm`, in order."""
    return [it for it in operators if it.target.removeprefix("aten.").partition(".")[0] in names]


def nbytes(operators: list[Operator]) -> int:
    return sum(it.cost.bytes for it in operators)


def flops(operators: list[Operator]) -> int:
    return sum(it.cost.flops for it in operators)
