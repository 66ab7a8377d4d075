"""Sentences on a step that waits: for data, files, locks, compilation, garbage collection, devices, other ranks."""

from __future__ import annotations

import math
import re

from tilewright.trace.verdict.candidate import MOST_WORKERS, Advice, Candidate, Step, share, spent

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


_WRITES = {
    *("write", "writelines", "writerow", "writerows", "save", "flush", "fsync", "savetxt", "tofile", "_write_file"),
    *("send", "sendall", "truncate", "close", "rename", "replace", "unlink", "remove", "mkdir", "fdatasync", "pwrite"),
}
_LISTS = ("stat", "lstat", "listdir", "scandir")
_NETWORK = ("urllib", "http", "requests", "urllib3", "httpx")


def advise_data(cause: Candidate, step: Step) -> Advice:
    rest = max(step.bare_ms - cause.ms, 1e-6)
    cores = max(step.cores, 1)
    if step.has_workers:
        return _slow_workers(cause, step, rest)
    needed = min(max(math.ceil(cause.ms / rest), 1), MOST_WORKERS)
    waits = cause.inner_what in ("sleep", "read", "open", "readinto", "recv")
    workers = needed if waits else min(needed, cores)
    # Workers that compute share the cores with the step's threads.
    shared = 0.0 if waits else (cause.ms + rest * min(max(step.threads, 1), cores)) / cores
    action = f"DataLoader(..., num_workers={workers}) loads the next batches meanwhile"
    why = f"The DataLoader has no workers, so each batch is made within the step{_inner(cause, step)}."
    return Advice("Waiting for data", why, action, step.bare_ms - max(rest, cause.ms / workers, shared))


def _slow_workers(cause: Candidate, step: Step, rest: float) -> Advice:
    """The workers make a batch in each step, so that each worker takes as many steps for one as there are workers."""
    if step.restarts:
        why = "A DataLoader starts its workers anew for each pass over the data, and loads its first batch after that."
        action = (
            "Make one iterator before the loop, or DataLoader(..., persistent_workers=True), which keeps its workers"
        )
        return Advice("Waiting for data", why, action, 0.99 * cause.ms)
    why = "The workers do not keep up: the next batch is not ready when the step asks for it"
    cheaper = "make __getitem__ and the transforms cheaper"
    if not step.workers:
        action = f"Give the DataLoader more workers (num_workers=), or {cheaper}"
        return Advice("Waiting for data", f"{why}.", action, cause.ms)
    # Without the programs that use the processors meanwhile.
    batch_ms = max(step.workers * step.bare_ms - step.workers_queued_ms, 0.0)
    if batch_ms <= step.workers * rest:
        return Advice("Waiting for data", f"{why}, since other programs use the processors.", "Measure again", 0.0)
    why += f"; {step.workers} of them {'take' if step.workers > 1 else 'takes'} {spent(batch_ms)} for one"
    why += f", {share(min(step.workers_ms, batch_ms), batch_ms)} of it computing." if step.workers_ms else "."
    needed = math.ceil(batch_ms / rest)
    # Those that compute need a core each, beside the step's.
    computing = step.workers_ms > 0.5 * batch_ms or (
        step.workers >= step.cores and step.workers_queued_ms > step.workers_ms
    )
    most = max(step.cores, 1) if computing else max(MOST_WORKERS, 2 * step.workers)
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


def advise_sleep(cause: Candidate, step: Step) -> Advice:
    if cause.what == "sleep":
        return Advice("time.sleep", _called(cause), "Take time.sleep out of the step", cause.ms)
    if cause.what == "with":
        why = "The block is entered only when another thread lets go of the lock, or its context is made by itself."
        action = "Hold the lock for less time, or let each thread have its own object"
        return Advice("Entering a with block", why, action, cause.ms)
    if cause.what.startswith("asyncio."):
        why = "The step runs an event loop, which waits for its coroutines, and then does nothing else."
        action = "asyncio.gather(...) awaits several at once; or begin them a step earlier, in a thread of their own"
        return Advice(f"Waiting in {cause.what}()", why, action, cause.ms)
    if cause.what.startswith("multiprocessing."):
        why = "Another process makes what it waits for and sends it through a pipe; it is copied and unpickled here."
        action = (
            "Send tensors of torch.multiprocessing, whose memory is shared and not copied, or let more processes make "
            "them: a DataLoader's workers do both"
        )
        return Advice(f"Waiting for another process ({cause.what}())", why, action, cause.ms)
    program = cause.what.removeprefix("subprocess.")
    if program in ("system", "popen") or program != cause.what:
        why = "The step starts another program and waits until that has ended."
        action = (
            "Run it once before the loop, every 100th step, or start it (subprocess.Popen) and read it a step later"
        )
        return Advice(f"Waiting in {program}()", why, action, cause.ms)
    why = "The thread waits for a lock, a queue or another process that something else holds up."
    action = "Make what it waits for ready earlier, or do it in this thread"
    if step.beside:
        thread, _, place = step.beside.partition(" at ")
        why = f"{why[:-1]}; {thread} is mostly at {place} meanwhile."
        action = f"Make what {thread} does faster, let several threads do it, or begin it steps earlier"
        if thread.startswith("ThreadPool"):
            action = (
                "Let processes do what is Python (ProcessPoolExecutor, a DataLoader's workers), since threads run it "
                "one at a time; or begin it steps earlier"
            )
    # A pool's map is waited for where its results are read.
    what = "map" if cause.what == "result_iterator" else cause.what
    return Advice(f"Waiting in {what}", why, action, cause.ms)


def _times(calls: float) -> str:
    return f"{calls:,.0f} times" if calls >= 1.5 else "once"


def _called(cause: Candidate) -> str:
    return f"It is called {_times(cause.calls)} in a step, and the program does nothing else meanwhile."


def advise_io(cause: Candidate, step: Step) -> Advice:
    match cause.what:
        case "print":
            why = "A printed tensor is computed, copied to the host and formatted element by element."
            return Advice("print", why, "Print every 100th step, and a number instead of a tensor", 0.99 * cause.ms)
        case "commit" | "execute" | "executemany" | "executescript" | "rollback":
            why = f"The program asks a database within the step and waits for it ({cause.what})."
            action = (
                "Keep the rows and write them by one executemany and one commit every 100th step, or read them once"
            )
            return Advice("A database", why, action, 0.99 * cause.ms)
        case str(what) if what.partition(".")[0] in _NETWORK:
            why = "The step asks another program, often on another machine, and waits for its answer."
            action = (
                "Ask once before the loop, for several steps at once, or a step earlier in another thread "
                "(ThreadPoolExecutor.submit)"
            )
            return Advice(f"Waiting for the network ({what}())", why, action, 0.99 * cause.ms)
        case str(what) if what in _WRITES:
            why = f"The program writes within the step and waits for it ({cause.what})."
            return Advice("Writing", why, "Write every 100th step, or in another thread", 0.99 * cause.ms)
    if cause.what in _LISTS:
        why = f"The step asks the file system {_times(cause.calls)} ({cause.what})."
        action = "List the files once before the loop, or look for new ones every 100th step"
        return Advice("Looking at files", why, action, cause.ms)
    why = f"The program reads within the step and waits for it ({cause.what})."
    return Advice("Reading", why, "Read it once before the loop, or in a DataLoader's workers", cause.ms)


def advise_garbage(cause: Candidate, step: Step) -> Advice:
    if cause.what == "collect":
        why = "gc.collect() looks at every object of the program each time."
        return Advice("Garbage collection", why, "Remove gc.collect() from the step", cause.ms)
    why = "Python's collector runs within the step and looks at every object that it tracks."
    action = "Call gc.collect() and gc.freeze() once before the loop, so that it skips what exists by then"
    return Advice("Garbage collection", why, action, cause.ms)


def advise_compilation(cause: Candidate, step: Step) -> Advice:
    reason = (
        " ".join(step.reason.split("User stack trace")[0].split()).rstrip(".") or "it had not met the function before"
    )
    why = f"PyTorch compiled in the recorded steps: {reason if len(reason) < _REASON else reason[:_REASON] + '…'}."
    action = next((advice for named, advice in _RECOMPILED.items() if re.search(named, step.reason)), _COMPILED_ANEW)
    if not step.reason:
        action = "Record later steps (--wait), in which all is compiled, or compile fewer functions"
    return Advice("Compilation", why, action, cause.ms)


def advise_allocator(cause: Candidate, step: Step) -> Advice:
    why = f"The allocator asks the driver for memory in every step ({cause.what})."
    action = "Remove empty_cache() from the step, or set PYTORCH_ALLOC_CONF=expandable_segments:True"
    return Advice("The allocator", why, action, cause.ms)


def advise_device(cause: Candidate, step: Step) -> Advice:
    what = cause.what.removeprefix("aten::")
    why = f"{cause.what} returns only when the device has caught up, and nothing is launched meanwhile."
    action = next((advice for names, advice in _WAITS.items() if what in names), _READS_LATER)
    return Advice("Waiting for the device", why, action, 0.99 * cause.ms)


def advise_communication(cause: Candidate, step: Step) -> Advice:
    if cause.calls >= _MANY_COLLECTIVES:
        return advise_exchange(cause, step)
    who = f"; {cause.inner_what} comes last to most of them" if cause.inner_what else ""
    why = f"This process waits for others in {cause.what}{who}."
    return Advice("Communication", why, "Give all ranks the same work; table `straggler` names the late one", cause.ms)


def advise_exchange(cause: Candidate, step: Step) -> Advice:
    if cause.calls >= _MANY_COLLECTIVES:
        why = f"It makes {cause.calls:,.0f} collectives a step, and waits for each ({cause.what})."
        action = "DistributedDataParallel sends gradients in a few buckets, during backward; or send one flat tensor"
        return Advice("Communication", why, action, 0.99 * cause.ms)
    moved = f"{cause.inner_ms:,.3g} MB" if cause.inner_ms else "data"
    calls = "one collective moves" if cause.calls < 1.5 else f"{cause.calls:,.0f} collectives move"
    why = f"All ranks have come, and {calls} {moved} a step while nothing is computed."
    action = (
        "DistributedDataParallel sends gradients during backward; no_sync() and bf16_compress_hook send fewer bytes"
    )
    # What computes is all that can hide it; half of the bytes take half of the time.
    return Advice("Communication", why, action, max(step.bare_ms - cause.ms, cause.ms / 2))


def advise_interpreter(cause: Candidate, step: Step) -> Advice:
    why = f"{cause.what} runs Python meanwhile, and one thread of a process runs Python at a time."
    action = "Do its work in another process (multiprocessing), or less of it while steps are made"
    return Advice("Waiting for another thread to let go of Python", why, action, cause.ms)
