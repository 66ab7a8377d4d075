"""Sixteen implementations that cheat: small adversarial implementations of y = 3 · max(x, 0).

Each is a factory, so that what one keeps from call to call is its own. Those with a `cuda` in the name need
a GPU; where a cheat works differently there, both spellings are here.
"""

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewright.records.suite import Suite, Variant, Work, Workload

Function = Callable[[Tensor], Any]


def reference(x: Tensor) -> Tensor:
    """y = 3 · max(x, 0)."""
    return x.clamp(min=0) * 3


def suite(function: Function, *others: Variant) -> Suite:
    """A suite in which `function` races eager PyTorch; sizes are (rows, columns)."""

    def workload(sizes: tuple[int, ...], dtype: str) -> Workload:
        kind: torch.dtype = getattr(torch, dtype)

        def make(device: torch.device, generator: torch.Generator) -> tuple[Tensor]:
            return (torch.randn(sizes, dtype=kind, device=device, generator=generator).requires_grad_(),)

        nbytes = sizes[0] * sizes[1] * kind.itemsize
        return Workload(
            f"{sizes[0]}x{sizes[1]} {dtype}", sizes, dtype, make, {"fwd": Work(2 * nbytes), "bwd": Work(3 * nbytes)}
        )

    variants = [Variant("suspect", "torch", function), Variant("eager", "torch", reference), *others]
    return Suite("ramp", "y = 3 · max(x, 0)", reference, workload, variants, sizes=[(64, 257)], dtypes=("float32",))


def cached_output() -> Function:
    """The same tensor for the same address."""
    known: dict[int, Tensor] = {}

    def cheat(x: Tensor) -> Tensor:
        if x.data_ptr() not in known:
            known[x.data_ptr()] = reference(x)
        return known[x.data_ptr()]

    return cheat


def later() -> Callable[[Callable[[], object]], None]:
    """Does each piece of work on a thread of its own once the next is handed in: after every look at the result."""
    turn = threading.Event()

    def hand_in(work: Callable[[], object]) -> None:
        nonlocal turn
        turn.set()
        turn = own = threading.Event()
        threading.Thread(target=lambda: (own.wait(), work()), daemon=True).start()

    return hand_in


def side_thread() -> Function:
    """The work done by somebody else, after the return."""
    hand_in = later()

    def cheat(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        hand_in(lambda: out.detach().copy_(reference(x).detach()))
        return out

    return cheat


def side_stream_cuda() -> Function:
    """The work done on a stream that nobody waits for."""
    stream = torch.cuda.Stream()

    def cheat(x: Tensor) -> Tensor:
        with torch.cuda.stream(stream):
            return reference(x)

    return cheat


def unjoined_stream_cuda() -> Function:
    """The work done on a stream that waits for the caller's, which does not wait for it."""
    stream = torch.cuda.Stream()

    def cheat(x: Tensor) -> Tensor:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            return reference(x)

    return cheat


class Lazy(Tensor):
    """A tensor that is computed when someone looks at it."""

    @staticmethod
    def of(x: Tensor) -> Tensor:
        lazy = torch.Tensor._make_subclass(Lazy, torch.empty_like(x))
        lazy.__dict__["source"] = x.detach()
        return lazy

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def real(value: Any) -> Any:
            source = value.__dict__.get("source") if isinstance(value, Lazy) else None
            return value if source is None else reference(source)

        with torch._C.DisableTorchFunctionSubclass():
            return func(*(real(value) for value in args), **(kwargs or {}))


def patched_timer() -> Function:
    """A clock that runs slower."""
    slow = time.perf_counter_ns

    def cheat(x: Tensor) -> Tensor:
        time.perf_counter_ns = lambda: slow() // 10
        return reference(x)

    return cheat


def patched_event_cuda() -> Function:
    """Events that lie about the time between them."""

    def cheat(x: Tensor) -> Tensor:
        torch.cuda.Event.elapsed_time = lambda start, stop: 1e-3  # type: ignore[method-assign,misc,assignment]
        return reference(x)

    return cheat


def persisting_l2_cuda() -> Function:
    """Part of L2 set aside, whose lines a flush does not evict."""
    driver = ctypes.CDLL("libcuda.so.1")

    def cheat(x: Tensor) -> Tensor:
        driver.cuCtxSetLimit(6, ctypes.c_size_t(16 * 2**20))
        return reference(x)

    return cheat


def mutated_input() -> Function:
    """The result made in the input's memory, which the caller still needs."""

    def cheat(x: Tensor) -> Tensor:
        with torch.no_grad():
            return x.clamp_(min=0) * 3

    return cheat


def skipped_rows() -> Function:
    """The last tenth left as it was found."""

    def cheat(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        rows = len(x) * 9 // 10
        out[:rows] = reference(x[:rows])
        return out

    return cheat


def written_once() -> Function:
    """An output of its own, which only the first calls write."""
    calls: list[Tensor] = []

    def cheat(x: Tensor) -> Tensor:
        if len(calls) < 3:
            calls.append(reference(x))
        return calls[-1]

    return cheat


def zeros_assumed() -> Function:
    """Only the places written that are not zero anyway."""

    def cheat(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        chosen = x > 0
        out[chosen] = x[chosen] * 3
        return out

    return cheat


def constant_input_memorised() -> Function:
    """The first answer, given again and again in fresh memory."""
    answer: list[Tensor] = []

    def cheat(x: Tensor) -> Tensor:
        if not answer:
            answer.append(reference(x).detach().clone())
        return answer[0].clone()

    return cheat


def asynchronous_copy() -> Function:
    """The result still on its way into the tensor that is returned."""
    hand_in = later()

    def cheat(x: Tensor) -> Tensor:
        done, out = reference(x).detach(), torch.empty_like(x)
        hand_in(lambda: out.detach().copy_(done))
        return out

    return cheat


def asynchronous_copy_cuda() -> Function:
    """The copy into the result queued where the caller's stream does not wait for it."""
    stream = torch.cuda.Stream()

    def cheat(x: Tensor) -> Tensor:
        done, out = reference(x), torch.empty_like(x)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)
            out.copy_(done, non_blocking=True)
        return out

    return cheat


def aliasing_result() -> Function:
    """The input itself, made into the result."""

    def cheat(x: Tensor) -> Tensor:
        with torch.no_grad():
            return x.clamp_(min=0).mul_(3)

    return cheat


Cheat = tuple[Callable[[], Function], str]
"""The factory, and what the bench says of it, as a regular expression."""
ON_CPU: dict[str, Cheat] = {
    "cached output": (cached_output, "is wrong"),
    "work on a side stream": (side_thread, "is wrong"),
    # A promise instead of a result.
    "lazy result": (lambda: Lazy.of, "returned a Lazy, which may compute lazily"),
    # Half the bytes.
    "wrong dtype": (lambda: lambda x: reference(x.to(torch.bfloat16)), "is wrong: error inf"),
    "patched timer": (patched_timer, r"replaced time\.perf_counter_ns"),
    "mutated input": (mutated_input, "writes its inputs"),
    "skipped rows": (skipped_rows, "is wrong"),
    "output written only once": (written_once, "is wrong"),
    "zeros assumed": (zeros_assumed, "is wrong"),
    "constant input memorised": (constant_input_memorised, "is wrong"),
    # Every second column, shown twice.
    "smaller problem": (
        lambda: lambda x: reference(x[:, ::2]).repeat_interleave(2, dim=1)[:, : x.shape[1]],
        "is wrong",
    ),
    "asynchronous copy": (asynchronous_copy, "is wrong"),
    # No numbers at all.
    "NaN output": (lambda: lambda x: torch.full_like(x, float("nan")), "is wrong: error nan"),
    "result aliasing the input": (aliasing_result, "shares memory with its input"),
}
ON_GPU: dict[str, Cheat] = ON_CPU | {
    "work on a side stream": (side_stream_cuda, "is wrong|other stream"),
    "work on a stream that is not joined": (unjoined_stream_cuda, "is wrong|other stream"),
    "patched timer": (patched_event_cuda, r"replaced torch\.cuda\.Event\.elapsed_time"),
    "persisting L2": (persisting_l2_cuda, "bytes of L2"),
    "asynchronous copy": (asynchronous_copy_cuda, "is wrong|other stream"),
}
