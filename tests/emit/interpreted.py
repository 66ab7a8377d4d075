"""The Triton emitter's kernels in Triton's interpreter, against eager and float64."""

import copy
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.contract import keeps_contract, launched, recorded
from tests.emit import stored_values
from tests.emit.triton_programs import (
    DRAWS,
    PROGRAMS,
    by_triton,
    check_program,
    graph_of,
    nests_of,
    operators,
    run_graph,
)
from tests.gpu.kernels.launching import in_turn
from tests.operators.pools import APART, OVERLAPPING, image, in_layouts, library_pools
from tests.operators.samples import CALLS, VIEWS
from tilewright.backend import backend, recording
from tilewright.emit.triton import emit_triton
from tilewright.hardware.target import target_named
from tilewright.launch import generated
from tilewright.launch.generated import TritonKernel
from tilewright.loops.lower import Lowered
from tilewright.loops.nest import Nest
from tilewright.measure.truth.contract import compare
from tilewright.passes.convolution.other_forms import generate_depthwise, split_bias
from tilewright.records import cache
from tilewright.records.errors import CompilerError, KernelError
from tilewright.records.measurement import Verified
from tilewright.runtime.executable import layout_of
from tilewright.runtime.gpu import TritonStep
from tilewright.schedule.choose import neighbours, schedule_of
from tilewright.schedule.schedule import Schedule
from tilewright.schedule.tiles import Limits

CPU = torch.device("cpu")
OTHER_VECTORS = ("vectors of two", "vectors of four", "halves of vectors of eight")
"""Draws between those of one and of eight numbers, ten seconds each here; a GPU runs them all."""
FUSED = {"addcmul.default specials torch.float32", "tanh_backward.default one torch.int64"}
"""Calls that depend on eager's fused multiply-add, which the interpreter rounds in between."""


def in_small_blocks(lowered: Lowered) -> Schedule:
    """Many programs and many blocks, so that every edge falls inside the tensors; of a long row four to eight."""
    rows, columns = lowered.nest.row_count, lowered.nest.col_count
    least = 256 if rows * columns < 100_000 else 4096
    return schedule_of(lowered.nest, Limits(3, max(least, 2 ** (columns.bit_length() - 3))))


DRAWS_HERE = [name for name in DRAWS if name.removeprefix("rows that draw, ") not in OTHER_VECTORS]


@pytest.mark.parametrize("name", [*PROGRAMS, *DRAWS_HERE])
def test_kernels_keep_the_numbers_contract(name: str) -> None:
    check_program(name, CPU, by_triton(in_small_blocks))


@pytest.mark.parametrize(("parts", "kernels"), [(1, 1), (3, 2)])
def test_a_scan_is_not_computed_over_several_times_its_elements(parts: int, kernels: int) -> None:
    """One part of a longer dimension has the scan in its kernel; of several, each would run over all of them."""
    nests = nests_of(lambda x: torch.cat([x[:, :5], *[x.cumsum(-1)] * parts], -1) * 2, torch.randn(7, 33))
    assert len(nests) == kernels


SCHEDULED = [
    *("flat", "transposed", "broadcast rows and columns", "scans", "softmax", "bf16 layer norm", "column sums"),
    *("column sums beside a row's result", "extremes and sums over a middle axis, unaligned", "long rows"),
]


@pytest.mark.parametrize("name", SCHEDULED)
def test_every_candidate_of_a_schedule_keeps_the_numbers_contract(name: str) -> None:
    """Warps apart, which the interpreter does not have; in blocks so small that all of them differ."""
    tried: set[str] = set()

    def untried(lowered: Lowered) -> Schedule:
        chosen = in_small_blocks(lowered)
        tile = max(256, 2 ** (lowered.nest.col_count.bit_length() - 3))
        found = {f"{lowered.nest.name} {one.sizes}": one for one in neighbours(lowered.nest, Limits(3, tile)).values()}
        text = next((text for text in found if text not in tried), "")
        tried.add(text)
        return found.get(text, chosen)

    while "" not in tried:
        check_program(name, CPU, by_triton(untried))
    assert len(tried) > 2


@pytest.mark.parametrize("source", stored_values.SOURCES, ids=str)
@pytest.mark.parametrize("dtype", stored_values.FLOAT8, ids=str)
def test_floats_of_8_bits_are_eagers(dtype: torch.dtype, source: torch.dtype) -> None:
    for function, x in stored_values.conversions(dtype, source):
        (lowered,) = nests_of(function, x)
        result = torch.empty_like(function(x))
        by_triton()(lowered, [x, result])
        assert stored_values.same(result, function(x))


@pytest.fixture(scope="module")
def checked() -> Mapping[str, list[tuple[str, Verified]]]:
    """Each operator with half of its operands, all with all: of one operator the others take the same path here."""
    return operators(CPU, every=2)


@pytest.mark.parametrize("name", [*CALLS, *VIEWS])
def test_operators_keep_the_numbers_contract(checked: Mapping[str, list[tuple[str, Verified]]], name: str) -> None:
    assert checked[name]
    assert [entry for entry in checked[name] if not entry[1].ok and entry[0] not in FUSED] == []


LOOKUPS = [
    *("embedding", "layer norm of an embedding", "places from the end", "biased by places", "one of a long row"),
    *("places beside zeros", "sums of rows at places"),
]


@pytest.fixture
def assertions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter leaves assertions out, whatever a kernel is compiled with."""
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(debug=True))


@pytest.mark.parametrize("name", LOOKUPS)
def test_an_index_outside_stops_a_kernel(name: str, assertions: None) -> None:
    """And none that lanes beyond the tensor compute, or that is not read."""
    check_program(name, CPU, by_triton(in_small_blocks))
    program = PROGRAMS[name]
    inputs = program.inputs(CPU)
    graph = graph_of(program.function, *inputs)
    if any(lowered.nest.checks for lowered in nests_of(program.function, *inputs)):
        inputs[-1].view(-1)[-1] = 10**6
        with pytest.raises(Exception, match="index out of bounds for a dimension of size"):
            run_graph(graph, inputs, CPU, by_triton(in_small_blocks))


def test_column_sums_are_the_same_at_every_run() -> None:
    (lowered,) = nests_of(lambda x: x.sum(0), torch.randn(1000, 33))
    x, results = torch.randn(1000, 33), [torch.empty(33), torch.empty(33)]
    for result in results:
        by_triton(lambda lowered: schedule_of(lowered.nest, Limits(8)))(lowered, [x, result])
    assert torch.equal(*results)


def test_a_step_writes_where_it_is_told() -> None:
    """Results into fresh storage in the asked layout, or over an operand that dies."""
    (lowered,) = nests_of(lambda x: (x * 2, x.exp()), torch.randn(7, 33))
    kernel = TritonKernel(lowered.nest, emit_triton(lowered.nest))
    spec = layout_of(torch.empty(7, 33))
    step = TritonStep("doubled", (0,), ((1, spec, 0), (2, spec, None)), kernel, CPU)
    x = torch.randn(7, 33)
    slots = [x.clone(), None, None]
    address = slots[0].data_ptr()
    step.run(slots)
    assert slots[1].data_ptr() == address
    assert torch.equal(slots[1], x * 2)
    assert torch.allclose(slots[2], x.exp(), rtol=1e-6)


def test_a_damaged_source_in_the_cache_is_written_again() -> None:
    (lowered,) = nests_of(lambda x: x * 2, torch.randn(7))
    source = emit_triton(lowered.nest, "kept in the cache")
    TritonKernel(lowered.nest, source)
    path = cache.entry(cache.key_of(source), ".py")
    path.write_text("raise SystemExit")
    generated._module.cache_clear()
    TritonKernel(lowered.nest, source)
    assert path.read_text() == source


def test_cpu_tensors_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    (lowered,) = nests_of(lambda x: x * 2, torch.randn(7))
    kernel = TritonKernel(lowered.nest, emit_triton(lowered.nest))
    monkeypatch.setattr(generated, "is_interpreted", lambda: False)
    with pytest.raises(CompilerError, match="TRITON_INTERPRET=1"):
        kernel.launch([torch.randn(7), torch.empty(7)])


def test_the_device_chooses_the_language(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWRIGHT_TARGET", raising=False)
    target = target_named("cpu")
    assert (target.language_of(CPU), target.language_of(torch.device("cuda"))) == ("c++", "triton")
    monkeypatch.setenv("TILEWRIGHT_TARGET", "triton")
    assert target.language_of(CPU) == "triton"


def test_a_kernel_that_does_not_compile_takes_its_own_operators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_some(self: TritonKernel, device: torch.device) -> None:
        if "softmax" in self.nest.name:
            raise KernelError(self.nest.name, "Triton failed: out of registers")

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((x.softmax(-1) * 2) @ w).exp() + 1

    monkeypatch.setattr(TritonKernel, "compile", compile_some)
    monkeypatch.setenv("TILEWRIGHT_TARGET", "triton")
    monkeypatch.setenv("TILEWRIGHT_STRICT", "0")
    x, w = torch.randn(33, 40), torch.randn(40, 40)
    with recording() as record:
        result = torch.compile(function, backend=backend)(x, w)
    torch.testing.assert_close(result, function(x, w))
    assert [fallback.why for fallback in record.fallbacks] == ["Triton failed: out of registers"]
    (graph,) = record.graphs
    assert len(graph.executable.kernels) == 1
    reasons = {decision.reason for decision in graph.plan.fusion.decisions if decision.verdict == "impossible"}
    assert "Triton failed: out of registers" in reasons


@pytest.mark.parametrize(("name", "layout"), in_layouts(APART, OVERLAPPING))
def test_pools_give_eagers_values_and_gradients(name: str, layout: str, in_triton: None) -> None:
    assert not library_pools(name, image(layout))


@pytest.mark.parametrize("dtype", stored_values.DTYPES, ids=str)
def test_a_conversion_reads_what_is_stored(dtype: torch.dtype, in_triton: None) -> None:
    assert stored_values.differing(dtype) == []


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.softmax(x, -1) * x.shape[1] ** -0.5,
        lambda x: F.gelu(x) + x[:, -1:],
        lambda x: x.mean((0, 1)) + torch.arange(x.shape[1])[:, None],
    ],
    ids=["rows", "elements", "column sums"],
)
def test_one_program_serves_all_sizes(
    function: Callable[[torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of several sizes are one where they print the same."""
    printed: list[str] = []

    def emitted(nest: Nest) -> str:
        printed.append(emit_triton(nest))
        return printed[-1]

    monkeypatch.setattr("tilewright.runtime.gpu.emit_triton", emitted)
    monkeypatch.setenv("TILEWRIGHT_TARGET", "triton")
    monkeypatch.setenv("TILEWRIGHT_VERIFY", "1")
    run = torch.compile(function, backend=backend, dynamic=True)
    with recording() as record, torch.no_grad():
        for shape in [(3, 21, 7), (5, 33, 7), (6, 48, 8), (2, 30, 40), (9, 31, 6)]:
            x = torch.randn(shape)
            torch.testing.assert_close(run(x), function(x))
    assert len(record.graphs) == 1
    assert len(set(printed)) < len(printed), len(set(printed))


def test_a_compiled_module_trains_through_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_TARGET", "triton")
    torch.manual_seed(0)
    layers = torch.nn.LayerNorm(33), torch.nn.Linear(33, 7), torch.nn.GELU(), torch.nn.Softmax(-1)
    model, x = torch.nn.Sequential(*layers), torch.randn(5, 33, requires_grad=True)
    with recording() as record:
        results = _value_and_gradients(torch.compile(model, backend=backend), model, x)
    kernels = [step for graph in record.graphs for step in graph.executable.kernels]
    assert len(kernels) >= 2
    assert all(isinstance(step, TritonStep) for step in kernels)
    truth = _value_and_gradients(wide := copy.deepcopy(model).double(), wide, x.detach().double().requires_grad_())
    for mine, eager, true in zip(results, _value_and_gradients(model, model, x), truth, strict=True):
        assert compare(mine, eager, true).ok


def _value_and_gradients(
    call: Callable[[torch.Tensor], torch.Tensor], model: torch.nn.Module, x: torch.Tensor
) -> list[torch.Tensor]:
    """The result, and the gradients of its squares: of the input, then of the parameters."""
    y = call(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]


DEPTHWISE = {
    "padded": (nn.Conv2d(6, 6, 3, padding=1, groups=6), (2, 6, 9, 11)),
    "strides": (nn.Conv2d(6, 6, (3, 5), (2, 1), (0, 2), groups=6, bias=False), (2, 6, 9, 11)),
    "dilated sequence": (nn.Conv1d(6, 6, 4, padding=3, dilation=2, groups=6), (2, 6, 17)),
    "volume": (nn.Conv3d(3, 3, 3, 2, 1, groups=3), (1, 3, 5, 6, 7)),
    "beside a norm": (nn.Sequential(nn.ReLU6(), nn.Conv2d(6, 6, 3, groups=6), nn.BatchNorm2d(6).eval()), (2, 6, 9, 11)),
}


@pytest.mark.parametrize(("name", "dtype"), in_turn(DEPTHWISE, [(torch.float32, torch.bfloat16)]), ids=str)
def test_depthwise_convolutions_are_generated(
    name: str, dtype: torch.dtype, in_triton: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEWRIGHT_SKIP", "channels_last")
    for one in (split_bias, generate_depthwise):
        monkeypatch.setattr(one, "on", lambda target: True)
    model, shape = DEPTHWISE[name]
    record = keeps_contract(copy.deepcopy(model).to(dtype), [torch.randn(shape).to(dtype)], training=False)
    assert launched(record) == ["kernel"]


@pytest.mark.parametrize(
    ("dtype", "dim"),
    [
        *((torch.float32, dim) for dim in range(3)),
        *((torch.bfloat16, 1), (torch.int32, 0), (torch.uint8, 2), (torch.int64, 1)),
    ],
    ids=str,
)
def test_places_of_extremes_are_eagers(dtype: torch.dtype, dim: int, in_triton: None) -> None:
    """The first of equal ones; zeros of both signs are equal, NaN is the extreme."""
    x = (torch.randn(7, 33, 5).abs() * 3).round()
    x[0, 4], x[1, 5], x[2, 6] = 0.0, -0.0, x[2, 7]
    if dtype.is_floating_point:
        x[3, 2], x[3, 9], x[4, 8, 1], x[5, 3] = -torch.inf, torch.inf, torch.nan, -torch.nan
    x = x.to(dtype)
    for call in (torch.max, torch.min, lambda x, dim: (x.argmax(dim), x.argmin(dim))):
        compiled, record = recorded(call)
        for mine, eager in zip(compiled(x, dim), call(x, dim), strict=True):
            torch.testing.assert_close(mine, eager, rtol=0, atol=0, equal_nan=True)
        assert set(launched(record)) == {"kernel"}
