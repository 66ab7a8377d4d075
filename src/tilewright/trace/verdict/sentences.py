"""Three sentences on a cause: what is slow, why, and what to do, with the gain to expect."""

from __future__ import annotations

from collections.abc import Callable

from tilewright.records.counted import counted
from tilewright.trace.verdict import waits
from tilewright.trace.verdict.candidate import Advice, Candidate, Step, spent
from tilewright.trace.verdict.replaced import advise_half, advise_replaceable, instead_of_random

_ON_DEVICE = ("single", "attention")
_JOINS = ("cat", "concat", "concatenate", "stack", "hstack", "vstack")
_LAYS_OUT = ("einsum", "reshape", "flatten", "matmul", "bmm", "tensordot")
"""Functions that copy an operand where it lies in another order than they take."""
_NORMS = ("aten::norm", "aten::linalg_vector_norm")
_SQUARES = {"aten::pow", *_NORMS}
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution"}
_GATES = {"aten::sigmoid", "aten::tanh"}
"""Of cells of recurrent networks."""
_IN_A_LIST = (
    *("add_", "sub_", "mul_", "div_", "zero_", "copy_", "lerp_", "addcmul_", "addcdiv_", "clamp_min_", "clamp_max_"),
    *("sqrt_", "neg_", "abs_", "norm", "mul", "add", "abs", "max"),
)
"""Operators that `torch._foreach_…` calls on a list of tensors at once."""
_WRITING = {
    *("aten::select", "aten::copy_", "aten::fill_", "aten::to", "aten::_to_copy", "aten::as_strided", "aten::empty"),
    *("aten::empty_strided", "aten::lift_fresh", "aten::detach_", "detach_", "aten::slice"),
}
"""All that an assignment to an element calls."""
_CLOCKS = ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "time_ns", "process_time")
_IMPORTS = ("_exec", "_find_spec", "_find_and_load", "_load_unlocked", "_handle_fromlist", "reload", "import_module")
_TEXT = ("dumps", "dump", "loads", "load", "iterencode", "format", "log", "info", "debug", "warning")
_LARGE_MS = 0.05
_UNFUSED = ("Adam", "AdamW", "SGD", "Adagrad")
"""Optimizers that PyTorch has as one kernel, on a CPU too."""


def advice_on(cause: Candidate, step: Step) -> Advice:
    """The advice on a cause; its gain is at most what the cause takes and what the device leaves idle."""
    found = _ADVICE[cause.kind](cause, step)
    most = min(cause.ms, max(step.bare_ms - step.busy_ms, 0.0))
    if cause.kind in _ON_DEVICE and step.busy_ms:
        # While the device is idle anyway it saves nothing.
        most = max(cause.ms - (step.bare_ms - step.busy_ms), 0.0)
    return Advice(found.slow, found.why, found.action, max(min(found.win_ms, most), 0.0))


def _loop(cause: Candidate, step: Step) -> Advice:
    if cause.inner_what == "Python" and cause.what in _TEXT:
        return _python(cause, step)
    each = spent(cause.ms / cause.calls)
    many = f"{cause.calls:,.0f} small calls, such as {cause.what}, of {each} each"
    why = f"A step makes {many}: the time goes into calling, not into computing."
    names = {cause.what, *(cause.inner_what or "").split()}
    derived = any("Backward" in name for name in names)
    reads = not derived and any(part in name for name in names for part in ("item", "_local_scalar", "tolist"))
    action = (
        "No operator is in it: do it once before the loop, in a DataLoader's workers, or every 100th step"
        if cause.inner_what == "Python"
        else "Read all elements at once with .tolist(), or compute on the whole tensor"
        if reads
        else "Compute all elements at once (torch.arange, torch.tensor(list)) instead of writing one after the other"
        if "aten::select" in names and names & {"aten::copy_", "aten::fill_"} and names <= _WRITING
        else "Do it in one operation on a whole tensor or batch instead of a loop, or compile it with torch.compile"
    )
    name = cause.what.removeprefix("aten::")
    if derived and names & _PRODUCTS:
        if "grad" in names:
            action = "torch.func.vmap(torch.func.grad(loss), (None, 0, 0)) gives the gradient of each sample at once"
        elif names & _GATES == _GATES:
            action += "; nn.LSTM and nn.GRU take all steps of a sequence in one call"
    elif derived and names & _SQUARES:
        action = (
            "Do it in one operation on a whole tensor or batch; of parameters weight_decay= of the optimizer is an L2 "
            "penalty without any call, and torch._foreach_norm takes a list of tensors"
        )
    elif names.intersection(_NORMS):
        action = (
            "torch.nn.utils.clip_grad_norm_, or torch._foreach_norm, takes a list of tensors, and reads no norm alone"
        )
    elif name in _IN_A_LIST and not reads:
        action += f"; torch._foreach_{name} takes a list of tensors"
    if cause.inner_what == "Python":
        action = instead_of_random(cause.what) or action
    if cause.what in _CLOCKS:
        why = f"It asks for the time {cause.calls:,.0f} times a step, and does nothing else until it is late enough."
        return Advice("A loop that waits", why, "Wait for what is to happen, or leave the loop out", cause.ms)
    # The line runs that often in a step, and could run once.
    runs = cause.inner_ms if cause.inner_ms and cause.inner_ms > 1 else cause.calls
    return Advice("A loop of small calls", why, action, cause.ms * (1 - 1 / runs))


def _small(cause: Candidate, step: Step) -> Advice:
    each = spent(cause.ms / cause.calls)
    many = f"{cause.calls:,.0f} small calls from Python, such as {cause.what}, of {each} each"
    why = f"A step makes {many}: the time goes into calling, not into computing."
    action = (
        'torch.compile(model, mode="reduce-overhead") replays them as one CUDA graph'
        if step.busy_ms
        else "torch.compile(model) makes fewer and larger operators of them; a larger batch gives each more to do"
    )
    # A graph leaves no calls; a compiler those of products and reductions, taken for half of them.
    return Advice("Calling small operators", why, action, cause.ms if step.busy_ms else cause.ms / 2)


def _python(cause: Candidate, step: Step) -> Advice:
    if cause.what in _TEXT:
        reads = cause.what in ("loads", "load")
        action = (
            "Do it once before the loop, or in a DataLoader's workers"
            if reads
            else "Do it every 100th step, or in another thread or process"
        )
        return Advice(f"{cause.what}()", "The step turns objects to text or bytes, or back.", action, 0.99 * cause.ms)
    if cause.what in ("tensor", "as_tensor", "FloatTensor", "LongTensor", "Tensor"):
        why = "It makes a tensor of Python's numbers, one by one."
        action = "Keep the data as a tensor or a NumPy array (torch.from_numpy), made once before the loop"
        return Advice(f"torch.{cause.what}()", why, action, 0.99 * cause.ms)
    if (instead := instead_of_random(cause.what)) is not None:
        why = "It draws one number or element after the other in Python."
        if cause.what in ("random.sample", "random.choices"):
            why = f"{why[:-1]}; to each in a deque it walks from one of the ends."
        return Advice(f"{cause.what}()", why, instead, 0.99 * cause.ms)
    if cause.what in _IMPORTS:
        why = "The step finds, reads and runs a module."
        return Advice("Importing a module", why, "Import it once, before the loop", 0.99 * cause.ms)
    if cause.what == "deepcopy":
        action = "Copy into tensors made before the loop (torch._foreach_copy_), every 100th step"
        return Advice("deepcopy()", "It allocates and copies every tensor again.", action, 0.99 * cause.ms)
    if cause.what == "write":
        return waits.advise_io(cause, step)
    if cause.what:
        why = (
            "PyTorch works there outside of its operators, and the step waits for it."
            if cause.inner_what == "PyTorch"
            else "It is not a PyTorch operator, and the step waits for it."
        )
        action = "Do it once before the loop, every 100th step, or with operations on tensors"
        return Advice(f"{cause.what}()", why, action, 0.99 * cause.ms)
    why = "Python code runs there between operators, or a C function that no profiler sees, such as NumPy's."
    return Advice("Python", why, "Do it with operations on whole tensors, or outside of the step", 0.99 * cause.ms)


def _copy(cause: Candidate, step: Step) -> Advice:
    action = {
        "clone": "Leave the clone out if nothing writes to either tensor afterwards, or make it once before the loop",
        "contiguous": "Keep the tensor contiguous from the start: copy it once before the loop",
        **dict.fromkeys(("tensor", "as_tensor"), "torch.from_numpy(array) shares the array's memory"),
        **dict.fromkeys(
            _LAYS_OUT, "Keep its operands in the order in which it reads them: permute them once before the loop"
        ),
        **dict.fromkeys(_JOINS, "Make one tensor before the loop and write each part into it (all[i] = part)"),
    }.get(cause.what, "Convert the tensor once before the loop, or create it with that type and layout")
    # What takes the other order is perhaps slower by a part of it.
    win = cause.ms / 2 if cause.what in _LAYS_OUT else cause.ms
    by = f"within {cause.what}" if cause.what in _LAYS_OUT else f".{cause.what}()"
    return Advice(f"Copying a tensor ({by})", "It only moves data, and does so in every step.", action, win)


def _constant(cause: Candidate, step: Step) -> Advice:
    if cause.what in ("zero_", "fill_"):
        why = "It writes every element, in every step."
        action = (
            "Set gradients to None instead (optimizer.zero_grad()), and overwrite other tensors where they are filled"
        )
        return Advice(f"Filling tensors (.{cause.what}())", why, action, 0.99 * cause.ms)
    if cause.inner_what == "scatter_":
        why = f"scatter_ writes into {cause.what}, a row of all classes for each index, and most of it stays as it was."
        action = "functional.embedding(indices, weight) reads the chosen rows alone, .gather() one element of each row"
        return Advice(f"Making a one-hot tensor (torch.{cause.what}())", why, action, 0.99 * cause.ms)
    if "empty" in cause.what or cause.what == "resize_":
        why = (
            "torch.use_deterministic_algorithms(True) fills new memory with NaN, also where all of it is written next."
        )
        action = "torch.utils.deterministic.fill_uninitialized_memory = False, or make the tensor once before the loop"
        return Advice(f"Filling new memory ({cause.what}())", why, action, 0.99 * cause.ms)
    why = f"{cause.what} fills memory that was allocated anew, in every step."
    action = "Make it once before the loop (register_buffer in a module), and write only what changes"
    return Advice(f"Making a tensor (torch.{cause.what.removeprefix('new_')}())", why, action, 0.99 * cause.ms)


def _broadcast(cause: Candidate, step: Step) -> Advice:
    times = cause.inner_ms or 1.0
    why = f"{cause.what} makes a tensor of {times:,.0f} times the elements of its operands, and sums most of it away."
    action = "torch.einsum, a matrix product or torch.cdist computes the sums without that tensor"
    if cause.inner_what:
        why = why.replace("its operands", f"its operands, {cause.inner_what}")
        action = f"Give both the same shape if each element belongs to one (.squeeze(-1)); of pairs {action}"
    return Advice("Combining tensors by broadcasting", why, action, cause.ms * (1 - 1 / times))


def _chain(cause: Candidate, step: Step) -> Advice:
    times = cause.inner_ms or 1.0
    why = f"One product takes the other's result; the other order multiplies {times:,.0f} × fewer numbers."
    action = (
        "Contract two operands at a time, in the other order; where opt_einsum is installed, einsum finds the order"
        if cause.inner_what == "einsum"
        else "a @ (b @ c) instead of a @ b @ c, or torch.linalg.multi_dot([a, b, c]), which finds the order"
    )
    return Advice("Multiplying matrices in a costly order", why, action, cause.ms * (1 - 1 / times))


def _casts(cause: Candidate, step: Step) -> Advice:
    copies = counted(cause.calls, "copy")
    why = f"No line asks for it: {copies} a step, forward and backward, as of parameters by autocast."
    action = (
        "Enter autocast once around all that a step computes (it keeps a parameter's copy until it is left), or hold "
        "the model in the lower precision (model.to(torch.bfloat16))"
    )
    return Advice("Copying to another precision", why, action, 0.8 * cause.ms)


def _enlarged(cause: Candidate, step: Step) -> Advice:
    why = f"The 1 × 1 convolution after it reads {float(cause.what):,.0f} × the places that there were before."
    action = (
        "Swap them, the convolution first and then interpolate: the result is the same, since each of its elements "
        "reads one place and the weights of an interpolation add up to one"
    )
    return Advice("Interpolating before a 1 × 1 convolution", why, action, cause.inner_ms or 0.0)


def _attention(cause: Candidate, step: Step) -> Advice:
    why = (
        f"A softmax and others, {counted(cause.calls, 'call')} a step, read and write all scores {cause.what} in turn."
    )
    action = (
        "functional.scaled_dot_product_attention(q, k, v, is_causal=True, or attn_mask=) never writes the scores; of "
        "nn.MultiheadAttention need_weights=False"
    )
    # It computes them all the same, and their exponentials.
    return Advice("Attention by single operators", why, action, 0.8 * cause.ms)


def _breaks(cause: Candidate, step: Step) -> Advice:
    why = f"What is there breaks the graph, and compiled code is entered again {cause.calls:,.0f} times a step."
    action = (
        "Keep .item(), print and branches on data out of what is compiled; TORCH_LOGS=graph_breaks says why it breaks, "
        "and torch.compile(..., fullgraph=True) raises there"
    )
    return Advice("Leaving compiled code", why, action, 0.9 * cause.ms)


def _evaluation(cause: Candidate, step: Step) -> Advice:
    calls = f"{cause.calls:,.0f} times" if cause.calls >= 1.5 else "once"
    why = (
        f"{cause.what} is called {calls} in a step without a gradient, as for evaluation, beside the calls that train."
    )
    action = "Evaluate every 100th step (if step % 100 == 0:), or use what the training forward gave (logits.detach())"
    return Advice("Calling the model without a backward", why, action, 0.99 * cause.ms)


def _grown(cause: Candidate, step: Step) -> Advice:
    many, more = float(cause.inner_what or 1), cause.inner_ms or 0.0
    why = f"{cause.what} is given {many:,.0f} tokens, {more:,.0f} more in each step, and computes all others once more."
    action = (
        "Keep the keys and values of the tokens before (a KV cache: use_cache=True, past_key_values), and give the "
        "model the new ones alone"
    )
    return Advice("Calling the model on all tokens again", why, action, 0.9 * (1 - more / many) * cause.ms)


def _unread(cause: Candidate, step: Step) -> Advice:
    why = f"Its {cause.calls:,.0f} operators keep what a gradient needs, and backward comes to none of them."
    action = (
        "Leave it out of the step if nothing reads its result, or compute it under torch.no_grad(), every 100th step"
    )
    return Advice("A forward that no loss depends on", why, action, 0.99 * cause.ms)


def _untaken(cause: Candidate, step: Step) -> Advice:
    of = "the gradient of a parameter" if cause.calls < 1.5 else f"the gradients of {cause.calls:,.0f} parameters"
    why = f"Backward adds up {of} which no optimizer takes and nothing clears."
    action = (
        "part.requires_grad_(False) before the loop where a part of the model is not trained; else give its parameters "
        "to the optimizer"
    )
    return Advice("Computing gradients that nothing reads", why, action, 0.99 * cause.ms)


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
    why = f"{cause.what} and others compute in fp32, without the tensor cores. {name} is {times:.0f} × as fast on them."
    win = cause.ms * (1 - 1 / times) if times > 1.5 else 0.0
    return Advice("Multiplying matrices in fp32", why, action, win)


def _optimizer(cause: Candidate, step: Step) -> Advice:
    kinds = max(cause.inner_ms or 1, 1)
    why = f"It calls {counted(kinds, 'operator')} for each parameter, {counted(cause.calls, 'call')} in all."
    action = f"torch.optim.{cause.what}(..., fused=True) updates all parameters in one call"
    # Large tensors are read and written once by the one call, and by several of the operators.
    part = 1 - 1 / kinds if cause.ms < _LARGE_MS * cause.calls else min(1 - 1 / kinds, 0.75)
    return Advice("The optimizer's step", why, action, cause.ms * part if cause.what in _UNFUSED else 0.0)


def _aside(cause: Candidate, step: Step) -> Advice:
    why = f"No gradient goes through what {cause.what} and others compute there, and it takes {spent(cause.ms)} a step."
    match cause.inner_what:
        case "drawn":
            slow, least = "Drawing random numbers", 0.3
            action = "Draw only for the rows that the step reads, or in a DataLoader's workers"
        case "check":
            slow, least = "Checking values", 0.1
            action = "Check every 100th step, or only the loss: NaN and Inf reach it"
        case "update":
            slow, least = "Updating tensors beside the training", 0.2
            action = (
                "Do it in one pass (average.lerp_(value, 0.001), torch._foreach_lerp_ for lists), or every 10th step"
            )
        case "arithmetic":
            slow, least = "Computing beside the training", 0.2
            action = (
                "If it updates a state, do it in place and in one pass (average.lerp_(value, 0.001), "
                "torch._foreach_lerp_ for lists); if it does not change, once before the loop; else every 100th step"
            )
        case _:
            slow, least = "Computing beside the training", 0.2
            action = (
                "Do it once before the loop if it does not change (register_buffer), every 100th step if it is a "
                "metric, on the rows that the step reads, or in a DataLoader's workers"
            )
    part = 0.7 if cause.inner_what == "update" else 0.99
    return Advice(slow, why, action, part * cause.ms if cause.ms >= least * step.bare_ms else 0.0)


def _threads(cause: Candidate, step: Step) -> Advice:
    # Each operator ends when its last thread does: with as many threads as cores, they could reach their floors.
    win = (cause.inner_ms or 0.0) if 0 < step.cores < step.threads else 0.0
    cores = f"{'is' if step.cores == 1 else 'are'} {counted(step.cores, 'core')}"
    why = f"Each of them runs on {step.threads} threads, and there {cores}: threads wait for one."
    return Advice("Computing on too many threads", why, f"torch.set_num_threads({step.cores})", win)


def _logits(cause: Candidate, step: Step) -> Advice:
    why = "The softmax of the logits and its loss are separate passes over them, forward and backward."
    action = "tilewright.functional.linear_cross_entropy, or torch.compile, makes fewer passes"
    return Advice("The loss over the logits", why, action, cause.inner_ms or 0.0)


def _anomalies(cause: Candidate, step: Step) -> Advice:
    why = "Each operator formats the stack that called it, and backward looks for NaN in each gradient."
    action = "torch.autograd.set_detect_anomaly(False), once the NaN is found"
    # What the operators take beyond their floors, or beyond a call where no floors are known.
    return Advice("Looking for anomalies", why, action, cause.inner_ms or 0.0)


_ADVICE: dict[str, Callable[[Candidate, Step], Advice]] = {
    "data": waits.advise_data,
    "sleep and locks": waits.advise_sleep,
    "I/O": waits.advise_io,
    "garbage collection": waits.advise_garbage,
    "compilation": waits.advise_compilation,
    "allocator": waits.advise_allocator,
    "device": waits.advise_device,
    "communication": waits.advise_communication,
    "exchange": waits.advise_exchange,
    "loop": _loop,
    "Python": _python,
    "copy": _copy,
    "constant": _constant,
    "double": _double,
    "half": advise_half,
    "single": _single,
    "optimizer": _optimizer,
    "threads": _threads,
    "logits": _logits,
    "small": _small,
    "interpreter": waits.advise_interpreter,
    "replaceable": advise_replaceable,
    "anomalies": _anomalies,
    "broadcast": _broadcast,
    "chain": _chain,
    "enlarged": _enlarged,
    "casts": _casts,
    "evaluation": _evaluation,
    "attention": _attention,
    "breaks": _breaks,
    "grown": _grown,
    "unread": _unread,
    "untaken": _untaken,
    "aside": _aside,
}
