"""Which operators become one kernel, and that every pair of neighbours says why it is or is not one."""

from collections import Counter
from collections.abc import Callable
from functools import reduce
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from examples import transformer_block
from tests.graph.captured import naive_softmax
from tests.passes.graphs import aten, is_view, neighbours, run
from tilewright.compile.capture import capture
from tilewright.compile.planner import Planner
from tilewright.hardware.target import target_named, target_of
from tilewright.passes import units
from tilewright.passes.dropout import split_dropout
from tilewright.passes.fusion import Fusion, fuse
from tilewright.passes.norm.split import split_norms
from tilewright.passes.rematerialise import Copied, compute_in_each_reader, copy_again
from tilewright.passes.simplify import drop_unread, simplify
from tilewright.records.program import Decision

X = torch.zeros(6, 10)


def fused(function: Callable[..., Any], *inputs: Tensor) -> tuple[fx.Graph, Fusion]:
    graph = aten(function, *inputs)
    simplify(graph, target_named("cpu"))
    split_dropout(graph, target_of(torch.device("cpu")))
    return graph, fuse(graph, "forward", target_named("cpu"))


def members(fusion: Fusion) -> list[list[str]]:
    return [[node.name for node in region.members] for region in fusion.regions]


def decision(fusion: Fusion, producer: str, consumer: str) -> Decision:
    (found,) = [d for d in fusion.decisions if (d.producer, d.consumer) == (producer, consumer)]
    return found


def assert_complete(graph: fx.Graph, fusion: Fusion) -> None:
    """One row for each pair, found by walking the graph; regions hold each operator at most once."""
    pairs = Counter((d.producer, d.consumer) for d in fusion.decisions)
    assert pairs == Counter(neighbours(graph))
    held = Counter(node for region in fusion.regions for node in region.members)
    assert set(held.values()) <= {1} and not any(is_view(node) for node in held)
    for row in fusion.decisions:
        together = any({row.producer, row.consumer} <= set(names) for names in members(fusion))
        assert (row.verdict == "taken") == together
        assert row.reason and " at 0x" not in row.reason
        assert (row.bytes_saved > 0) == together


def test_a_wider_dtype_stays_in_the_kernel_that_reads_it() -> None:
    """Two kernels, since exponentials would be computed again: bf16 is between them."""

    def program(x: Tensor) -> Tensor:
        wide = x.exp().float()
        return torch.ops.aten.upsample_bilinear2d_backward(wide, [4, 6], [1, 2, 2, 6], False)

    graph, fusion = fused(program, torch.zeros(1, 2, 4, 6, dtype=torch.bfloat16))
    assert members(fusion) == [["exp"], ["_to_copy", "upsample_bilinear2d_backward"]]
    assert_complete(graph, fusion)


def test_what_many_elements_of_a_gather_read_is_in_memory() -> None:
    def program(x: Tensor, places: Tensor) -> Tensor:
        return (x + 1)[:, places]

    for count, together in ((70, True), (80, False)):
        graph, fusion = fused(program, X, torch.zeros(count, dtype=torch.int64))
        assert members(fusion) == ([["add", "index"]] if together else [["add"], ["index"]])
        assert_complete(graph, fusion)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_dear_table_that_many_elements_read_is_computed_once(layers: int) -> None:
    """As buckets of relative positions are, by every pair of tokens, in every head and layer."""
    size = 256

    def program(*scores: Tensor) -> tuple[Tensor, ...]:
        distance = torch.arange(size)[:, None] - torch.arange(size)[None, :]
        buckets = (distance.abs() + 1).log().div(3).log1p().ceil()
        return tuple(torch.nn.functional.relu(each) + buckets for each in scores)

    graph = aten(program, *(torch.empty(128, size, size) for _ in range(layers)))
    simplify(graph, target_named("cpu"))
    target = target_named("h200")
    compute_in_each_reader(graph, fuse(graph, "forward", target).regions, target.profile)
    drop_unread(graph)
    fusion = fuse(graph, "forward", target)
    nests = [region.lowered.nest for region in fusion.regions]
    computed = [nest.row_count * nest.col_count for nest in nests for step in nest.steps if step.name == "log"]
    assert sum(computed) == size * size
    assert_complete(graph, fusion)


@pytest.mark.parametrize(
    ("function", "shape", "kernels"),
    [
        (lambda x: x / x.abs().amax(), (512, 4096), 2),
        (lambda x: x / x.sum((1, 2), keepdim=True), (8, 512, 256), 2),
        (lambda x: x / x.sum(1, keepdim=True), (128, 65536), 2),
        (lambda x: (x - x.mean()) / x.std(), (512, 4096), 4),
        (lambda x: torch.var_mean(x, 1, correction=0)[0], (3, 70000), 2),
        (lambda x: x / x.sum(), (64, 128), 1),
        (lambda x: x / x.sum(1, keepdim=True), (4096, 512), 1),
    ],
    ids=[
        "largest",
        "sums of rows",
        "a row for each processor",
        "standardised",
        "variances of rows",
        "small",
        "many rows",
    ],
)
def test_few_long_rows_are_shared_by_programs_of_two_kernels(
    function: Callable[[Tensor], Tensor], shape: tuple[int, ...], kernels: int
) -> None:
    """One kernel would have a program for each row: 4096 × 4096 divided by its largest, bf16, 560 µs predicted."""
    x, h200 = torch.randn(shape, generator=torch.Generator().manual_seed(2)), target_named("h200")
    graph = aten(function, x)
    split_norms(graph, h200)
    assert len(fuse(graph, "forward", h200).regions) == kernels
    torch.testing.assert_close(run(graph, x), function(x), rtol=1e-5, atol=1e-5)


def test_a_sum_over_few_rows_reads_contiguous_columns() -> None:
    graph = aten(lambda x: x.sum(1), torch.zeros(16, 20, 65536))
    (region,) = fuse(graph, "forward", target_named("h200")).regions
    assert not region.lowered.nest.transposes


@pytest.mark.parametrize(("shape", "kernels"), [((16, 64, 8192), 1), ((4, 64, 256), 2), ((16, 512, 8192), 2)])
def test_sums_over_a_middle_axis_are_beside_their_readers_in_tiles(shape: tuple[int, ...], kernels: int) -> None:
    """Many rows of few columns: a tile of a program has whole sectors of its rows, and is read once."""
    graph = aten(lambda x: x / x.square().mean(1, keepdim=True).sqrt(), torch.empty(shape))
    assert len(fuse(graph, "forward", target_named("h200")).regions) == kernels


def test_a_copied_chain_is_computed_before_all_that_read_it() -> None:
    """Its reader may read what is inside the chain before the chain's result is there."""

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        inside = x.exp()
        early = inside + 1
        return early, inside.tanh() * early

    graph = aten(program, torch.empty(4))
    names = [node.name for node in graph.nodes if node.op == "call_function"]
    assert names == ["exp", "add", "tanh", "mul"]
    copy_again(graph, [Copied(("exp", "tanh"), ("add", "mul"))])
    graph.lint()
    x = torch.rand(4)
    assert all(map(torch.equal, run(graph, x), program(x)))


def test_a_copied_chain_is_in_the_kernel_that_reads_it() -> None:
    """Not beside the sums that it reads, with which one kernel would write what the pooling reads."""

    def program(x: Tensor) -> Tensor:
        return F.max_pool2d(x - x.sum((2, 3), keepdim=True), 2)

    graph, target = aten(program, torch.empty(128, 64, 64, 64)), target_named("h200")
    compute_in_each_reader(graph, fuse(graph, "forward", target).regions, target.profile)
    drop_unread(graph)
    chosen = fuse(graph, "forward", target)
    written = [value.meta["val"].numel() for region in chosen.regions for value in region.lowered.outputs]
    assert sorted(written) == [128 * 64, 128 * 64 * 32 * 32]
    assert_complete(graph, chosen)


def test_naive_softmax_is_one_kernel() -> None:
    graph, fusion = fused(naive_softmax, X)
    assert members(fusion) == [["max_1", "sub", "exp", "sum_1", "div"]]
    assert_complete(graph, fusion)
    n, nm = 6 * 4, 6 * 10 * 4
    saved = {(d.producer, d.consumer): d.bytes_saved for d in fusion.decisions}
    # What was written and read of [N, M]; a second reader saves its own reading only.
    assert saved == {
        ("max_1", "sub"): (n + 6 * 8) + n,
        ("sub", "exp"): 2 * nm,
        ("exp", "sum_1"): 2 * nm,
        ("exp", "div"): nm,
        ("sum_1", "div"): 2 * n,
    }
    # 5NM + 2N read and 3NM + 2N written and N indices, less NM and NM; x itself is read twice by eager.
    assert sum(saved.values()) == (8 * nm + 4 * n + 6 * 8) - 2 * nm - nm


def test_gelu_dropout_residual_is_one_kernel_beside_the_draw() -> None:
    graph, fusion = fused(lambda x, r: torch.native_dropout(F.gelu(x), 0.1, True)[0] + r, X, X)
    (names,) = members(fusion)
    assert names[0] == "gelu" and names[-1] == "add" and len(names) == 3
    assert_complete(graph, fusion)
    refused = {(d.producer, d.consumer): d.reason for d in fusion.decisions if d.verdict != "taken"}
    assert refused == {
        (
            "keep_mask",
            names[1],
        ): "the mask is drawn by PyTorch's own kernel, whose random numbers no generated kernel has"
    }
    assert [d.bytes_saved for d in fusion.decisions if d.verdict == "taken"] == [2 * 6 * 10 * 4] * 2


def test_a_transposed_copy_alone_is_the_librarys_on_a_cpu() -> None:
    large = torch.zeros(96, 128)
    graph, fusion = fused(lambda x: x.t().contiguous(), large)
    assert fusion.regions == []
    assert_complete(graph, fusion)
    _, fusion = fused(lambda x: x.t().contiguous() + 1, large)
    assert len(fusion.regions) == 1
    (region,) = fuse(aten(lambda x: x.t().contiguous(), large), "forward", target_named("h200")).regions
    assert region.lowered.nest.transposes


LARGE = torch.zeros(256, 256)


def test_rows_of_square_tensors_meet_rows() -> None:
    (region,) = fused(lambda x: (x.t() * 2, x.sum(0)), LARGE.t())[1].regions
    nest = region.lowered.nest
    assert {step.access.strides for step in nest.steps if step.access} == {(256, 1)} and not nest.transposes


@pytest.mark.parametrize(
    "function",
    [lambda x: (x.t().contiguous() * 2, x.sum(1)), lambda x: (x.t() + x).sum(1), lambda x: (x.t() + x).sum(0)],
    ids=["beside a sum", "summed along rows", "summed along columns"],
)
def test_what_a_cpu_reads_in_tiles_is_summed_by_another_kernel(function: Callable[[Tensor], Any]) -> None:
    _, fusion = fused(function, LARGE)
    assert sorted(region.lowered.nest.transposes for region in fusion.regions) == [False, True]


@pytest.mark.parametrize(("image", "together"), [(8, True), (128, False)])
def test_long_rows_are_not_written_across_sectors(image: int, together: bool) -> None:
    """Beside the sums of a channel a GPU's program writes it channels last if it has its neighbours' values, too."""

    def program(x: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        y = x + shift
        return y.permute(0, 2, 3, 1).contiguous(), y / y.square().sum((2, 3), keepdim=True)

    graph = aten(program, torch.empty(16, 256, image, image), torch.empty(256, 1, 1))
    nests = [region.lowered.nest for region in fuse(graph, "forward", target_named("h200")).regions]
    sums = [nest for nest in nests if any(step.name == "reduce_cols" for step in nest.steps)]
    assert [nest.transposes for nest in sums] == [together]


def test_the_levels_of_a_scan_are_not_one_kernel_that_repeats_them() -> None:
    """Each level reads two parts of the one before: a kernel of all ten would load 1024 elements for each."""

    def scan(h: Tensor) -> Tensor:
        for level in range(10):
            h = torch.cat([h[: 2**level], h[2**level :] + h[: -(2**level)].sin()])
        return h

    graph = aten(scan, torch.zeros(1024, 65536))
    fusion = fuse(graph, "forward", target_named("h200"))
    loads = [sum(step.name == "load" for step in region.lowered.nest.steps) for region in fusion.regions]
    assert len(loads) > 1 and sum(loads) < 1024
    assert_complete(graph, fusion)


def test_a_library_call_is_no_part_of_a_region() -> None:
    graph, fusion = fused(lambda x, w: F.gelu(x @ w).sum(1), X, torch.zeros(10, 3))
    assert members(fusion) == [["gelu", "sum_1"]]
    assert_complete(graph, fusion)
    row = decision(fusion, "mm", "gelu")
    assert (row.verdict, row.reason) == (
        "impossible",
        "aten.mm.default is a library call, into which nothing can be fused",
    )


def test_no_kernel_waits_for_itself() -> None:
    # add needs exp and the product, the product needs exp: in one kernel, it would wait for itself.
    graph, fusion = fused(lambda x, w: (e := x.exp()) + e @ w, X, torch.zeros(10, 10))
    assert members(fusion) == [["exp"], ["add"]]
    assert_complete(graph, fusion)
    row = decision(fusion, "exp", "add")
    assert (row.verdict, row.reason) == (
        "impossible",
        "another kernel must run between them: it reads the first and its result goes into the second",
    )


def test_a_cycle_through_a_view_is_seen() -> None:
    graph, fusion = fused(lambda x, w: (e := x.exp().t()).t() + (e.t() @ w).sin(), X, torch.zeros(10, 10))
    assert_complete(graph, fusion)
    assert decision(fusion, "exp", "add").verdict == "impossible"
    assert decision(fusion, "sin", "add").verdict == "taken"


def gated(x: Tensor, w: Tensor, p: Tensor) -> Tensor:
    gate, up = (x @ w).masked_fill(p, 0.0).split(8, 1)
    result: Tensor = F.silu(gate) * up
    return result


SQUARE = torch.zeros(5, 5)


@pytest.mark.parametrize(
    ("function", "inputs", "names", "elements"),
    [
        # A tensor meets its transpose in one kernel, which reads it once; a value does not meet its own.
        (lambda x: x + x.t(), [SQUARE], [["add"]], {25}),
        (lambda x: (e := x.exp()) + e.t(), [SQUARE], [["exp"], ["add"]], {25}),
        (lambda x: (e := x.exp(), e.sum(0), e.sum(1)), [X], [["exp", "sum_1", "sum_2"]], {60}),
        (lambda x: (x.exp(), x.sin()), [X], [["exp", "sin"]], {60}),
        # What is read in halves is computed in the kernel that reads both.
        (
            gated,
            [torch.zeros(6, 4), torch.zeros(4, 16), torch.zeros(6, 1, dtype=torch.bool)],
            [["masked_fill", "silu", "mul"]],
            {96, 6},
        ),
    ],
)
def test_what_shares_a_kernel_and_what_it_reads(
    function: Callable[..., Any], inputs: list[Tensor], names: list[list[str]], elements: set[int]
) -> None:
    graph, fusion = fused(function, *inputs)
    assert members(fusion) == names
    assert_complete(graph, fusion)
    assert {buffer.elements for buffer in fusion.regions[0].lowered.nest.inputs} == elements


def test_normalising_over_two_axes_in_turn_is_impossible() -> None:
    graph, fusion = fused(lambda x: (y := x / x.sum(1, keepdim=True)) / y.sum(0, keepdim=True), X)
    assert_complete(graph, fusion)
    reasons = {d.reason for d in fusion.decisions if d.verdict == "impossible"}
    assert reasons and all("reductions" in reason and "different axes" in reason for reason in reasons), reasons


def test_a_kernel_does_not_stream_from_too_many_tensors() -> None:
    inputs = [torch.zeros(8) for _ in range(30)]
    graph, fusion = fused(lambda *xs: sum(x.exp() for x in xs), *inputs)
    assert_complete(graph, fusion)
    assert any(d.verdict == "refused" and "tensors at once" in d.reason for d in fusion.decisions)
    assert max(len(region.lowered.nest.buffers) for region in fusion.regions) <= 24


def test_work_grows_linearly_with_an_elementwise_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = Mock(wraps=units.is_view)
    monkeypatch.setattr(units, "is_view", looked_at)

    def work(layers: int) -> int:
        graph = aten(lambda x: reduce(lambda y, _: y.sin() + y, range(layers), x), torch.ones(2, 3))
        looked_at.reset_mock()
        assert len(fuse(graph, "forward", target_named("cpu")).regions) == 1
        return looked_at.call_count

    assert work(80) <= 5 * work(20)


def test_empty_and_complex_tensors_stay_with_pytorch() -> None:
    graph, fusion = fused(lambda x, z: (x.exp().sin(), (z * 2).abs()), torch.zeros(0, 4), torch.zeros(3) + 0j)
    assert fusion.regions == []
    assert_complete(graph, fusion)
    assert decision(fusion, "exp", "sin").reason == "a tensor is empty"
    assert decision(fusion, "mul", "abs_1").reason == "complex64 is a dtype for which no kernel is generated"


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_block_fuses_what_a_person_would(dropout: float) -> None:
    graphs = capture(transformer_block.case(D=32, H=4, B=2, S=16, dropout=dropout), Planner(target_named("cpu"))).graphs
    together: dict[str, list[set[str]]] = {}
    for name, graph in graphs.items():
        fusion, again = (fuse(graph, name, target_named("cpu")) for _ in range(2))
        assert_complete(graph, fusion)
        assert fusion.decisions == again.decisions
        together[name] = [
            {str(n.target).split(".")[1] for n in r.members if "." in str(n.target)} for r in fusion.regions
        ]
    # The residual and the norm behind it; the tail of the feed-forward layer.
    assert any({"add", "native_layer_norm"} <= names for names in together["forward"])
    if dropout:
        assert sum({"native_dropout_backward", "add"} <= names for names in together["forward"]) == 2
    # A bias' gradient is summed where the gradient of its product is made.
    assert any({"gelu_backward", "sum"} <= names for names in together["backward"])
    assert any({"native_layer_norm_backward", "add"} <= names for names in together["backward"])
