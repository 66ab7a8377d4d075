"""A made-up training run as Kineto writes one, which knows its own truth: folded stacks, and what memory held."""

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.trace.loading import complete, written
from tilewright.store import Run
from tilewright.trace import load_traces

HOST, STREAM, GPU = 4000, 7, 0
OPERATORS = ("aten::addmm", "aten::mul", "aten::_softmax", "aten::dropout", "aten::layer_norm", "aten::embedding")
KERNELS = ("sm90_xmma_gemm_bf16", "vectorized_elementwise_kernel", "softmax_warp_forward")
Path_ = tuple[str, ...]


class TrainingTrace:
    """Steps of forward, backward and optimizer on one thread, kernels on one stream; times are whole ns.

    `host` and `device` are the own time of every stack, from the thread down; `live` is what memory held when it
    was fullest: bytes by (operator, phase).
    """

    def __init__(self, seed: int = 0, steps: int = 2, operators: int = 12, stacks: bool = True) -> None:
        self.events: list[dict[str, Any]] = [
            self._meta("process_name", HOST, {"name": "python"}),
            self._meta("thread_name", HOST, {"name": f"thread {HOST} (python)"}, HOST),
            self._meta("process_name", GPU, {"name": "python"}),
            self._meta("process_labels", GPU, {"labels": "GPU 0"}),
        ]
        self.host: Counter[Path_] = Counter()
        self.device: Counter[Path_] = Counter()
        self.peak = 0
        self.live: dict[tuple[str, str], int] = {}
        self._random = random.Random(seed)
        self._now = 1_000
        self._path: Path_ = (f"thread {HOST} (python)",)
        self._stream_free = 0
        self._number = 0
        self._held: dict[int, tuple[int, str, str]] = {}
        self._before = self._allocated = 5_000
        frames = ("train.py(3): main", "train.py(12): step") if stacks else ()
        for step in range(steps):
            for phase in ("forward", "backward", "optimizer"):
                self._phase(phase, step, frames, operators)

    def write(self, path: Path) -> Path:
        return written(path, self.events, schemaVersion=1)

    def _phase(self, phase: str, step: int, frames: Path_, operators: int) -> None:
        with ExitStack() as inside:
            if phase == "forward":
                inside.enter_context(self._span(f"ProfilerStep#{step}", "user_annotation", "ProfilerStep"))
            for frame in frames:
                inside.enter_context(self._span(frame, "python_function"))
            inside.enter_context(self._span(f"phase {phase}", "user_annotation"))
            for _ in range(operators):
                self._operator(phase)
                self._now += self._random.randrange(1, 900)
        self._now += 500

    @contextmanager
    def _span(
        self, name: str, category: str, folded: str | None = None, args: Mapping[str, object] | None = None
    ) -> Iterator[None]:
        """A slice around what happens within, which has its own time: all of it but what its children take."""
        outer, start = self._path, self._now
        self._path = path = (*outer, folded or name)
        self._now += 1
        yield
        self._now += 1
        self._path, dur = outer, self._now - start
        self.events.append(complete(name, start / 1e3, dur / 1e3, HOST, HOST, cat=category, args=args or {}))
        self.host[path] += dur
        if len(outer) > 1:
            self.host[outer] -= dur

    def _operator(self, phase: str, depth: int = 0) -> None:
        name = self._random.choice(OPERATORS)
        with self._span(name, "cpu_op", args={"Input Dims": [[self._random.choice((8, 17)), 64]]}):
            self._now += self._random.randrange(1, 3_000)
            for _ in range(self._random.randrange(0, 3) if depth < 2 else 0):
                self._operator(phase, depth + 1)
                self._now += self._random.randrange(1, 400)
            self._allocate(name, phase)
            if self._random.random() < 0.7:
                self._launch()
            self._now += self._random.randrange(1, 500)

    def _launch(self) -> None:
        self._number += 1
        kernel, called = self._random.choice(KERNELS), self._now
        start, dur = max(called + 2_500, self._stream_free), self._random.randrange(800, 20_000)
        with self._span("cudaLaunchKernel", "cuda_runtime", args={"correlation": self._number}):
            self.device[(*self._path, kernel)] += dur
            self._now += 1_800
        self._flow("s", HOST, HOST, called)
        self._flow("f", GPU, STREAM, start)
        args = {"correlation": self._number, "grid": [132, 1, 1], "stream": STREAM}
        self.events.append(complete(kernel, start / 1e3, dur / 1e3, STREAM, GPU, cat="kernel", args=args))
        self._stream_free = start + dur + 1

    def _allocate(self, operator: str, phase: str) -> None:
        """One allocation, and sometimes the freeing of an older one; an address is used again after its freeing."""
        size = self._random.randrange(1, 100) * 512
        address = next(i for i in range(1, len(self._held) + 2) if i not in self._held)
        self._held[address] = (size, operator, phase)
        self._memory(address, size)
        if self._random.random() < 0.6 or len(self._held) > 60:
            freed = self._random.choice(list(self._held))
            self._memory(freed, -self._held.pop(freed)[0])

    def _memory(self, address: int, size: int) -> None:
        self._allocated += size
        args = {"Device Type": 1, "Device Id": 0, "Bytes": size, "Addr": address}
        args |= {"Total Allocated": self._allocated, "Total Reserved": 1 << 20}
        place = {"pid": HOST, "tid": HOST, "ts": self._now / 1e3}
        self.events.append({"ph": "i", "s": "t", "cat": "cpu_instant_event", "name": "[memory]", **place, "args": args})
        self._now += 3
        if self._allocated > self.peak:
            self.peak = self._allocated
            sums: Counter[tuple[str, str]] = Counter({("before the profile", "other"): self._before})
            for held, operator, phase in self._held.values():
                sums[operator, phase] += held
            self.live = dict(sums)

    def _flow(self, phase: str, pid: int, tid: int, ts: int) -> None:
        event = {"ph": phase, "id": self._number, "cat": "ac2g", "name": "ac2g", "pid": pid, "tid": tid, "ts": ts / 1e3}
        self.events.append(event | ({"bp": "e"} if phase == "f" else {}))

    @staticmethod
    def _meta(name: str, pid: int, args: dict[str, Any], tid: int = 0) -> dict[str, Any]:
        return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


def load(path: Path, run: Path, *more: Path) -> Path:
    """A new run at `run` that holds the trace at `path`, and `more`."""
    with Run.create(run, command=f"tilewright trace {path.name}", target=str(path), case=path.stem) as made:
        load_traces([path, *more], made.connection)
    return run
