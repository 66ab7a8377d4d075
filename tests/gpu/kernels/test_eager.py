"""Operators called eagerly on a GPU: the executor gives the bits that they give by PyTorch's dispatcher."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.gpu.kernels.launching import compiled, in_four_threads, on_a_side_stream, replayed, values_of
from tilewright import functional
from tilewright.kernels import cross_entropy
from tilewright.launch.eager import launches_in_python

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("executor")]
GPU = torch.device("cuda:0")
Inputs = list[torch.Tensor]


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> torch.Tensor:
    return torch.randn(shape, device=GPU).to(dtype).requires_grad_(grad)


def gate_and_up() -> Inputs:
    """The halves of one projection."""
    gate, up = torch.randn(33, 2 * 192, device=GPU).bfloat16().chunk(2, -1)
    return [gate.requires_grad_(), up.requires_grad_()]


def classes(rows: int, columns: int, dtype: torch.dtype) -> Inputs:
    return [drawn(rows, columns, dtype=dtype), torch.randint(columns, (rows,), device=GPU)]


def normed(columns: int, residual: bool, bias: bool) -> Inputs:
    rows = [drawn(9, columns) for _ in range(1 + residual)]
    return [*rows, *[drawn(columns) for _ in range(1 + bias)]]


CASES: dict[str, tuple[Callable[..., Any], Callable[[], Inputs]]] = {
    "gelu": (functional.gelu, lambda: [drawn(33, 192)]),
    "gelu of one": (functional.gelu, lambda: [drawn(1, dtype=torch.float32)]),
    "gelu, strided": (functional.gelu, lambda: [torch.randn(31, 77, device=GPU)[:, 3:40].requires_grad_()]),
    "gelu, misaligned": (functional.gelu, lambda: [torch.randn(1001, device=GPU)[1:].requires_grad_()]),
    "gelu of nothing": (functional.gelu, lambda: [drawn(0, 5)]),
    "silu": (functional.silu, lambda: [drawn(7, 1023, dtype=torch.float16)]),
    "swiglu": (functional.swiglu, gate_and_up),
    "geglu": (functional.geglu, lambda: [drawn(5, 129), drawn(5, 129)]),
    "softmax, short": (functional.softmax, lambda: [drawn(100, 37)]),
    "softmax": (functional.softmax, lambda: [drawn(2, 9, 5000)]),
    "softmax in a cluster": (functional.softmax, lambda: [drawn(3, 50257)]),
    "softmax that no cluster holds": (functional.softmax, lambda: [drawn(3, 600000, dtype=torch.float32)]),
    "softmax of columns": (lambda x: functional.softmax(x, 0), lambda: [drawn(40, 50)]),
    "log_softmax": (functional.log_softmax, lambda: [drawn(11, 1024, dtype=torch.float32)]),
    "cross_entropy": (functional.cross_entropy, lambda: classes(33, 1000, torch.bfloat16)),
    "cross_entropy of rows": (
        lambda x, y: functional.cross_entropy(x, y, reduction="none", label_smoothing=0.1, z_loss=1e-3),
        lambda: classes(17, 50257, torch.float32),
    ),
    "cross_entropy by Triton": (
        functools.partial(cross_entropy.by_impl, impl="triton"),
        lambda: classes(37, 131072, torch.float32),
    ),
    "weighted_sum": (functional.weighted_sum, lambda: [drawn(5, 7, 300), drawn(300)]),
    "dropout_add": (
        functools.partial(functional.dropout_add, p=0.37, activation="gelu"), lambda: [drawn(33, 64), drawn(33, 64)],
    ),
    "layer_norm": (functional.layer_norm, lambda: normed(768, False, True)),
    "layer_norm, short": (functional.layer_norm, lambda: normed(48, False, True)),
    "rms_norm": (functional.rms_norm, lambda: normed(4096, False, False)),
    "add_layer_norm": (functional.add_layer_norm, lambda: normed(1000, True, True)),
    "add_rms_norm": (functional.add_rms_norm, lambda: normed(8192, True, False)),
    "rms_norm in a cluster": (functional.rms_norm, lambda: normed(65536, False, False)),
}  # fmt: skip


def by_operator(call: Callable[..., Any], inputs: Sequence[Any]) -> list[torch.Tensor]:
    """`values_of` by PyTorch's dispatcher, from the same numbers."""
    with launches_in_python():
        torch.manual_seed(0)
        return values_of(call, inputs)


def assert_equal(mine: list[torch.Tensor], true: list[torch.Tensor]) -> None:
    for one, other in zip(mine, true, strict=True):
        assert one.shape == other.shape and one.stride() == other.stride()
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits(name: str) -> None:
    call, make = CASES[name]
    for _ in range(3):
        inputs = make()
        true = by_operator(call, inputs)
        drawn_up_to = torch.cuda.default_generators[0].get_offset()
        # Memory that holds no result by chance.
        poison = [torch.full((2**20,), float("nan"), device=GPU) for _ in range(4)]
        del poison
        torch.manual_seed(0)
        assert_equal(values_of(call, inputs), true)
        assert torch.cuda.default_generators[0].get_offset() == drawn_up_to
        with torch.no_grad():
            torch.manual_seed(0)
            result = call(*inputs)
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        assert_equal(results, true[: len(results)])


@pytest.mark.parametrize("name", [name for name in CASES if "nothing" not in name])
def test_python_launches_nothing_of_a_known_kind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewright.launch import nvrtc, twin

    call, make = CASES[name]
    inputs, others = make(), make()
    values_of(call, inputs)
    monkeypatch.setattr(twin, "perform", lambda *_: pytest.fail("Python performed a recipe"))
    monkeypatch.setattr(nvrtc.Kernel, "__call__", lambda *_: pytest.fail("Python launched CUDA C++"))
    monkeypatch.setattr("triton.runtime.jit.JITFunction.run", lambda *_, **__: pytest.fail("Triton launched"))
    values_of(call, others)


@pytest.mark.parametrize("name", CASES)
def test_streams_and_graphs(name: str) -> None:
    call, make = CASES[name]
    inputs = make()
    values_of(call, inputs)
    true = by_operator(call, inputs)
    torch.manual_seed(0)
    assert_equal(on_a_side_stream(call, inputs), true)
    if name != "dropout_add":  # each replay draws anew: tests/gpu/kernels/test_dropout_add.py
        assert_equal(replayed(call, inputs), true)


@pytest.mark.parametrize(
    "name", ["swiglu", "softmax", "cross_entropy", "weighted_sum", "dropout_add", "add_layer_norm"]
)
def test_one_graph_for_inductor(name: str) -> None:
    call, make = CASES[name]
    inputs = make()
    true = by_operator(call, inputs)
    torch.manual_seed(0)
    assert_equal(compiled(call, inputs), true)


@pytest.mark.parametrize("name", ["gelu", "softmax", "cross_entropy", "layer_norm"])
def test_threads(name: str) -> None:
    call, make = CASES[name]
    inputs = make()
    true = by_operator(call, inputs)
    for values in in_four_threads(call, lambda: inputs):
        assert_equal(values, true)


def test_a_kind_in_a_graph_from_its_first_call_on() -> None:
    x = drawn(13, 771)
    with torch.no_grad():
        functional.silu(x)  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [functional.silu(x) for _ in range(5)]
        graph.replay()
        torch.cuda.synchronize()
        for result in results:
            assert torch.equal(result, results[0])
        assert torch.equal(results[0], functional.silu(x))
