"""Inputs that hurt: not a number, empty, without dimensions, very many, complex, sparse; unknown operators."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from tests.backend.compiling import agrees, assert_same, compiled, kernels, with_grad
from tests.contract import keeps_contract, launched, recorded
from tilewright.backend import recording


def test_nan_and_infinity_appear_where_eager_s_do() -> None:
    x = torch.randn(40, 20)
    x[0, 0], x[1, 1], x[2, 2], x[4, 3] = float("nan"), float("inf"), -float("inf"), -0.0
    x[3] = float("inf")
    x[5] = -float("inf")

    def pointwise(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        functions = (torch.exp, torch.tanh, torch.erf, torch.relu, torch.log, torch.sigmoid, torch.sqrt)
        return (*(f(x) for f in functions), x.clamp(0, 1), x.nan_to_num(), torch.maximum(x, x.flip(0)), x / x, x * 0)

    def reduced(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.amax(1), x.amin(0), x.sum(1), x.mean(), x.var(1), torch.softmax(x, -1), torch.logsumexp(x, -1)

    agrees(pointwise, [x])
    agrees(reduced, [x])


def gelus(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return F.gelu(x), F.gelu(x, approximate="tanh")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_gelu_of_infinity_is_that_of_atens_own_kernel(dtype: torch.dtype) -> None:
    """Which eager takes for strided tensors; oneDNN's, which it takes for others, has NaN at infinity with AVX-512."""
    special = [float("inf"), -float("inf"), float("nan"), 1e38, -1e38, 100.0, -100.0, -9.0, -5.0, 0.0, -0.0, 1e-30]
    x = torch.tensor(special * 4, dtype=torch.float64).to(dtype)
    strided = x.repeat_interleave(2)[::2]
    for mine, theirs in zip(compiled(gelus)(x), gelus(strided), strict=True):
        assert torch.equal(mine.isnan(), theirs.isnan()) and torch.equal(mine.isinf(), theirs.isinf())


def test_few_numbers() -> None:
    agrees(gelus, [with_grad(7)], backward=True)


def test_empty_tensors() -> None:
    def function(*xs: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        return [(F.gelu(x) * 2, x.sum(), x.sum(0)) for x in xs]

    empty = [with_grad(*shape) for shape in ((0,), (0, 20), (3, 0), (2, 0, 4))]
    agrees(function, empty, backward=True, runs=False)


def test_an_empty_tensor_beside_a_full_one() -> None:
    agrees(lambda x, y: (F.gelu(x) * 2, F.gelu(y).sum()), [with_grad(0, 20), with_grad(40, 20)], backward=True)


def test_tensors_without_dimensions() -> None:
    scalars = [torch.tensor(value, requires_grad=True) for value in (2.0, 3.0)]
    agrees(lambda x, y: F.gelu(x) * y + 1, scalars, backward=True)
    agrees(lambda x, y: F.gelu(x) * y + x.sum(), [with_grad(5, 7), scalars[0]], backward=True)


def test_very_many_inputs() -> None:
    agrees(lambda *xs: F.gelu(sum(xs)), [with_grad(7) for _ in range(100)], backward=True)


def test_dtypes() -> None:
    dtypes = [torch.uint8, torch.int16, torch.int64, torch.bool, torch.float64, torch.float16]
    agrees(lambda *xs: [(x + 1) * 2 for x in xs], [torch.arange(40).to(dtype) for dtype in dtypes])


INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("source", [torch.float32, torch.float64, torch.bfloat16])
def test_numbers_that_an_integer_cannot_hold(source: torch.dtype) -> None:
    small = [500.0, 200.7, -1.5, -300.0, 7e4, -7e4]
    large = [3e9, -3e9, 2.0**31 + 256, 2.0**32 + 77, 1e18, 1e20, -1e20]
    x = torch.tensor([*small, *large, float("nan"), float("inf"), -float("inf")], dtype=source).repeat(4)

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        # What goes straight back tempts a compiler to drop the integer between.
        return [y for dtype in INTEGERS for y in (x.to(dtype) + 1, x.to(dtype).to(source) * 2)]

    for ours, eager in zip(compiled(function)(x), function(x), strict=True):
        assert torch.equal(ours, eager)


def test_integers_wrap_around() -> None:
    def function(*xs: torch.Tensor) -> list[torch.Tensor]:
        # Comparisons that a compiler would decide if nothing overflowed.
        found = ([x + 1 > x, x - 1 < x, x * 2 // 2 == x, -x > 0, x.abs() >= 0, x * x, x + x, x - 3 * x] for x in xs)
        return [y for several in found for y in several]

    kinds = [(torch.iinfo(dtype), dtype) for dtype in INTEGERS if dtype.is_signed]
    xs = [torch.tensor([of.max, of.max - 1, of.min, -1, 0, 1, 7], dtype=dtype).repeat(9) for of, dtype in kinds]
    for ours, eager in zip(compiled(function)(*xs), function(*xs), strict=True):
        assert torch.equal(ours, eager)


def test_a_number_divided_by_integers() -> None:
    x = torch.tensor([3, -7, 127, 1, -128], dtype=torch.int8)

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [7 // x, 7 % x, 7 / x, torch.div(x, 3, rounding_mode="trunc"), x * 2]

    for ours, eager in zip(compiled(function)(x), function(x), strict=True):
        assert torch.equal(ours, eager)


def test_a_number_that_changes_is_scaled_by_alpha() -> None:
    """PyTorch makes it a tensor at the second call, and loses `alpha`."""

    def scaled(x: torch.Tensor, s: float) -> tuple[torch.Tensor, ...]:
        return torch.add(x, s, alpha=3), x.sub(s, alpha=2), x.clone().add_(s, alpha=s), torch.add(x, x, alpha=s)

    step, x = compiled(scaled), torch.randn(5, 7)
    for number in (0.75, -0.5, 1.25):
        torch.testing.assert_close(step(x, number), scaled(x, number))


def test_complex_tensors() -> None:
    def inside(x: torch.Tensor) -> torch.Tensor:
        return (torch.view_as_complex(x) * 2j + 1).real * 3 + F.gelu(x[..., 0])

    agrees(inside, [with_grad(8, 2)], backward=True)
    agrees(lambda x: (x * x.conj()).real * 3 + 1, [torch.randn(8, 4, dtype=torch.complex64)])


def test_a_conjugate_view_as_input() -> None:
    x = torch.randn(8, 4, dtype=torch.complex64)
    run = compiled(lambda x: torch.view_as_real(x.resolve_conj())[..., 1] * 3 + 1)
    assert_same(run(x.conj()), x.conj().imag * 3 + 1)


@pytest.mark.usefixtures("lenient")
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors() -> None:
    def function(sparse: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.sparse.mm(sparse, F.gelu(x))
        return product * 2

    dense, x = torch.randn(8, 8).relu(), torch.randn(8, 4)
    for sparse in (dense.to_sparse(), dense.to_sparse_csr()):
        assert_same(compiled(function)(sparse, x), function(sparse, x))


@pytest.mark.usefixtures("lenient")
def test_a_device_without_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    result = compiled(lambda x: F.gelu(x) * 2)(torch.empty(8, 8, device="meta"))
    assert result.device.type == "meta" and result.shape == (8, 8)
    assert "no kernel is generated for the device meta" in capsys.readouterr().err


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_a_condition_that_does_not_hold_raises(training: bool) -> None:
    def squares(x: torch.Tensor) -> torch.Tensor:
        torch._assert_async((x > 0).all(), "not positive")
        return x * x

    call, record = recorded(squares)
    call(torch.ones(3, requires_grad=training))
    assert launched(record).count("aten._assert_async.msg") == 1
    with pytest.raises(RuntimeError, match="not positive"):
        call(torch.tensor([1.0, -1.0, 1.0], requires_grad=training))


def test_an_operator_that_has_no_row(capsys: pytest.CaptureFixture[str]) -> None:
    hidden = torch.eye(8, dtype=torch.bool)
    record = agrees(lambda x: torch._masked_softmax(F.gelu(x), hidden, 1) * 2, [with_grad(8, 8)], backward=True)
    assert any(f.what == "aten._masked_softmax.default" for f in record.fallbacks)
    assert any(f.where.startswith("test_unusual_inputs.py:") and "no row" in f.why for f in record.fallbacks)
    assert not capsys.readouterr().err


@torch.library.custom_op("tilewright_tests::halve", mutates_args=())
def halve(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy() / 2)


@halve.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("tilewright_tests::bump_", mutates_args=("x",))
def bump_(x: torch.Tensor) -> None:
    x.numpy()[:] += 1


def test_a_higher_order_operator(capsys: pytest.CaptureFixture[str]) -> None:
    """Its arguments hold tuples, which an operator of that kind tells from lists; a line says that it stays dense."""
    q = torch.randn(1, 2, 128, 16)
    bias = torch.randn(2)
    eager = torch.softmax(q @ q.mT / 4 + bias.sum(), -1) @ q
    assert_same(compiled(lambda q: flex_attention(q, q, q, lambda s, b, h, i, j: s + bias.sum()))(q), eager)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("flex_attention computes every score: a function that calls sum")


def test_nested_tensors() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = (F.gelu(x) * 2).values()
        return values

    rows = [torch.randn(n, 8) for n in (2, 3, 5)]
    for mine in (rows, rows[:2]):
        nested = torch.nested.nested_tensor(mine, layout=torch.jagged, requires_grad=True)
        other = torch.cat(mine).requires_grad_()
        result, expected = compiled(function)(nested), F.gelu(other) * 2
        assert_same(result, expected)
        result.sum().backward()
        expected.sum().backward()
        assert_same(nested.grad.values(), other.grad)


class Labelled(torch.Tensor):
    """A class that intercepts functions, not operators."""


def test_a_subclass_that_intercepts_no_operators() -> None:
    weight = torch.randn(20, 7)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.mul_(2)
        return F.gelu(x) * 3, x @ weight

    ours, eager = (torch.ones(40, 20).as_subclass(Labelled) for _ in range(2))
    run = compiled(function)
    for _ in range(2):
        results, expected = run(ours), function(eager)
        assert {type(x) for x in results} == {Labelled}
        assert_same(results, expected)
        assert_same(ours, eager)


def test_the_user_s_own_operators() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(x) * 2
        bump_(h)
        halved: torch.Tensor = halve(h)
        return halved + torch.softmax(h, -1)

    x = torch.randn(8, 16)
    with recording() as record:
        result = compiled(function)(x)
    assert_same(result, function(x))
    assert kernels(record)
    assert any("halve" in fallback.what for fallback in record.fallbacks)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_base_of_a_power_is_of_the_exponents_dtype(dtype: torch.dtype) -> None:
    x = torch.linspace(-3, 3, 64).to(dtype)
    record = agrees(lambda x: (70000.0**x, 0.3**x), [x])
    assert len(kernels(record)) == 1


@pytest.mark.parametrize(("dtype", "number"), [(torch.int8, 128), (torch.uint8, 256), (torch.int16, 40000)])
def test_a_number_that_an_integer_dtype_cannot_hold(dtype: torch.dtype, number: int) -> None:
    x = (torch.arange(64) * 5 - 100).to(dtype)
    agrees(lambda x: (x.clamp(min=5) * 3, x + number, x * number, number - x, x > number), [x])
    if dtype is not torch.uint8:
        agrees(lambda x: x % number, [x], runs=False)
    for raises in (lambda x: x**number, lambda x: x.clamp(max=number)):
        for run in (raises, compiled(raises)):
            with pytest.raises(RuntimeError, match="without overflow"):
                run(x)


REFUSED: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda i: torch.lerp(i, i + 2, 0.5) * 2,
    lambda i: (i > 1) - i.to(torch.uint8) - 0.001,
    lambda i: (i * 0.5) - True,
    lambda i: (i > 1).argmax() + 1,
    lambda i: (i > 1).floor(),
    lambda i: (i * 0.5) & (i + 0.5),
    lambda i: torch.softmax(i, 0),
    lambda i: i.var(),
    lambda i: F.gelu(i) + 1,
    lambda i: i**-1,
]


@pytest.mark.parametrize("function", REFUSED)
def test_dtypes_that_eager_refuses(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    messages = []
    for run in (function, compiled(function)):
        with pytest.raises(RuntimeError) as raised:
            run(torch.arange(64))
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.channels_last_3d])
def test_padding_keeps_channels_last(mode: str, layout: torch.memory_format) -> None:
    axes = 2 if layout is torch.channels_last else 3
    x = with_grad(2, 3, *range(4, 4 + axes)).detach().contiguous(memory_format=layout).requires_grad_()
    agrees(lambda x: F.pad(x, [1, 2] * axes, mode=mode), [x], backward=True)


def test_writes_through_windows_are_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        y.view(-1).unfold(0, 2, 2).unsqueeze(0).mul_(2)
        return y

    x = torch.randn(5, 5)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"through Tensor\.unfold"):
        compiled(doubled)(x)
    monkeypatch.setenv("TILEWRIGHT_STRICT", "0")
    with recording() as record:
        assert torch.equal(compiled(doubled)(x), doubled(x))
    (fallback,) = record.fallbacks
    assert "between windows" in fallback.why
    monkeypatch.setenv("TILEWRIGHT_STRICT", "1")
    assert_same(compiled(lambda x: (x.unfold(0, 2, 2) * 2, x.mul_(2)))(x.clone()), (x.unfold(0, 2, 2) * 2, x * 2))
    windows = compiled(lambda x: torch.neg(x.unfold(0, 2, 2), out=x.new_empty(2, 5, 2)))(x)
    assert torch.equal(windows, -x.unfold(0, 2, 2))


@pytest.mark.parametrize(("shape", "size", "step"), [((9,), 2, 1), ((4, 9), 3, 2), ((3, 8), 4, 1)])
def test_gradients_of_windows_that_share_elements(shape: tuple[int, ...], size: int, step: int) -> None:
    agrees(lambda x: x.sin().unfold(-1, size, step), [with_grad(*shape)], backward=True)


@pytest.mark.parametrize("setting", [torch.backends.cuda.matmul, torch.backends.cudnn.conv])
def test_the_precision_of_one_backend_is_no_error(setting: Any) -> None:
    """PyTorch's older questions raise where the newer setting differs from them."""
    before = setting.fp32_precision
    setting.fp32_precision = "tf32" if before != "tf32" else "ieee"
    try:
        x, weight = torch.ones(2, 3, 5, 5), torch.ones(4, 3, 3, 3)
        keeps_contract(lambda x, weight: torch.conv2d(x, weight).flatten(1) @ torch.ones(36, 5), [x, weight])
    finally:
        setting.fp32_precision = before
