"""Three sentences on a cause: what is slow, why, and what to do, with the gain to expect."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

_MOST_WORKERS = 8
_ON_DEVICE = ("single",)
_JOINS = ("cat", "concat", "concatenate", "stack", "hstack", "vstack")
_CLOCKS = ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "time_ns", "process_time")
_IMPORTS = ("_exec", "_find_spec", "_find_and_load", "_load_unlocked", "_handle_fromlist", "reload", "import_module")
_REASON = 240
_MANY_COLLECTIVES = 20
_READS_LATER = "Read results of the device every 100th step, or after the next step is launched"
_WAITS = {
    ("to", "cuda", "copy_", "_to_copy", "tensor", "as_tensor"): (
        "Copy from pinned memory without waiting: DataLoader(..., pin_memory=True) and .to(device, non_blocking=True)"
    ),
    ("synchronize",): "Take synchronize() out of the step: PyTorch waits where it must",
    ("nonzero", "masked_select", "unique", "where", "argwhere", "repeat_interleave", "index"): (
        "Keep sizes that data does not decide: torch.where(mask, x, 0) or a product by the mask instead of x[mask]"
    ),
}
"""What to do by the function that waits."""
_RECOMPILED = {
    r"mismatch at index|size mismatch|stride mismatch|\.size\(|\.shape": (
        "torch.compile(..., dynamic=True), or inputs padded to a few sizes, compiles once"
    ),
    r"allow_unspec_int_on_nn_module": (
        "torch._dynamo.config.allow_unspec_int_on_nn_module = True, or count outside of the compiled module"
    ),
    r"==": "Pass the number that changes as a tensor, or keep it out of the compiled function",
    r"grad_mode|is_grad_enabled": "Call the compiled function always with or always without torch.no_grad()",
}
"""What to do by a part of the guard that failed."""
_COMPILED_ANEW = "Keep out of the compiled function what the guard names, or pass it as a tensor"
_UNFUSED = ("Adam", "AdamW", "SGD", "Adagrad")
"""Optimizers that PyTorch has as one kernel, on a CPU too."""


@dataclass(frozen=True)
class Candidate:
    """What could make the host slow, in milliseconds of the mean bare step; `inner_…` is most of what it spends."""

    file_id: int
    kind: str
    source: str | None
    what: str
    ms: float
    calls: float
    inner_what: str | None
    inner_source: str | None
    inner_ms: float | None


@dataclass(frozen=True)
class Step:
    """The mean bare step of a process, and what tells its remedies apart."""

    bare_ms: float
    busy_ms: float = 0.0
    """The time in which its device works: no gain of the host is more than the rest."""
    has_workers: bool = False
    cores: int = _MOST_WORKERS
    reason: str = ""
    """Why PyTorch compiled again, in its words."""
    threads: int = 0
    """PyTorch's threads for one operator, if the run knows them."""
    workers: int = 0
    """Processes of DataLoaders, and the processor time of all of them in a step."""
    workers_ms: float = 0.0
    tf32_times: float = 1.0
    """How many times as fast as fp32 its device multiplies matrices in TF32."""
    bf16_times: float = 1.0


@dataclass(frozen=True)
class Advice:
    """The sentences of a cause, without shares; `win_ms` is what the action saves of a step."""

    slow: str
    why: str
    action: str
    win_ms: float


def advice_on(cause: Candidate, step: Step) -> Advice:
    """The advice on a cause; its gain is at most what the cause takes and what the device leaves idle."""
    found = _ADVICE[cause.kind](cause, step)
    most = min(cause.ms, max(step.bare_ms - step.busy_ms, 0.0))
    if cause.kind in _ON_DEVICE:
        # While the device is idle anyway it saves nothing.
        most = max(cause.ms - (step.bare_ms - step.busy_ms), 0.0)
    return Advice(found.slow, found.why, found.action, max(min(found.win_ms, most), 0.0))


def spent(ms: float) -> str:
    """
    >>> spent(12.345), spent(0.0123), spent(12345.6)
    ('12.3 ms', '12.3 µs', '12.3 s')
    """
    value, unit = (ms / 1e3, "s") if ms >= 1e3 else (ms, "ms") if ms >= 0.1 else (ms * 1e3, "µs")
    return f"{value:.3g} {unit}"


def at(source: str | None) -> str:
    return f" at {source}" if source else ""


def _data(cause: Candidate, step: Step) -> Advice:
    rest = max(step.bare_ms - cause.ms, 1e-6)
    if step.has_workers:
        return _slow_workers(cause, step, rest)
    needed = min(max(math.ceil(cause.ms / rest), 1), _MOST_WORKERS)
    waits = cause.inner_what in ("sleep", "read", "open", "readinto", "recv")
    workers = needed if waits else min(needed, max(step.cores, 1))
    # Workers that compute share the cores with the step.
    shared = 0.0 if waits else step.bare_ms / min(workers + 1, max(step.cores, 1))
    action = f"DataLoader(..., num_workers={workers}) loads the next batches meanwhile"
    why = f"The DataLoader has no workers, so each batch is made within the step{_inner(cause, step)}."
    return Advice("Waiting for data", why, action, step.bare_ms - max(rest, cause.ms / workers, shared))


def _slow_workers(cause: Candidate, step: Step, rest: float) -> Advice:
    """The workers make a batch in each step, so that each worker takes as many steps for one as there are workers."""
    why = "The workers do not keep up: the next batch is not ready when the step asks for it"
    cheaper = "make __getitem__ and the transforms cheaper"
    if not step.workers:
        action = f"Give the DataLoader more workers (num_workers=), or {cheaper}"
        return Advice("Waiting for data", f"{why}.", action, cause.ms)
    batch_ms = step.workers * step.bare_ms
    why += f"; {step.workers} of them {'take' if step.workers > 1 else 'takes'} {spent(batch_ms)} for one"
    why += f", {share(step.workers_ms, step.bare_ms)} of it computing." if step.workers_ms else "."
    needed = math.ceil(batch_ms / rest)
    # Those that compute need a core each, beside the step's.
    computing = step.workers_ms > 0.5 * step.workers * step.bare_ms
    most = max(step.cores, 1) if computing else max(_MOST_WORKERS, 2 * step.workers)
    workers = min(needed, most)
    if workers <= step.workers:
        action = f"{cheaper[0].upper()}{cheaper[1:]}: there is no core for another worker"
        return Advice("Waiting for data", why, action, cause.ms)
    action = f"DataLoader(..., num_workers={workers}), or {cheaper}"
    return Advice("Waiting for data", why, action, step.bare_ms - max(rest, batch_ms / workers))


def _inner(cause: Candidate, step: Step) -> str:
    if not cause.inner_source or cause.inner_ms is None:
        return ""
    what = f"{cause.inner_what}" if cause.inner_what else "Python"
    return f", mostly in {what} at {cause.inner_source} ({share(cause.inner_ms, step.bare_ms)})"


def share(ms: float, whole: float) -> str:
    """
    >>> share(1, 3), share(0.1, 100)
    ('33 %', '0.1 %')
    """
    percent = 100 * ms / whole if whole else 0.0
    return f"{percent:.0f} %" if percent >= 1 else f"{percent:.1f} %"


def _sleep(cause: Candidate, step: Step) -> Advice:
    if cause.what == "sleep":
        return Advice("time.sleep", _called(cause), "Take time.sleep out of the step", cause.ms)
    if cause.what == "with":
        why = "The block is entered only when another thread lets go of the lock, or its context is made by itself."
        action = "Hold the lock for less time, or let each thread have its own object"
        return Advice("Entering a with block", why, action, cause.ms)
    if cause.what in ("run", "check_output", "check_call", "call", "communicate", "system", "popen"):
        why = "The step starts another program and waits until that has ended."
        action = (
            "Run it once before the loop, every 100th step, or start it (subprocess.Popen) and read it a step later"
        )
        return Advice(f"Waiting in {cause.what}()", why, action, cause.ms)
    why = "The thread waits for a lock, a queue or another process that something else holds up."
    return Advice(
        f"Waiting in {cause.what}", why, "Make what it waits for ready earlier, or do it in this thread", cause.ms
    )


def _called(cause: Candidate) -> str:
    times = f"{cause.calls:,.0f} times" if cause.calls >= 1.5 else "once"
    return f"It is called {times} in a step, and the program does nothing else meanwhile."


def _io(cause: Candidate, step: Step) -> Advice:
    match cause.what:
        case "print":
            why = "A printed tensor is computed, copied to the host and formatted element by element."
            return Advice("print", why, "Print every 100th step, and a number instead of a tensor", 0.99 * cause.ms)
        case "write" | "save" | "flush" | "fsync" | "savetxt" | "tofile" | "_write_file" | "send" | "sendall":
            why = f"The program writes within the step and waits for it ({cause.what})."
            return Advice("Writing", why, "Write every 100th step, or in another thread", 0.99 * cause.ms)
    why = f"The program reads within the step and waits for it ({cause.what})."
    return Advice("Reading", why, "Read it once before the loop, or in a DataLoader's workers", cause.ms)


def _garbage(cause: Candidate, step: Step) -> Advice:
    if cause.what == "collect":
        why = "gc.collect() looks at every object of the program each time."
        return Advice("Garbage collection", why, "Remove gc.collect() from the step", cause.ms)
    why = "Python's collector runs within the step and looks at every object that it tracks."
    action = "Call gc.collect() and gc.freeze() once before the loop, so that it skips what exists by then"
    return Advice("Garbage collection", why, action, cause.ms)


def _compilation(cause: Candidate, step: Step) -> Advice:
    reason = (
        " ".join(step.reason.split("User stack trace")[0].split()).rstrip(".") or "it had not met the function before"
    )
    why = f"PyTorch compiled in the recorded steps: {reason if len(reason) < _REASON else reason[:_REASON] + '…'}."
    action = next((advice for named, advice in _RECOMPILED.items() if re.search(named, step.reason)), _COMPILED_ANEW)
    if not step.reason:
        action = "Record later steps (--wait), in which all is compiled, or compile fewer functions"
    return Advice("Compilation", why, action, cause.ms)


def _allocator(cause: Candidate, step: Step) -> Advice:
    why = f"The allocator asks the driver for memory in every step ({cause.what})."
    action = "Remove empty_cache() from the step, or set PYTORCH_ALLOC_CONF=expandable_segments:True"
    return Advice("The allocator", why, action, cause.ms)


def _device(cause: Candidate, step: Step) -> Advice:
    what = cause.what.removeprefix("aten::")
    why = f"{cause.what} returns only when the device has caught up, and nothing is launched meanwhile."
    action = next((advice for names, advice in _WAITS.items() if what in names), _READS_LATER)
    return Advice("Waiting for the device", why, action, 0.99 * cause.ms)


def _communication(cause: Candidate, step: Step) -> Advice:
    if cause.calls >= _MANY_COLLECTIVES:
        why = f"It makes {cause.calls:,.0f} collectives a step, and waits for each ({cause.what})."
        action = "DistributedDataParallel sends gradients in a few buckets, during backward; or send one flat tensor"
        return Advice("Communication", why, action, 0.99 * cause.ms)
    why = f"This process waits for others in {cause.what}."
    return Advice("Communication", why, "Give all ranks the same work; table `straggler` names the late one", cause.ms)


def _loop(cause: Candidate, step: Step) -> Advice:
    each = spent(cause.ms / cause.calls)
    many = f"{cause.calls:,.0f} calls a step of {each} each"
    why = f"It makes {many}, as {cause.what}: the work is to call, not to compute."
    reads = any(name in cause.what for name in ("item", "select", "_local_scalar", "tolist", "__getitem__"))
    action = (
        "Read all elements at once with .tolist(), or compute on the whole tensor"
        if reads
        else "Do it in one operation on a whole tensor or batch instead of a loop, or compile it with torch.compile"
    )
    if cause.what in _CLOCKS:
        why = f"It asks for the time {cause.calls:,.0f} times a step, and does nothing else until it is late enough."
        return Advice("A loop that waits", why, "Wait for what is to happen, or leave the loop out", cause.ms)
    # The line runs that often in a step, and could run once.
    runs = cause.inner_ms if cause.inner_ms and cause.inner_ms > 1 else cause.calls
    return Advice("A loop of small calls", why, action, cause.ms * (1 - 1 / runs))


def _small(cause: Candidate, step: Step) -> Advice:
    each = spent(cause.ms / cause.calls)
    many = f"{cause.calls:,.0f} calls a step of {each} each"
    why = f"It makes {many}, as {cause.what}, from Python: the work is to call, not to compute."
    action = (
        'torch.compile(model, mode="reduce-overhead") replays them as one CUDA graph'
        if step.busy_ms
        else "torch.compile(model) makes fewer and larger operators of them; a larger batch gives each more to do"
    )
    # A graph leaves no calls; a compiler those of products and reductions, taken for half of them.
    return Advice("Calling small operators", why, action, cause.ms if step.busy_ms else cause.ms / 2)


def _python(cause: Candidate, step: Step) -> Advice:
    if cause.what in ("dumps", "dump", "loads", "load", "iterencode", "format", "log", "info", "debug"):
        action = "Do it every 100th step, or in another thread or process"
        return Advice(f"{cause.what}()", "The step turns objects to text or bytes, or back.", action, 0.99 * cause.ms)
    if cause.what in ("tensor", "as_tensor", "FloatTensor", "LongTensor", "Tensor"):
        why = "It makes a tensor of Python's numbers, one by one."
        action = "Keep the data as a tensor or a NumPy array (torch.from_numpy), made once before the loop"
        return Advice(f"torch.{cause.what}()", why, action, 0.99 * cause.ms)
    if cause.what in _IMPORTS:
        why = "The step finds, reads and runs a module."
        return Advice("Importing a module", why, "Import it once, before the loop", 0.99 * cause.ms)
    if cause.what == "deepcopy":
        action = "Copy into tensors made before the loop (torch._foreach_copy_), every 100th step"
        return Advice("deepcopy()", "It allocates and copies every tensor again.", action, 0.99 * cause.ms)
    if cause.what:
        why = "It is no operator of PyTorch's, and the step waits for it."
        action = "Do it once before the loop, every 100th step, or with operations on tensors"
        return Advice(f"{cause.what}()", why, action, 0.99 * cause.ms)
    why = "Python runs line by line there, outside of every operator."
    return Advice("Python", why, "Do it with operations on whole tensors, or outside of the step", 0.99 * cause.ms)


def _copy(cause: Candidate, step: Step) -> Advice:
    action = {
        "clone": "Leave the clone out if nothing writes to either tensor afterwards, or make it once before the loop",
        "contiguous": "Keep the tensor contiguous from the start: copy it once before the loop",
        **dict.fromkeys(_JOINS, "Make one tensor before the loop and write each part into it (all[i] = part)"),
    }.get(cause.what, "Convert the tensor once before the loop, or create it with that type and layout")
    return Advice(
        f"Copying a tensor (.{cause.what}())", "It only moves data, and does so in every step.", action, cause.ms
    )


def _double(cause: Candidate, step: Step) -> Advice:
    why = (
        f"{cause.what} and others compute in float64, which moves and computes half as many elements in the same time."
    )
    action = "Use float32: .float() on the model and its inputs, and no NumPy array of float64"
    return Advice("Computing in float64", why, action, cause.ms / 2)


def _single(cause: Candidate, step: Step) -> Advice:
    times, name = (step.tf32_times, "TF32") if step.tf32_times > 1.5 else (step.bf16_times, "bf16")
    action = (
        'torch.set_float32_matmul_precision("high") before the loop'
        if name == "TF32"
        else 'torch.autocast("cuda", dtype=torch.bfloat16) around the forward'
    )
    why = f"{cause.what} and others compute in fp32 beside the tensor cores, which are {times:.0f} × as fast in {name}."
    win = cause.ms * (1 - 1 / times) if times > 1.5 else 0.0
    return Advice("Multiplying matrices in fp32", why, action, win)


def _optimizer(cause: Candidate, step: Step) -> Advice:
    kinds = max(cause.inner_ms or 1, 1)
    why = f"It makes {cause.calls:,.0f} calls of {kinds:.0f} operators, one by one for each parameter."
    action = f"torch.optim.{cause.what}(..., fused=True) updates all parameters in one call"
    return Advice("The optimizer's step", why, action, cause.ms * (1 - 1 / kinds) if cause.what in _UNFUSED else 0.0)


def _threads(cause: Candidate, step: Step) -> Advice:
    # Each operator ends when its last thread does: with as many threads as cores, they could reach their floors.
    win = (cause.inner_ms or 0.0) if 0 < step.cores < step.threads else 0.0
    why = f"Each of them runs on {step.threads} threads, and there are {step.cores} cores: threads wait for one."
    return Advice("Computing on too many threads", why, f"torch.set_num_threads({step.cores})", win)


def _logits(cause: Candidate, step: Step) -> Advice:
    why = "The softmax of the logits and its loss are separate passes over them, forward and backward."
    action = "tilewright.functional.linear_cross_entropy, or torch.compile, makes fewer passes"
    return Advice("The loss over the logits", why, action, cause.inner_ms or 0.0)


_REPLACED = {
    "EmbeddingBackward0": (
        "The gradient of an embedding",
        "It is as large as the table of the embedding, and most of it is zero.",
        "nn.Embedding(..., sparse=True) has a gradient of the rows that were read; SGD and SparseAdam take it",
    ),
    "aten::one_hot": (
        "one_hot()",
        "It writes a row of the weight's length for each index, to choose one row of the weight by a product.",
        "functional.embedding(indices, weight) reads the chosen rows alone",
    ),
}


def _replaceable(cause: Candidate, step: Step) -> Advice:
    slow, why, action = _REPLACED[cause.what]
    return Advice(slow, why, action, 0.99 * cause.ms)


def _anomalies(cause: Candidate, step: Step) -> Advice:
    why = "Each operator formats the stack that called it, and backward looks for NaN in each gradient."
    action = "torch.autograd.set_detect_anomaly(False), once the NaN is found"
    # What the operators take beyond their floors, or beyond a call where no floors are known.
    return Advice("Looking for anomalies", why, action, cause.inner_ms or 0.0)


def _interpreter(cause: Candidate, step: Step) -> Advice:
    why = f"{cause.what} runs Python meanwhile, and one thread of a process runs Python at a time."
    action = "Do its work in another process (multiprocessing), or less of it while steps are made"
    return Advice("Waiting for another thread to let go of Python", why, action, cause.ms)


_ADVICE: dict[str, Callable[[Candidate, Step], Advice]] = {
    "data": _data,
    "sleep and locks": _sleep,
    "I/O": _io,
    "garbage collection": _garbage,
    "compilation": _compilation,
    "allocator": _allocator,
    "device": _device,
    "communication": _communication,
    "loop": _loop,
    "Python": _python,
    "copy": _copy,
    "double": _double,
    "single": _single,
    "optimizer": _optimizer,
    "threads": _threads,
    "logits": _logits,
    "small": _small,
    "interpreter": _interpreter,
    "replaceable": _replaceable,
    "anomalies": _anomalies,
}
