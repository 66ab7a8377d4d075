"""Runs the random programs of tests/fuzz in many processes, strict, on a CPU or a GPU.

    python -m benchmarks.random_programs --device cuda --count 1000 --jobs 16 --seconds 400 --out FILE

Each program is compiled alone and judged as the tests judge it; every third without gradients. `--of modules` draws
modules with parameters, buffers and graph breaks. A process that crashes or hangs costs one program. FILE gets a JSON
line for each program that failed, and a last line with the counts. Exit code 8 if one failed. `refused` are programs
that PyTorch does not run on the device, and modules that `aot_eager` does not run either; `unfinished` those that were
still running after --seconds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from tilewright.records.errors import VerificationError

Outcome = tuple[str, str]
"""One of `right`, `refused`, `wrong`, `raised`; for the last two a message."""
Judge = Callable[[int, str], Iterator[Outcome]]
"""Gives what came of a program on a device; of several outcomes the last one counts."""
FAILED = ("wrong", "raised", "crashed", "hung")
STARTING = 600.0
"""Seconds in which a process has to import its modules."""


def graphs(number: int, device: str) -> Iterator[Outcome]:
    """What came of a program; of a failure first the whole program, then the shortest part that fails."""
    from tests.fuzz.batches import Batch, drawn, failure
    from tests.fuzz.graphs import runs

    (graph,), seed, training = drawn(number, 1), 1000 * number, number % 3 != 2
    if not runs(graph, seed, device):
        yield "refused", ""
        return
    batch = Batch([graph], number, device)
    try:
        rows, record = batch.check(training)
        broken = [str(row) for found in batch.missed(rows, training).values() for row in found]
        broken += [f"left to PyTorch: {fallback}" for fallback in record.fallbacks]
        kind = "wrong"
    except Exception as error:
        broken, rows, kind = [f"{type(error).__name__}: {error}"], [], "raised"
    if not broken:
        yield "right", ""
        return
    yield kind, "\n".join([graph.reproducer(seed), *broken])
    yield kind, failure(graph, seed, training, rows, device)


def modules(number: int, device: str) -> Iterator[Outcome]:
    """As `graphs`, of a module with parameters and buffers, and with graph breaks, which are no failures."""
    import torch

    from tests.fuzz.batches import Alone, module_failure
    from tests.fuzz.modules import program, runs

    with torch.random.fork_rng():
        torch.manual_seed(number)
        module = program(number)
    if not runs(module, 1000 * number, device):
        yield "refused", ""
        return
    alone = Alone(module, number, device)
    try:
        rows, record = alone.check()
        broken, kind = [*map(str, alone.missed(rows)), *alone.left(record)], "wrong"
    except Exception as error:
        if alone.is_refused():
            yield "refused", ""
            return
        broken, kind = [f"{type(error).__name__}: {error}"], "raised"
    if not broken:
        yield "right", ""
        return
    yield kind, "\n".join([module.reproducer(1000 * number), *broken])
    yield kind, module_failure(module, number, device)


KINDS: dict[str, Judge] = {"graphs": graphs, "modules": modules}


def work(connection: Connection, judge: Judge, device: str, threads: int) -> None:
    """Answers numbers with outcomes, each with whether it is the last for its number."""
    os.environ |= {"TILEWRIGHT_STRICT": "1", "OMP_NUM_THREADS": str(threads)}
    warnings.filterwarnings("ignore")
    connection.send(("", "", True))
    while True:
        number = connection.recv()
        for kind, message in judge(number, device):
            connection.send((kind, message, False))
        connection.send(("", "", True))


@dataclass
class Worker:
    """A process, the program that it runs, what came of it so far, and until when it may run."""

    process: BaseProcess
    connection: Connection
    until: float
    number: int | None = None
    outcome: Outcome | None = None

    @classmethod
    def start(cls, options: argparse.Namespace, judge: Judge) -> Worker:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        threads = max(1, (os.cpu_count() or 1) // options.jobs)
        process = context.Process(target=work, args=(there, judge, options.device, threads), daemon=True)
        process.start()
        there.close()
        return cls(process, here, time.monotonic() + STARTING)

    def take(self, number: int, limit: float) -> None:
        self.number, self.outcome, self.until = number, None, time.monotonic() + limit
        self.connection.send(number)

    def is_done(self) -> bool:
        """Reads one answer; whether the process is free. EOFError if it has ended."""
        kind, message, is_last = self.connection.recv()
        if kind:
            self.outcome = kind, message
        return bool(is_last)

    def end(self) -> str:
        """Ends the process; how it ended."""
        self.process.join(1)
        code = self.process.exitcode
        if code is None:
            self.process.kill()
            self.process.join()
        self.connection.close()
        return f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


@dataclass
class Run:
    """The workers, the numbers that they have not yet taken, and the counts."""

    options: argparse.Namespace
    todo: list[int]
    judge: Judge = graphs
    began: float = field(default_factory=time.monotonic)
    counts: Counter[str] = field(default_factory=Counter)
    workers: list[Worker] = field(default_factory=list)

    def programs(self) -> None:
        self.workers = [Worker.start(self.options, self.judge) for _ in range(min(self.options.jobs, len(self.todo)))]
        while self.workers and time.monotonic() < self.began + self.options.seconds:
            ready = wait([w.connection for w in self.workers], timeout=1)
            for worker in list(self.workers):
                if worker.connection in ready:
                    self._answered(worker)
                elif time.monotonic() > worker.until:
                    self._replace(worker, worker.outcome or ("hung", f"no result after {self.options.limit} s"))
        for worker in self.workers:
            if worker.number is not None:
                self.counts["unfinished"] += 1
            worker.process.kill()

    def _answered(self, worker: Worker) -> None:
        try:
            if not worker.is_done():
                return
        except (EOFError, ConnectionResetError):
            self._replace(worker, worker.outcome)
            return
        self._count(worker, worker.outcome)
        # After a fault, a GPU may refuse whatever follows in its process.
        if worker.outcome is not None and worker.outcome[0] == "raised":
            worker.number = None
            self._replace(worker, None)
        elif self.todo:
            worker.take(self.todo.pop(0), self.options.limit)
        else:
            self.workers.remove(worker)
            worker.process.kill()

    def _replace(self, worker: Worker, outcome: Outcome | None) -> None:
        how = worker.end()
        if worker.number is None and worker.outcome is None:
            raise SystemExit(f"a process did not start: {how}")
        self._count(worker, outcome or ("crashed", how))
        self.workers.remove(worker)
        if self.todo:
            self.workers.append(Worker.start(self.options, self.judge))

    def _count(self, worker: Worker, outcome: Outcome | None) -> None:
        if worker.number is None or outcome is None:
            return
        kind, message = outcome
        self.counts[kind] += 1
        if kind in FAILED:
            self._write({"number": worker.number, "kind": kind, "message": message})

    def summary(self) -> None:
        seconds = round(time.monotonic() - self.began, 1)
        what = {"device": self.options.device, "torch": version("torch"), "first": self.options.first}
        self._write({**what, "seconds": seconds, **self.counts, "not started": len(self.todo)})

    def _write(self, row: dict[str, object]) -> None:
        line = json.dumps(row)
        print(line, flush=True)
        if self.options.out:
            with self.options.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--of", choices=list(KINDS), default="graphs", help="functions of tensors, or modules")
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=600, help="when to stop")
    parser.add_argument("--limit", type=float, default=90, help="seconds that one program may take")
    parser.add_argument("--out", type=Path, help="file that the lines are added to")
    options = parser.parse_args()
    run = Run(options, list(range(options.first, options.first + options.count)), KINDS[options.of])
    run.programs()
    run.summary()
    sys.exit(VerificationError.exit_code if any(run.counts[kind] for kind in FAILED) else 0)


if __name__ == "__main__":
    main()
