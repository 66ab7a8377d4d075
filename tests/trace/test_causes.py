"""What each cause of a slow step is called, why it is slow and what to do: one run with a step for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.trace.kineto import HOST, Analysis, Trace
from tests.trace.loading import Rows
from tests.trace.test_host_time import EVENTS, lines

Happening = Callable[[Trace], object]
TENSOR = "<built-in method tensor of type object at 0x7f>"
BACKWARD = "<built-in method run_backward of torch._C._EngineBase object at 0x1>"
FILLS = {"dims": [[4, 4], []]}


def frame(name: str, start: float = 100, end: float = 900) -> Happening:
    return lambda trace: trace.frame(name, start, end)


def method(name: str, owner: str = "type object", start: float = 100, end: float = 900) -> Happening:
    return frame(f"<built-in method {name} of {owner} at 0x7f>", start, end)


def operator(name: str, start: float = 110, end: float = 890, **args: Any) -> Happening:
    return lambda trace: trace.operator(name, start, end, **args)


def marked(name: str) -> Happening:
    return lambda trace: trace.slice("user_annotation", name, 100, 900)


def loop(name: str, lasts: float) -> list[Happening]:
    """Two hundred calls of a function, one every 4 µs."""
    return [frame(name, at, at + lasts) for at in range(100, 900, 4)]


def small(name: str, lasts: float) -> list[Happening]:
    """Small operators of a module, one every 4 µs."""
    inside = [operator(name, at, at + lasts) for at in range(100, 900, 4)]
    return [frame("torch/nn/modules/module.py(9): __call__", 99.5, 900.5), *inside]


def looks_for_anomalies(trace: Trace) -> None:
    trace.header["tilewright anomalies"] = "true"


def waits_in(function: str) -> list[Happening]:
    return [
        operator("aten::mm", 10, 60),
        lambda trace: trace.launch(20, 30, 150),
        method(function, "Tensor object"),
        operator("aten::copy_", 102, 898),
        lambda trace: trace.call("cudaStreamSynchronize", 104, 896),
    ]


def product(dims: list[list[int]], *, is_summed: bool = True) -> list[Happening]:
    summed = [operator("aten::sum", 701, 900, dims=[[96, 96, 96]])] if is_summed else []
    return [operator("aten::mul", 100, 700 if is_summed else 900, dims=dims), *summed]


def products(first: list[list[int]], second: list[list[int]], between: str = "aten::t") -> list[Happening]:
    last = [operator(between, 852, 855), operator("aten::mm", 860, 900, dims=second)]
    return [operator("aten::mm", 100, 850, dims=first), *last]


def enlarged(weight: list[int], *between: Happening, **args: Any) -> list[Happening]:
    """An interpolation to 16 times the places, and a convolution."""
    sizes = {"dims": [[4, 32, 32, 32], weight]}
    return [
        operator("aten::upsample_bilinear2d", 100, 500, dims=[[4, 32, 8, 8], []]),
        *between,
        operator("aten::conv2d", 501, 900, **sizes, **args),
        operator("aten::mkldnn_convolution", 502, 899, **sizes),
    ]


def unread(number: int) -> list[Happening]:
    """Operators with their nodes' numbers, of which 2 and 3 are the line's; backward comes to 1, 4 and `number`."""
    forward = [(1, 99, 1), (100, 500, 2), (500, 900, 3), (901, 930, 4), (930, 950, 5)]
    made = [
        operator("aten::mm", begin, end, **{"Sequence number": at, "Fwd thread id": 0}) for begin, end, at in forward
    ]
    return [
        *made,
        *(
            operator("MmBackward0", 951 + at, 952 + at, **{"Sequence number": at, "Fwd thread id": 1})
            for at in (1, number, 4)
        ),
    ]


def aside(*names: str, made: int = 0) -> list[Happening]:
    """A step that trains, and of which the line's operators make so many nodes of the gradients' graph."""
    each, numbers = 800 / len(names), {"Fwd thread id": 0}
    return [
        operator("aten::mm", 10, 90, **numbers, **{"Sequence number": 1}),
        *(operator(name, 100 + each * at, 100 + each * (at + 1), **numbers, **{"Sequence number": 2})
          for at, name in enumerate(names)),
        operator("aten::mean", 902, 910, **numbers, **{"Sequence number": 2 + made}),
        operator("aten::mul", 911, 920, **numbers, **{"Sequence number": 3 + made}),
        frame(BACKWARD, 950, 999),
    ]  # fmt: skip


def accumulated(count: int) -> list[Happening]:
    """A backward that takes 400 µs to add to that many gradients."""
    name, each = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 400 / count
    return [
        frame(BACKWARD, 500, 900),
        *(operator(name, 500 + each * at + 0.1, 500 + each * (at + 1)) for at in range(count)),
    ]


def calls(module: str, *, within: str = "") -> list[Happening]:
    """A step that trains the module Net_0, and then calls one that nothing differentiates."""
    around = [frame(within, 99.5, 900.5)] if within else []
    trained = [frame("nn.Module: Net_0", 1, 40), operator("aten::addmm", 5, 35), frame(BACKWARD, 41, 90)]
    forward = lambda trace: trace.flow("fwdbwd", 1, (5, HOST), (50, HOST))  # noqa: E731
    trained += [operator("AddmmBackward0", 50, 80), forward]
    return [*trained, *around, frame(f"nn.Module: {module}"), operator("aten::addmm", 110, 890)]


def detached(*, first: str = "nn.Module: Critic_0") -> list[Happening]:
    """As `calls`, of the model that trains; what it gives is detached, and `first` is next."""
    return [
        *calls("Net_0"),
        operator("aten::detach", 901.2, 901.5),
        frame(first, 902, 990),
        operator("aten::mm", 910, 980),
    ]


SQUARES = [[700, 700], [700, 700]]
CAUSES: dict[str, tuple[Sequence[Happening], str, str, str]] = {
    "a tensor of a list": ([frame(TENSOR)], "torch.tensor()", "Python's numbers, one by one", "Keep the data as a"),
    "a tensor of an array": ([frame(TENSOR), operator("aten::copy_", 101, 899)], "Copying a tensor", "", "from_numpy"),
    "a tensor of zeros": ([method("zeros"), operator("aten::fill_", 101, 899)],
                          "Making a tensor (torch.zeros())", "", "before the loop"),
    "tensors stacked anew": ([method("stack"), operator("aten::cat", 101, 899)],
                             "Copying a tensor (.stack())", "", "Make one tensor before the"),
    # The engine's range is around the node of the same name.
    "the gradient of an embedding": ([operator("autograd::engine::evaluate_function: EmbeddingBackward0", 100, 900),
                                      operator("EmbeddingBackward0", 105, 895), operator("aten::fill_", **FILLS)],
                                     "The gradient of an embedding", "", "sparse=True"),
    "one_hot": ([frame("<built-in function one_hot>", 99.5, 900.5), operator("aten::one_hot", 100, 900),
                 operator("aten::zeros", 105, 895), operator("aten::fill_", **FILLS)],
                "one_hot()", "", "functional.embedding"),
    "an import": ([frame("<frozen importlib._bootstrap>(1165): _find_and_load"), operator("aten::copy_", 200, 800)],
                  "Importing a module", "", "before the loop"),
    "deepcopy": ([frame("copy.py(128): deepcopy"), operator("aten::copy_", 200, 800)],
                 "deepcopy()", "", "_foreach_copy_"),
    "another process": ([frame("subprocess.py(506): run"), frame("<built-in method poll of select.poll>", 102, 899)],
                        "Waiting in run()", "", "subprocess.Popen"),
    "an event loop": (
        [frame("asyncio/runners.py(160): run"), frame("<built-in method poll of select.epoll>", 102, 899)],
        "Waiting in asyncio.run()", "coroutines", "asyncio.gather"),
    "a function of the user's that is called run": (
        [frame("train.py(7): run"), method("acquire", "_thread.lock object", 102, 899)],
        "Waiting in", "a lock, a queue", ""),
    "a copy that waits": (waits_in("to"), "Waiting for the device", "to returns only when", "pin_memory=True"),
    "a mask that waits": (waits_in("nonzero"), "Waiting for the device", "nonzero returns only when", "torch.where"),
    "a number that waits": (waits_in("item"), "Waiting for the device", "item returns only when", "every 100th step"),
    "gradients set to zero": ([frame("torch/optim/optimizer.py(990): zero_grad"), operator("aten::_foreach_zero_")],
                              "zero_grad(set_to_none=False)", "", ""),
    # A tensor of two dimensions formats its rows by the same function.
    "text of a tensor": ([frame("torch/_tensor_str.py(683): _str"), frame("torch/_tensor_str.py(683): _str", 200, 800),
                          operator("aten::select", 300, 700)], "Formatting a tensor", "", "every 100th step"),
    "a loop that asks for the time": (loop("<built-in function perf_counter>", 2),
                                      "A loop that waits", "asks for the time 200 times", ""),
    "a log in a loop": (loop("logging/__init__.py(1479): info", 3), "info()", "to text", "every 100th step"),
    "a loop without an operator": (loop("<built-in method get of dict object at 0x1>", 3),
                                   "A loop of small calls", "", "do it once before the loop"),
    "small operators": (small("aten::relu", 2), "Calling small operators",
                        "It makes 200 calls a step of 4.01 µs each, as aten::relu", "torch.compile(model)"),
    "small operators on an optimizer's line": (
        [*small("aten::relu", 2), operator("aten::add_", 102.2, 103.2),
         lambda trace: trace.slice("user_annotation", "Optimizer.step#SGD.step", 102.1, 103.5)],
        "Calling small operators", "It makes 200 calls", "torch.compile(model)"),
    "small operators that look for anomalies": ([looks_for_anomalies, *small("aten::isnan", 4)], "Looking for", "", ""),
    "operators that look for anomalies": ([looks_for_anomalies, operator("aten::mm", 100, 900)],
                                          "Looking for anomalies", "", "set_detect_anomaly(False)"),
    "a file written": ([method("writelines", "_io.TextIOWrapper object")], "Writing", "", ""),
    "rows of a database": ([method("commit", "sqlite3.Connection object")], "A database", "commit", "executemany"),
    "a file read": ([method("readlines", "_io.TextIOWrapper object")], "Reading", "", "before the loop"),
    "an outer product summed": (product([[96, 96, 1], [1, 96, 96]]),
                                "Combining tensors by broadcasting", "96 times the elements", "torch.einsum"),
    "a product of rows summed": (product([[512, 1, 64], [512, 64]]),
                                 "Combining tensors by broadcasting", "512 times the elements", "torch.einsum"),
    "a column less a row": (product([[512, 1], [512]]),
                            "Combining tensors by broadcasting", "[512, 1] and [512]", "(.squeeze(-1))"),
    "ones that are scattered": ([method("zeros", end=894), operator("aten::fill_", 101, 893),
                                 method("scatter_", "Tensor object", 895, 899), operator("aten::scatter_", 896, 898)],
                                "Making a one-hot tensor", "a row of all classes", "functional.embedding"),
    "an interpolation before a convolution of one place": (
        enlarged([5, 32, 1, 1]), "Interpolating before a 1 × 1 convolution", "16 × the places", "Swap them"),
    "copies of autocast": (
        [frame("nn.Module: Linear_0"), operator("aten::_to_copy", 101, 899),
         operator("aten::copy_", 102, 898, dims=[[8, 8], [8, 8]], types=["c10::BFloat16", "float"])],
        "Copying to another precision", "No line asks for it", "autocast once"),
    "a graph that breaks": ([part for at in range(100, 900, 100) for part in
                             (frame("train.py(5): torch_dynamo_resume_in_forward_at_5", at, at + 100),
                              operator("CompiledFunction", at, at + 100))],
                            "Leaving compiled code", "entered again 8 times", "TORCH_LOGS=graph_breaks"),
    "attention of scores": ([operator("aten::bmm", 1, 90, dims=[[8, 64, 32], [8, 32, 64]]),
                             operator("aten::_softmax", 100, 500, dims=[[2, 4, 64, 64], [], []]),
                             operator("aten::add", 500, 900, dims=[[2, 4, 64, 64], [64, 64], []]),
                             operator("aten::bmm", 901, 990, dims=[[8, 64, 64], [8, 64, 32]])],
                            "Attention by single operators", "[2, 4, 64, 64]", "scaled_dot_product_attention"),
    "a model evaluated in each step": (calls("Net_0"), "Calling the model without a backward",
                                       "once in a step without a gradient", "Evaluate every 100th step"),
    "a model evaluated batch by batch": (
        [*calls("Net_0")[:5], *(part for at in range(100, 900, 40) for part in (
            frame("nn.Module: Net_0", at, at + 30), *(operator("aten::addmm", n, n + 7) for n in range(at, at + 28, 7)),
            operator("aten::argmax", at + 31, at + 35), operator("aten::eq", at + 35, at + 39)))],
        "Calling the model without a backward", "20 times in a step without a gradient", "Evaluate every 100th step"),
    "a model evaluated by a detached result": (
        detached(first="<built-in function mm>"), "Calling the model without a backward", "once", "Evaluate every"),
    "products from the left": (products(SQUARES, [[700, 700], [700, 1]]),
                               "Multiplying matrices in a costly order", "350 × fewer", "multi_dot"),
    "products from the right": (products(SQUARES, [[1, 700], [700, 700]]),
                                "Multiplying matrices in a costly order", "350 × fewer", "multi_dot"),
    "a checkpoint": ([frame("torch/utils/checkpoint.py(9): checkpoint", 100, 102),
                      operator("aten::addmm", 100.5, 101.5), frame(BACKWARD, 102.5, 905),
                      frame("torch/utils/checkpoint.py(99): recompute_fn", 103, 903),
                      operator("aten::addmm", 104, 902)],
                     "Computing forward again in backward", "", "Checkpoint only"),
    "gradients filled in a loop": ([method("zero_", "Tensor object"), operator("aten::zero_", 101, 899)],
                                   "Filling tensors (.zero_())", "", "optimizer.zero_grad()"),
    "gradients filled in a loop, to which backward adds": (
        [method("zero_", "Tensor object", 100, 500), operator("aten::zero_", 101, 499), *accumulated(1)],
        "Filling tensors (.zero_())", "", "optimizer.zero_grad()"),
    "gradients set to zero, to which backward adds": (
        [frame("torch/optim/optimizer.py(990): zero_grad", 100, 500), operator("aten::_foreach_zero_", 101, 499),
         *accumulated(3)], "zero_grad(set_to_none=False)", "backward adds to them", ""),
    "an optimizer made in each step": (
        [frame("torch/optim/adamw.py(9): __init__", 100, 500), frame("torch/optim/adam.py(9): __init__", 110, 490),
         frame("torch/optim/adam.py(99): _init_group", 500.1, 900), operator("aten::zeros_like", 500.2, 899)],
        "Making an optimizer", "", "before the loop"),
    "a model traced": ([frame("torch/jit/_trace.py(9): trace"), operator("aten::mm", 500, 502)],
                       "Tracing a model", "", "once before the loop"),
    "the mode of a model": ([frame("torch/nn/modules/module.py(9): eval"),
                             frame("torch/nn/modules/module.py(5): train", 101, 899)],
                            "Going through a model's modules", "", "where the mode changes"),
    "values that are checked": (aside("aten::isnan", "aten::any"), "Checking values", "No gradient", "every 100th"),
    "noise of all": (aside("aten::normal_", "aten::add"), "Drawing random numbers", "aten::normal_", "for the rows"),
    "an average of two": (aside("aten::mul", "aten::mul", "aten::add"),
                          "Updating tensors beside the training", "", "average.lerp_"),
    "a table made anew": (aside("aten::sin", "aten::cos"), "Computing beside the training", "", "register_buffer"),
    "an average of parameters": ([method("lerp_", "Tensor object"), *aside("aten::mul", "aten::copy_")],
                                 "Updating tensors beside the training", "", "_foreach_lerp_"),
    "an operand in another order": ([frame("torch/functional.py(9): einsum"), operator("aten::clone", 101, 899)],
                                    "Copying a tensor (within einsum)", "", "once before the loop"),
    "a slow sampler": ([marked(EVENTS[0][1]), frame("torch/utils/data/dataloader.py(9): _next_index")],
                       "Choosing the next batch", "whatever num_workers is", "once an epoch"),
    "text that is read": ([frame("json/__init__.py(9): loads")], "loads()", "", "DataLoader's workers"),
    "a branch that nothing reads": (unread(1), "A forward that no loss depends on", "Its 2 operators",
                                    "torch.no_grad()"),
    "an inverse": ([operator("aten::linalg_inv_ex", 100, 900)], "Inverting a matrix", "", "linalg.solve"),
    "singular vectors": ([operator("aten::linalg_svd", 100, 900)], "Decomposing a matrix", "", "svdvals"),
    "an order": ([operator("aten::randperm", 100, 900)], "Drawing a random order", "", "torch.randint"),
    "unique": ([operator("aten::_unique2", 100, 900)], "Finding the elements that differ", "", "bincount"),
    "a mask": ([operator("aten::nonzero", 100, 900)], "Selecting by a mask", "", "torch.where"),
    "data": ([marked(EVENTS[0][1])], "Waiting for data", "", "num_workers="),
    "sleep": ([frame("<built-in function sleep>")], "time.sleep", "", "time.sleep"),
    "a lock": ([method("acquire", "_thread.lock object")], "Waiting in acquire", "", "earlier"),
    "a call of the collector": ([frame("<built-in function collect>")], "Garbage collection", "", "gc.collect()"),
    "the collector": ([marked("garbage collection")], "Garbage collection", "", "gc.freeze()"),
    "compilation": ([marked("compilation")], "Compilation", "", "--wait"),
    "print": ([frame("<built-in function print>")], "print", "", "every 100th step"),
    "JSON": ([frame("json/__init__.py(9): dumps")], "dumps()", "", "every 100th step"),
}  # fmt: skip
"""What takes 800 of a step's 1000 µs; how its name begins, and what is said of why and of what to do."""
NO_CAUSE: dict[str, Sequence[Happening]] = {
    "a function of PyTorch in C": [frame("<built-in function linear>"), operator("aten::linear", 101, 899)],
    "gradients set to none": [frame("torch/optim/optimizer.py(990): zero_grad"), operator("aten::detach")],
    "a product that was asked for": product([[96, 96, 1], [1, 96, 96]], is_summed=False),
    "a bias": product([[64, 512], [512]]),
    "a recurrent layer": [operator("aten::gru", 99.6, 900.4), *small("aten::sigmoid_", 2)],
    "a softmax over classes": [
        operator("aten::_softmax", 100, 900, dims=[[8, 64, 64], [], []]),
        operator("aten::bmm", 901, 990, dims=[[8, 64, 32], [8, 32, 64]]),
    ],
    "a buffer set to zero beside gradients": [
        method("zero_", "Tensor object", 100, 150),
        operator("aten::zero_", 101, 149),
        operator("aten::mm", 150, 500),
        *accumulated(4),
    ],
    "a line that makes a node": aside("aten::sin", "aten::cos", made=1),
    "a line of which backward comes to one operator": unread(3),
    "a number": product([[64, 512], []]),
    "an interpolation before a convolution of nine places": enlarged([5, 32, 3, 3]),
    "an interpolation before a convolution that strides": enlarged(
        [5, 32, 1, 1], **{"Concrete Inputs": ["", "", "", "[2, 2]", "[0, 0]"]}
    ),
    "an interpolation with an operator after it": enlarged([5, 32, 1, 1], operator("aten::add", 500.2, 500.8)),
    "a teacher": calls("Teacher_0"),
    "a policy that plays": [
        frame("nn.Module: Net_0", 1, 40),
        operator("aten::addmm", 5, 35),
        frame(BACKWARD, 41, 90),
        operator("AddmmBackward0", 50, 80),
        lambda trace: trace.flow("fwdbwd", 1, (5, HOST), (50, HOST)),
        *(
            part
            for at in range(100, 900, 10)
            for part in (frame("nn.Module: Net_0", at, at + 10), operator("aten::addmm", at + 1, at + 9))
        ),
    ],
    "a generator's images for its critic": detached(),
    "a forward that backward calls": calls("Net_0", within=BACKWARD),
    "products in the better order": products([[700, 700], [700, 1]], [[700, 700], [700, 1]]),
    "products with an operator between": products(SQUARES, [[700, 700], [700, 1]], between="aten::relu"),
}


@pytest.fixture(scope="module")
def causes() -> dict[str, Rows]:
    """Of each step the causes that stand out, the largest gain first."""
    steps, traces = CAUSES | {name: (events, "", "", "") for name, events in NO_CAUSE.items()}, []
    for events, *_ in steps.values():
        trace = Trace()
        trace.step(0, 0, 1000)
        trace.frame("train.py(1): main", 0, 1000)
        for happens in events:
            happens(trace)
        lines(trace, (0, 2), (99, 5), (901, 9))
        traces.append(trace)
    sql = """SELECT file_id, what, source, percent, why, action FROM cause
             WHERE win_ms_per_step >= 0.1 * ms_per_step / percent * 100 ORDER BY file_id, win_ms_per_step DESC"""
    found: dict[str, Rows] = {name: [] for name in steps}
    for file_id, *row in Analysis(traces).rows(sql):
        found[list(steps)[file_id]].append(tuple(row))
    return found


@pytest.mark.parametrize("name", CAUSES)
def test_a_cause_has_its_name_its_share_its_line_and_what_to_do(name: str, causes: dict[str, Rows]) -> None:
    _, called, because, do = CAUSES[name]
    what, source, percent, why, action = causes[name][0]
    assert what.startswith(called) and because in why and do in action, causes[name]
    # A call's own time, or with the line's.
    assert source == "train.py:5" and 79 <= percent <= 81, causes[name]


@pytest.mark.parametrize("name", NO_CAUSE)
def test_nothing_stands_out(name: str, causes: dict[str, Rows]) -> None:
    assert causes[name] == []


@pytest.mark.parametrize(("sums", "named"), [([96, 96, 96], ["train.py:5"]), ([96, 96], [])])
def test_a_difference_of_all_pairs_is_summed_a_line_later(sums: list[int], named: list[str]) -> None:
    trace = Trace()
    trace.step(0, 0, 1000)
    trace.frame("train.py(1): main", 0, 1000)
    trace.operator("aten::sub", 100, 500, dims=[[96, 1, 96], [1, 96, 96]])
    trace.operator("aten::pow", 501, 700, dims=[sums, []])
    trace.operator("aten::sum", 701, 900, dims=[sums, []])
    lines(trace, (0, 9), (99, 5), (500, 6), (901, 9))
    found = Analysis([trace]).rows("SELECT source, percent FROM cause WHERE kind = 'broadcast'")
    assert [source for source, _ in found] == named
    assert all(percent == pytest.approx(79.8, abs=0.5) for _, percent in found)


def test_float64_is_named_where_it_begins() -> None:
    trace = Trace()
    trace.step(0, 0, 1000)
    trace.frame("train.py(1): main", 0, 1000)
    trace.operator("aten::zero_", 10, 90, dims=[[512, 512]])
    trace.operator("aten::mul", 100, 300, dims=[[512, 512], [512, 512]], types=["float", "double"])
    trace.operator("aten::pow", 301, 900, dims=[[512, 512], []], types=["double", "Scalar"])
    # The line that computes longest begins the step too, with something else.
    lines(trace, (0, 9), (99, 5), (300, 9))
    ((what, source),) = Analysis([trace]).rows("SELECT what, source FROM cause WHERE kind = 'double'")
    assert (what, source) == ("Computing in float64", "train.py:5")
