"""Small traces as PyTorch's profiler writes them, made by hand so that every answer is known."""

import itertools
import json
import tempfile
from collections.abc import Callable, Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import duckdb

from tests.trace.loading import Rows, rows
from tilewright.store.rows import create_tables
from tilewright.trace import load_traces
from tilewright.trace.account.host_time import add_host_time
from tilewright.trace.analysis import account_for_device, analyse, attribute, judge, price_operators
from tilewright.trace.operators.operator_table import add_operator_table

T = TypeVar("T")
HOST, AUTOGRAD, STREAM = 100, 101, 7
H200 = {"id": 0, "name": "NVIDIA H200", "computeMajor": 9, "computeMinor": 0, "numSms": 132}


class Trace:
    """Events of one process and its device 0; times are whole microseconds from 1000 on."""

    def __init__(self, pid: int = 4000, rank: int | None = None, device: dict[str, Any] | None = None) -> None:
        self.pid = pid
        self.events: list[dict[str, Any]] = []
        self.header: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": [device or H200]}
        if rank is not None:
            self.header["distributedInfo"] = {"rank": rank, "world_size": 2}
        self._numbers = itertools.count(1)
        self._analysis: Analysis | None = None
        self._meta("process_name", self.pid, 0, "python")
        self._meta("process_labels", 0, 0, "GPU 0")
        self._meta("process_name", 0, 0, "python")

    def slice(self, category: str, name: str, start: float, end: float, thread: int = HOST, **args: object) -> None:
        self._add("X", category, name, self.pid, thread, start, args, dur=end - start)

    def operator(self, name: str, start: float, end: float, thread: int = HOST, **args: object) -> None:
        """With `dims=[[2, 3]]` and the like, what the profiler writes of the operands."""
        dims = args.pop("dims", None)
        if dims is not None:
            assert isinstance(dims, list)
            args |= {"Input Dims": dims, "Input type": args.pop("types", ["float"] * len(dims))}
            args.setdefault("Concrete Inputs", [""] * len(dims))
        self.slice("cpu_op", name, start, end, thread, **args)

    def step(self, number: int, start: float, end: float) -> None:
        self.slice("user_annotation", f"ProfilerStep#{number}", start, end)

    def frame(self, name: str, start: float, end: float) -> None:
        self.slice("python_function", name, start, end)

    def call(self, name: str, start: float, end: float, thread: int = HOST, correlation: int | None = None) -> int:
        """A call into CUDA; returns its correlation."""
        number = next(self._numbers) if correlation is None else correlation
        category = "cuda_driver" if name.startswith("cu") and not name.startswith("cuda") else "cuda_runtime"
        self.slice(category, name, start, end, thread, correlation=number)
        return number

    def work(
        self,
        start: float,
        end: float,
        correlation: int,
        *,
        name: str = "kernel",
        category: str = "kernel",
        stream: int = STREAM,
        grid: tuple[int, int, int] = (132, 1, 1),
        registers: int = 32,
        **args: object,
    ) -> None:
        given: dict[str, object] = {"correlation": correlation, "device": 0, "stream": stream} | args
        if category == "kernel":
            given |= {"grid": list(grid), "block": [128, 1, 1], "registers per thread": registers, "shared memory": 0}
        self._add("X", category, name, 0, stream, start, given, dur=end - start)

    def launch(self, at: float, start: float, end: float, *, thread: int = HOST, **kernel: Any) -> int:
        """A kernel that ran from `start` to `end`, and the microsecond at `at` in which it was launched."""
        correlation = self.call("cudaLaunchKernel", at, at + 1, thread)
        self.work(start, end, correlation, **kernel)
        return correlation

    def capture(self, *operators: str, **args: object) -> None:
        """A CUDA graph of one kernel an operator, captured within the first 120 µs."""
        self.call("cudaStreamBeginCapture", 1, 2)
        for at, name in zip(range(10, 100, 30), operators, strict=False):
            self.operator(name, at, at + 20, **args)
            self.call("cudaLaunchKernel", at + 5, at + 8)
        self.call("cudaStreamEndCapture", 110, 115)

    def replay(self, at: float, *kernels: str) -> None:
        """A graph launched at `at`, whose kernels take 10 µs each."""
        correlation = self.call("cudaGraphLaunch", at, at + 5)
        for place, name in enumerate(kernels, 1):
            self.work(at + 10 * place, at + 10 * place + 10, correlation, name=name)

    def flow(self, category: str, number: int, out: tuple[float, int], into: tuple[float, int]) -> None:
        """From the slice at a time and thread to another."""
        for phase, (at, thread) in (("s", out), ("f", into)):
            extra = {"id": number} | ({"bp": "e"} if phase == "f" else {})
            self._add(phase, category, category, self.pid, thread, at, None, **extra)

    def write(self, folder: Path, name: str = "trace") -> Path:
        path = folder / f"{name}.json"
        path.write_text(json.dumps(self.header | {"traceEvents": self.events}))
        return path

    def analysed(self, *before: str) -> duckdb.DuckDBPyConnection:
        return analysed([self], *before)

    def rows(self, sql: str) -> Rows:
        """The answer from the trace as it was when it was first asked."""
        if self._analysis is None:
            self._analysis = Analysis([self])
        return self._analysis.rows(sql)

    def _meta(self, name: str, pid: int, thread: int, text: str) -> None:
        value = {"labels" if name == "process_labels" else "name": text}
        self.events.append({"ph": "M", "name": name, "pid": pid, "tid": thread, "ts": 0, "args": value})

    def _add(
        self, phase: str, category: str, name: str, pid: int, thread: int, at: float, args: object, **more: object
    ) -> None:
        event = {"ph": phase, "cat": category, "name": name, "pid": pid, "tid": thread, "ts": 1000 + at} | more
        self.events.append(event if args is None else event | {"args": args})


class Analysis:
    """A run's database in memory with these traces, loaded after the statements `before`.

    A stage of the analysis runs when a question needs a table that no earlier stage has made.
    """

    def __init__(self, traces: Iterable[Trace | Path], *before: str) -> None:
        self.connection = _loaded(traces, *before)
        self.connection.execute("ATTACH ':memory:' AS scratch")
        self._left = [attribute, account_for_device, add_operator_table, add_host_time, price_operators, judge]

    def rows(self, sql: str) -> Rows:
        return self.ask(lambda connection: rows(connection, sql))

    def ask(self, question: Callable[[duckdb.DuckDBPyConnection], T]) -> T:
        while True:
            try:
                return question(self.connection)
            except duckdb.CatalogException:
                if not self._left:
                    raise
                self._left.pop(0)(self.connection)


def analysed(traces: Iterable[Trace | Path], *before: str) -> duckdb.DuckDBPyConnection:
    """A run's database in memory with these traces, loaded after the statements `before`, analysed as users do."""
    connection = _loaded(traces, *before)
    analyse(connection)
    return connection


def _loaded(traces: Iterable[Trace | Path], *before: str) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    create_tables(connection)
    connection.execute(files("tilewright.store").joinpath("schema.sql").read_text("utf-8"))
    for statement in before:
        connection.execute(statement)
    with tempfile.TemporaryDirectory() as folder:
        paths = [
            trace if isinstance(trace, Path) else trace.write(Path(folder), f"trace{number}")
            for number, trace in enumerate(traces)
        ]
        load_traces(paths, connection)
    return connection


def region(name: str, source: str = "") -> str:
    """The statement by which a run knows a generated kernel: it reads 256 MB, writes 128 MB and takes 7,000 FLOPs."""
    costs = """1 AS reads, 1 AS writes, 0 AS unused, 256000000 AS bytes_read, 128000000 AS bytes_written, 7000 AS flops,
               5 AS transcendentals, 'formula' AS provenance"""
    return f"""
        INSERT INTO region BY NAME
        SELECT 'backward' AS graph, '{name}' AS name, ['gelu'] AS members, {costs},
               'triton' AS language, '' AS source_code, '' AS schedule;
        INSERT INTO operator BY NAME
        SELECT 'backward' AS graph, 'after' AS stage, 1 AS index, 'r' AS name, 'kernel' AS target, {costs},
               'pointwise' AS operator_class, [1] AS shape, 'float32' AS dtype, '{name}' AS region,
               '{source}' AS source, [] AS inputs"""
