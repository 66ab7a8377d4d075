"""Operators that are traced as those of their formulas."""

import copy
import functools
import logging
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves, tree_map

from tests.contract import keeps_contract, launched, recorded, targets
from tests.operators.samples import CALLS, operands
from tilewright.backend import backend, recording
from tilewright.capture.decompositions import by_tensor, decompositions
from tilewright.compile.capture import capture
from tilewright.measure.truth.contract import compare
from tilewright.records import errors
from tilewright.records.case import Case, InputSpec


@pytest.mark.parametrize("shapes", [((40, 7), (33, 7)), ((2, 30, 5), (2, 1, 5))], ids=str)
def test_distances_are_a_product_and_kernels(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    def near(a: Tensor, b: Tensor) -> Tensor:
        return torch.cdist(a, b, compute_mode="use_mm_for_euclid_dist").neg().exp()

    generator = torch.Generator().manual_seed(0)
    record = keeps_contract(near, [torch.randn(shape, generator=generator) for shape in shapes])
    assert not [target for target in targets(record) if "_euclidean_dist" in target]
    assert "kernel" in launched(record)


@pytest.mark.parametrize(
    ("shape", "dims", "counted"), [((5, 3, 1), -1, [2]), ((1, 4, 1), (-3, 2), [0, 2]), ((3,), 0, [0]), ((), -1, [-1])]
)
def test_dimensions_of_a_norm_are_counted_from_the_front(
    shape: tuple[int, ...], dims: int | tuple[int, ...], counted: list[int]
) -> None:
    x = torch.randn(shape)
    graph = make_fx(lambda x: torch.linalg.vector_norm(x, dim=dims), decomposition_table=decompositions())(x)
    (node,) = (n for n in graph.graph.nodes if n.target is torch.ops.aten.linalg_vector_norm.default)
    assert node.args[2] == counted
    assert torch.equal(graph(x), torch.linalg.vector_norm(x, dim=dims))


@pytest.mark.parametrize("exponent", [True, False])
def test_a_power_of_booleans_is_boolean(exponent: bool) -> None:
    x = torch.tensor([True, False])
    record = keeps_contract(lambda x: ~(x**exponent), [x])
    assert "kernel" in launched(record)


SHAPES = ((5, 7), (33,), (2, 3, 4))
BY_LIBRARY = ("aten._foreach_lgamma.default", "aten._foreach_powsum.Scalar", "aten._foreach_mm.default")
"""List operators that no generated kernel computes, not even for one tensor."""


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [(torch.rand(shape, generator=draw) * 0.8 + 0.1).to(dtype) for shape in SHAPES]


def arguments(operator: Any) -> list[Any]:
    """An argument for each that the schema wants."""
    made = {"List[Tensor]": tensors(2), "Tensor": torch.tensor(1.5), "number": 1.5, "int": 2}
    given = []
    for place, argument in enumerate(operator._schema.arguments):
        if place and not argument.has_default_value():
            given.append(made.get(str(argument.type), [1.5, 2.0, 0.5]))
    return [1.5, tensors(2)] if "ScalarAndTensor" in str(operator) else [tensors(1), *given]


def wide(value: Any) -> Any:
    if isinstance(value, list):
        return [wide(one) for one in value]
    return value.double() if isinstance(value, Tensor) else value


def test_every_list_operator_is_one_call_for_each_tensor() -> None:
    chosen = {op: arguments(op) for op in by_tensor() if str(op) not in BY_LIBRARY}
    assert len(chosen) > 60

    def function(given: list[list[Any]]) -> list[Sequence[Tensor]]:
        return [operator(*each) for operator, each in zip(chosen, given, strict=True)]

    given = list(chosen.values())
    with recording() as record:
        results = torch.compile(function, backend=backend)(given)
    assert not record.fallbacks and record.graphs[0].executable.kernels
    assert not [node for node in record.graphs[0].plan.graph.nodes if "_foreach" in str(node.target)]
    for name, mine, eager, true in zip(chosen, results, function(given), function(wide(given)), strict=True):
        for parts in zip(mine, eager, true, strict=True):
            assert compare(*parts).ok, name


def update(xs: list[Tensor], ys: list[Tensor]) -> Tensor:
    """Without `_foreach_addcdiv`, whose gradient fails in PyTorch 2.13."""
    a = torch._foreach_mul(torch._foreach_add(xs, ys, alpha=2), 0.5)
    b = torch._foreach_addcmul(a, xs, ys, value=0.1)
    c = torch._foreach_lerp(torch._foreach_sqrt(b), torch._foreach_div(a, ys), 0.3)
    return torch.stack([x.square().sum() for x in c]).sum()


def test_gradients_of_lists() -> None:
    def gradients(function: Any, dtype: torch.dtype) -> Sequence[Tensor]:
        leaves = [x.requires_grad_() for seed in (1, 2) for x in tensors(seed, dtype)]
        return torch.autograd.grad(function(leaves[:3], leaves[3:]), leaves)

    with recording() as record:
        mine = gradients(torch.compile(update, backend=backend), torch.float32)
    assert not record.fallbacks and all(graph.executable.kernels for graph in record.graphs)
    for parts in zip(mine, gradients(update, torch.float32), gradients(update, torch.float64), strict=True):
        assert compare(*parts).ok


def test_an_optimizers_step_has_a_kernel_for_each_parameter() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 33), nn.Linear(33, 5))
    models = [model, copy.deepcopy(model), copy.deepcopy(model).double()]
    steps = []
    for one in models:
        for place, parameter in enumerate(one.parameters()):
            torch.manual_seed(place)
            parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
        # AdamW traced by Dynamo raises its betas to powers in fp32, with an error of its own.
        steps.append(torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True).step)
    with recording() as record:
        compiled = torch.compile(steps[0], backend=backend)
        for _ in range(3):
            for step in (compiled, *steps[1:]):
                step()
    assert not record.fallbacks
    for graph in record.graphs:
        assert len(graph.executable.kernels) >= len(list(model.parameters()))
        assert not [node for node in graph.plan.graph.nodes if "_foreach" in str(node.target)]
    for parts in zip(*(one.parameters() for one in models), strict=True):
        assert compare(*(part.detach() for part in parts)).ok


logger = logging.getLogger(__name__)


@functools.lru_cache(None)
def warning_once(self: logging.Logger, text: str) -> None:
    self.warning(text)


@pytest.mark.parametrize(
    "tell",
    [
        lambda x: logger.warning_once("once"),
        lambda x: logger.info("%s", x.mean()),
        lambda x: logger.isEnabledFor(logging.DEBUG) and logger.debug("detail"),
        lambda x: logging.warning("to the root logger"),
        lambda x: warnings.warn("deprecated", stacklevel=2),
        lambda x: print(x.shape, f"{x.sum():.2f}"),
    ],
    ids=["a library's own", "info", "debug if enabled", "root", "warn", "print"],
)
def test_it_is_one_graph(
    tell: Callable[[Tensor], object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.Logger, "warning_once", warning_once, raising=False)
    logged: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.Logger, "callHandlers", lambda _, record: logged.append(record))

    def told(x: Tensor) -> Tensor:
        y = x.exp()
        tell(y)
        return y + 1

    captured = capture(Case("told", lambda: told, InputSpec.parse_many("fp32[N=4]"), training=False))
    targets = [str(node.target) for node in captured.graphs["forward"].nodes if node.op == "call_function"]
    assert (targets[0], targets[-1]) == ("aten.exp.default", "aten.add.Tensor")
    assert capsys.readouterr() == ("", "")
    # Nor does Dynamo, which cannot write down what is ignored (torch 2.11).
    assert [record.name for record in logged if record.levelno >= logging.ERROR] == []


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() > 1 else x


def expanded(x: torch.Tensor) -> torch.Tensor:
    return x[:1].expand(x.shape) if x.dim() > 1 else x


def only(place: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Of the operands with dimensions that at `place` is channels last, the others are contiguous."""
    seen = iter(range(99))
    return lambda x: channels_last(x) if x.dim() > 1 and next(seen) == place else x.contiguous()


LAYOUTS: dict[str, Callable[[], Callable[[torch.Tensor], torch.Tensor]]] = {
    "channels last": lambda: channels_last,
    "expanded": lambda: expanded,
    "the first alone": lambda: only(0),
    "the second alone": lambda: only(1),
}
EXPANDED_RESULTS = {("_weight_norm_interface.default", "expanded")}
"""Eager's norms lie on top of each other like those given."""


def strides(results: Any) -> list[tuple[int, ...]]:
    """Strides of tensors along dimensions of more than one element."""
    tensors = [x for x in tree_leaves(results) if isinstance(x, torch.Tensor) and x.numel()]
    return [tuple(s for n, s in zip(x.shape, x.stride(), strict=True) if n > 1) for x in tensors]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_traced_strides_of_all_rows_are_eagers(layout: str) -> None:
    mode, wrong, compared = FakeTensorMode(allow_non_fake_inputs=True), [], 0
    for name, makers in CALLS.items():
        target = operator.attrgetter(name)(torch.ops.aten)
        lay = LAYOUTS[layout]()
        args, kwargs = tree_map(
            lambda x, lay=lay: lay(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x,
            makers[0](operands("matrix", torch.float32)),
        )
        try:
            eager = strides(target(*args, **kwargs))
        except (RuntimeError, NotImplementedError):
            continue
        with mode:
            fakes = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
            traced = decompositions().get(target, target)(*fakes[0], **fakes[1])
            traced = target(*fakes[0], **fakes[1]) if traced is NotImplemented else traced
        compared += 1
        if strides(traced) != eager and (name, layout) not in EXPANDED_RESULTS:
            wrong.append((name, strides(traced), eager))
    assert wrong == []
    assert compared > 200


def _layers(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Sequence[torch.Tensor]:
    return (
        x.roll(1, 2),
        x.roll((1, 2), (1, 3)),
        x.roll(3),
        x.roll(1, 2).as_strided((50,), (1,)),
        *(F.batch_norm(t, None, None, training=True) for t in (x, y, z)),
        *(torch.ops.aten._batch_norm_with_update(t, *torch.rand(4, 3), 0.1, 1e-5)[0] for t in (x, y)),
        *(F.rrelu(t, training=True) for t in (x, y, z)),
        *(F.logsigmoid(t) for t in (y, z)),
        2**y,
        *(F.interpolate(z, scale_factor=1.3, mode=mode) for mode in ("nearest", "nearest-exact", "linear")),
        torch.complex(y, y).angle(),
        *(F.channel_shuffle(t[:, :2], 2) for t in (x, x.contiguous())),
        *(torch.normal(mean, std) for mean, std in ((y, 2.0), (y, y.abs()), (0.0, y.abs()))),
        F.max_unpool2d(x[..., :2], torch.arange(x[..., :2].numel()).view(x[..., :2].shape) % 8, 2),
    )


def test_strides_of_compiled_results_are_eagers() -> None:
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    y, z = torch.randn(4, 5, 2, 3).permute(2, 3, 0, 1), torch.randn(5, 3, 2).permute(2, 1, 0)
    call, _ = recorded(_layers)
    torch.manual_seed(0)
    ours = call(x, y, z)
    torch.manual_seed(0)
    torch.testing.assert_close(ours, _layers(x, y, z), check_stride=True)


WRITES: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "masked_fill": lambda y, mask, _: y.masked_fill_(mask, 0.0),
    "masked_scatter": lambda y, mask, other: y.masked_scatter_(mask, other),
    "mask": lambda y, mask, _: y.__setitem__(mask, 3.0),
    "rows": lambda y, _, other: y.__setitem__(torch.tensor([0, 2]), other[:2]),
    "copy": lambda y, _, other: y.copy_(other[0]),
    "scatter": lambda y, _, other: y.scatter_(0, torch.zeros(y.shape, dtype=torch.long), other),
    "fill": lambda y, *_: y.fill_(2.0),
    "lerp": lambda y, _, other: y.lerp_(other, 0.5),
    "cumsum": lambda y, *_: y.cumsum_(0),
    "a view": lambda y, mask, _: y.mT.masked_fill_(mask.mT, 0.0),
    "a part": lambda y, mask, _: y[1:].masked_fill_(mask[1:], 0.0),
    "a draw": lambda y, *_: y.bernoulli_(0.5),
    "a mask over it": lambda y, mask, _: y.contiguous().masked_fill_(mask.mT.contiguous().mT, 0.0),
}


def _written(x: Tensor, mask: Tensor, other: Tensor) -> list[Tensor]:
    found = []
    for write in WRITES.values():
        y = x.clone()
        write(y, mask, other)
        found += [y, F.dropout(y + 1)]
    return [*found, F.alpha_dropout(x, 0.5), x.masked_fill_(mask, 0.0), F.dropout(x)]


@pytest.mark.parametrize("lies", [(0, 2, 1), (1, 2, 0)], ids=str)
def test_a_tensor_that_is_written_in_place_keeps_its_strides(lies: tuple[int, ...]) -> None:
    x, other = (torch.rand(4, 4, 4).permute(lies) for _ in range(2))
    mask = torch.rand(4, 4, 4) > 0.5
    call, _ = recorded(_written)
    found = []
    for function in (call, _written):
        torch.manual_seed(0)
        written = x.clone()
        found.append([*function(written, mask, other), written])
    torch.testing.assert_close(*found, check_stride=True)


def test_gradients_of_conjugated_and_negated_results() -> None:
    x = torch.randn(3, 2, dtype=torch.float32, requires_grad=True)

    def views(x: Tensor) -> list[Tensor]:
        z = torch.view_as_complex(x * 2)
        return [z.conj(), z[None].mH, z.conj().imag, z.conj() * 2, torch.view_as_real(z.conj().resolve_conj())]

    call, record = recorded(views)
    for given in (torch.clone, torch.conj):
        gradients = []
        for function in (call, views):
            results = function(x)
            incoming = [given(torch.ones_like(y.resolve_conj()) * (1 + 2j if y.is_complex() else 1)) for y in results]
            gradients += torch.autograd.grad(results, x, incoming)
        torch.testing.assert_close(*gradients)
    assert record.fallbacks == []


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4)])
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, *states: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale * mask + states[0][1] + states[0][0]


@pytest.mark.parametrize("training", [False, True])
def test_inputs_have_the_names_that_the_model_gives_them(training: bool) -> None:
    x = InputSpec.parse("f32[3,4]")
    case = Case("net", lambda: Net().train(training), [x, (x, x)], training=training, keywords={"mask": x})
    graphs = capture(case).graphs
    named = {node.name for graph in graphs.values() for node in graph.find_nodes(op="placeholder")}
    parameters = {"layers_0_weight", "layers_0_bias", "layers_1_weight", "layers_1_bias", "scale"}
    assert named >= parameters | {"x", "states_0_0", "states_0_1", "mask", "layers_1_running_mean"}
    assert not [name for name in named if name.startswith(("primals", "arg"))]


def test_an_input_named_as_a_gradient_is_no_gradient() -> None:
    keeps_contract(lambda tangents_1, add: (tangents_1 + add) * add, [torch.randn(3), torch.randn(3)])


@pytest.mark.parametrize("does", ["dropout draws masks", "batch norms use the batch's own mean and variance", ""])
def test_a_model_in_training_mode_is_said_to_be_so(
    does: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(errors, "_warned", set())
    layer = {"d": nn.Dropout(0.1), "b": nn.BatchNorm1d(4), "": nn.Linear(4, 4)}[does[:1]]
    capture(Case("net", lambda: nn.Sequential(layer), InputSpec.parse_many("f32[3,4]"), training=False))
    told = f"tilewright: net is in training mode: {does}; for inference call its eval()\n"
    assert capfd.readouterr().err == (told if does else "")
