"""A trace as Kineto writes it, of any size: training steps of a Transformer with stacks, shapes, flows and memory.

    python -m benchmarks.synthetic_trace OUT.json [--megabytes 300] [--rank 0 --world 1] [--since-1970]

Every byte follows from the arguments, so that two machines load the same file. Names, arguments and layout are
those of PyTorch 2.13's exporter; times are invented.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TextIO

PID, STREAM, BACKWARD = 4243, 7, 4268
_BEGIN_NS = 4_414_010_607_000_000
_BASE_NS = 1_790_857_026_000_000_123
_ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, {0}, std::array<char*, {1}ul> >(int, {0}, std::array<>)"
)
_KERNELS = {
    "aten::addmm": "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_"
    "off_kernel__5x_cublas",
    "aten::gelu": _ELEMENTWISE.format(
        "at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&, at::native::GeluType)::{lambda()#2}::operator()() "
        "const::{lambda()#4}::operator()() const::{lambda(c10::BFloat16)#1}",
        2,
    ),
    "aten::native_layer_norm": "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, "
    "float, false>(int, float, c10::BFloat16 const*, c10::BFloat16 const*, float*, float*, c10::BFloat16*)",
    "aten::_softmax": "void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 10, "
    "false, false>(c10::BFloat16*, c10::BFloat16 const*, int, int, int, bool const*, int, bool)",
    "aten::add": _ELEMENTWISE.format("at::native::CUDAFunctor_add<c10::BFloat16>", 3),
    "aten::native_dropout": "void at::native::(anonymous namespace)::fused_dropout_kernel_vec<c10::BFloat16, float, "
    "unsigned int, 1, 8, bool>(at::cuda::detail::TensorInfo<c10::BFloat16 const, unsigned int>, unsigned int, float)",
}
_LAYER = (
    ("LayerNorm", ("aten::native_layer_norm",)),
    ("Attention", ("aten::addmm", "aten::addmm", "aten::addmm", "aten::_softmax", "aten::addmm", "aten::addmm")),
    ("Dropout", ("aten::native_dropout", "aten::add")),
    ("LayerNorm", ("aten::native_layer_norm",)),
    ("FeedForward", ("aten::addmm", "aten::gelu", "aten::addmm")),
    ("Dropout", ("aten::native_dropout", "aten::add")),
)
_LAYERS = 12
_INSIDE = ("aten::empty", "aten::view", "aten::as_strided")


@dataclass
class Writer:
    """Events into `out`, in Kineto's layout of several lines an event; the counts of what was written."""

    out: TextIO
    random: Random
    now: int
    device_free: int
    correlation: int = 0
    index: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    bytes: int = 0

    def write(self, phase: str, text: str) -> None:
        self.bytes += self.out.write(text if not self.counts else ",\n" + text)
        self.counts[phase] = self.counts.get(phase, 0) + 1

    def complete(self, category: str, name: str, pid: int, tid: int, begin: int, length: int, args: str) -> None:
        self.write(
            "X",
            f'  {{\n    "ph": "X",\n    "cat": "{category}",\n    "name": {json.dumps(name)},\n    "pid": {pid},\n    '
            f'"tid": {tid},\n    "ts": {_microseconds(begin)},\n    "dur": {_microseconds(length)}\n    ,\n    "args": '
            f"{{\n      {args}\n    }}\n  }}",
        )

    def flow(self, phase: str, name: str, number: int, pid: int, tid: int, ts: int) -> None:
        bound = ',\n    "bp": "e"' if phase == "f" else ""
        self.write(
            phase,
            f'  {{\n    "ph": "{phase}",\n    "id": {number},\n    "pid": {pid},\n    "tid": {tid},\n    "ts": '
            f'{_microseconds(ts)},\n    "cat": "{name}",\n    "name": "{name}"{bound}\n    \n  }}',
        )

    def memory(self, tid: int, nbytes: int) -> None:
        self.index += 1
        self.write(
            "i",
            f'  {{\n    "ph": "i",\n    "cat": "cpu_instant_event",\n    "s": "t",\n    "name": "[memory]",\n    '
            f'"pid": {PID},\n    "tid": {tid},\n    "ts": {_microseconds(self.now)}\n    ,\n    '
            f'"args": {{\n      "Total Reserved": 262144000, "Total Allocated": {154213888 + nbytes}, '
            f'"Bytes": {nbytes}, "Device Id": 0, "Device Type": 1, '
            f'"Addr": {140266816143360 + 512 * self.index}, "finished": false, "Ev Idx": {self.index}\n    }}\n  }}',
        )

    def operator(self, name: str, tid: int, sequence: int) -> None:
        """An operator with what it calls, its launch and its kernel."""
        self.index += 1
        own, begin = self.index, self.now
        for inner in _INSIDE:
            self.now += self.random.randrange(300, 900)
            self.index += 1
            start = self.now
            self.now += self.random.randrange(400, 2000)
            self.complete(
                "cpu_op", inner, PID, tid, start, self.now - start,
                f'"External id": {self.index},"Record function id": 0, '
                f'"Concrete Inputs": ["[64, 1024]", "15", "", "", "", ""], '
                f'"Input type": ["ScalarList", "Scalar", "", "", "", ""], "Input Strides": [[], [], [], [], [], []], '
                f'"Input Dims": [[], [], [], [], [], []], "Ev Idx": {self.index}',
            )  # fmt: skip
        self.memory(tid, 2097152)
        self.launch(_KERNELS[name], tid, own)
        self.now += self.random.randrange(500, 1500)
        self.complete(
            "cpu_op", name, PID, tid, begin, self.now - begin,
            f'"External id": {own},"Sequence number": {sequence}, "Fwd thread id": 0, "Record function id": 0, '
            '"Concrete Inputs": ["", "", "", "1", "1"], "Input type": ["c10::BFloat16", "c10::BFloat16", '
            '"c10::BFloat16", "Scalar", "Scalar"], "Input Strides": [[1], [1024, 1], [1, 1024], [], []], '
            f'"Input Dims": [[1024], [8192, 1024], [1024, 1024], [], []], "Ev Idx": {own}',
        )  # fmt: skip

    def launch(self, kernel: str, tid: int, external: int) -> None:
        self.correlation += 1
        number, begin = self.correlation, self.now
        self.now += self.random.randrange(3000, 6000)
        started = max(self.device_free, self.now) + self.random.randrange(700, 1200)
        self.device_free = started + self.random.randrange(1500, 9000)
        self.complete(
            "kernel", kernel, 0, STREAM, started, self.device_free - started,
            f'"External id": {external},\n      "queued": 0, "device": 0, "context": 1,\n      "stream": {STREAM}, '
            f'"correlation": {number},\n      "registers per thread": 32, "shared memory": 0,\n      "blocks per SM": '
            '3.878788,\n      "warps per SM": 15.515152,\n      "grid": [512, 1, 1],\n      '
            '"block": [128, 1, 1],\n      "est. achieved occupancy %": 24',
        )  # fmt: skip
        self.flow("f", "ac2g", number, 0, STREAM, started)
        self.complete(
            "cuda_runtime", "cudaLaunchKernel", PID, tid, begin, self.now - begin,
            f'"External id": {external},\n      "cbid": 211, "correlation": {number}',
        )  # fmt: skip
        self.flow("s", "ac2g", number, PID, tid, begin)

    def python(self, name: str, begin: int, parent: int) -> int:
        self.index += 1
        self.complete(
            "python_function", name, PID, PID, begin, self.now - begin,
            f'"Python parent id": {parent}, "Python id": {self.index}, "Ev Idx": {self.index}',
        )  # fmt: skip
        return self.index

    def step(self, number: int) -> None:
        """Forward under Python's stack, then backward on the engine's thread, joined by flows."""
        begin, sequences = self.now, []
        for layer in range(_LAYERS):
            entered = self.now
            for index, (module, operators) in enumerate(_LAYER):
                inner = self.now
                for name in operators:
                    self.now += self.random.randrange(1000, 4000)
                    sequence = self.index + 1
                    sequences.append(sequence)
                    at = self.now
                    self.operator(name, PID, sequence)
                    self.flow("s", "fwdbwd", sequence, PID, PID, at)
                self.now += 700
                self.python(f"nn.Module: {module}_{layer * len(_LAYER) + index}", inner, number)
                self.python(f"torch/nn/modules/module.py(1779): _call_impl {module}", inner, number)
            self.python(f"model.py({40 + layer}): forward", entered, number)
        for sequence in reversed(sequences):
            self.now += self.random.randrange(1000, 3000)
            at = self.now
            self.operator("aten::addmm", BACKWARD, sequence)
            self.flow("f", "fwdbwd", sequence, PID, BACKWARD, at)
        self.index += 1
        self.complete(
            "user_annotation", f"ProfilerStep#{number}", PID, PID, begin, self.now - begin,
            f'"External id": {self.index},"Record function id": 0, "Ev Idx": {self.index}',
        )  # fmt: skip
        self.now += 20_000


def _microseconds(nanoseconds: int) -> str:
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


def _metadata(begin_ns: int) -> Iterator[str]:
    names = [("process_name", PID, 0, "name", "python3"), ("process_labels", PID, 0, "labels", "CPU")]
    names += [("process_name", 0, 0, "name", "python3"), ("process_labels", 0, 0, "labels", "GPU 0")]
    names += [("thread_name", PID, PID, "name", f"thread {PID} (python3)")]
    names += [("thread_name", PID, BACKWARD, "name", f"thread {BACKWARD} (pt_autograd_0)")]
    names += [("thread_name", 0, STREAM, "name", f"stream {STREAM} ")]
    for what, pid, tid, key, value in names:
        yield (
            f'  {{\n    "ph": "M",\n    "name": "{what}",\n    "ts": {_microseconds(begin_ns)},\n    '
            f'"pid": {pid},\n    "tid": {tid},\n    "args": {{\n      "{key}": "{value}"\n    }}\n  }}'
        )


def write(path: Path, megabytes: float, rank: int = 0, world: int = 1, since_1970: bool = False) -> dict[str, int]:
    """Write whole steps until the file has about `megabytes` · 10⁶ bytes; returns how many events of each phase.

    With `since_1970` times are those of the calendar, with fractions of microseconds, as some versions write them.
    """
    begin = _BEGIN_NS + since_1970 * _BASE_NS
    with path.open("w", encoding="utf-8") as out:
        writer = Writer(out, Random(rank), begin, begin)
        distributed = (
            f'"distributedInfo": {{"backend": "nccl", "rank": {rank}, "world_size": {world}}},\n' if world > 1 else ""
        )
        out.write(
            f' {{\n    "schemaVersion": 1,\n    "deviceProperties": [],\n    {distributed}"with_stack": 1,\n    '
            f'"record_shapes": 1,\n    "displayTimeUnit": "ms",\n    '
            f'"baseTimeNanoseconds": {0 if since_1970 else _BASE_NS},\n    "traceEvents": [\n'
        )
        for text in _metadata(begin):
            writer.write("M", text)
        number = 0
        while writer.bytes < megabytes * 1e6:
            writer.step(number)
            number += 1
        out.write(f'\n  ],\n  "traceName": {json.dumps(path.name)}\n}}\n')
    return writer.counts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--megabytes", type=float, default=300)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--since-1970", action="store_true")
    given = parser.parse_args()
    print(write(given.out, given.megabytes, given.rank, given.world, given.since_1970))


if __name__ == "__main__":
    main()
