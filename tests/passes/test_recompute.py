"""Values saved for backward: enough, no more than PyTorch's own partitioner saves, and never N².

And values that several kernels read: computed in each where that moves fewer bytes, else written once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from examples import mlp, transformer_block
from tests.contract import keeps_contract
from tests.passes.graphs import aten, is_view, planned
from tests.tables import cases
from tilewright.capture.partition import cut
from tilewright.compile.stages import JOINT, TORCH_LEVEL
from tilewright.hardware.target import target_named
from tilewright.kernels.dropout_add.stream import keep_mask
from tilewright.passes.fusion import fuse
from tilewright.passes.recompute import values_to_save
from tilewright.passes.rematerialise import compute_in_each_reader
from tilewright.passes.simplify import is_pure

TABLE = Path(__file__).with_name("recompute.txt")
Model = Callable[..., Any]


@dataclass
class Partition:
    """One way of cutting a joint graph."""

    forward: fx.GraphModule
    backward: fx.GraphModule
    kept: list[fx.Node]
    """The storages that backward gets from forward, without parameters and inputs."""

    @property
    def nbytes(self) -> int:
        return sum(node.meta["val"].untyped_storage().nbytes() for node in self.kept)


def kept(forward: fx.GraphModule, num_fwd_outputs: int) -> list[fx.Node]:
    results = forward.graph.output_node().args[0]
    assert isinstance(results, (list, tuple))
    saved = [node for node in results[num_fwd_outputs:] if isinstance(node.meta.get("val"), Tensor)]
    return [node for node in dict.fromkeys(map(origin, saved)) if node.op != "placeholder"]


def origin(node: fx.Node) -> fx.Node:
    """The tensor behind views; a `getitem` is no view."""
    while is_view(node) and "getitem" not in str(node.target):
        node = node.all_input_nodes[0]
    return node


def partitions(model: Model, *inputs: Tensor, min_cut: bool = True) -> dict[str, Partition]:
    """The same program cut by tilewright and (the joint graph as eager has it) by PyTorch."""
    found: dict[str, Partition] = {}

    def split(joint: fx.GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        if min_cut:
            theirs = fx.GraphModule(joint, fx.Graph())
            theirs.graph.output(theirs.graph.graph_copy(joint.graph, {}))
            theirs.recompile()
            forward, backward = min_cut_rematerialization_partition(
                theirs, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options
            )
            found["torch"] = Partition(forward, backward, kept(forward, num_fwd_outputs))
        JOINT.run(joint.graph, target_named("cpu"))
        forward, backward = cut(joint, num_fwd_outputs, values_to_save)
        found["ours"] = Partition(forward, backward, kept(forward, num_fwd_outputs))
        return forward, backward

    def interpret(module: fx.GraphModule, _: Any) -> Any:
        def call(args: list[Any]) -> Any:
            return module(*args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    def backend(module: fx.GraphModule, examples: Sequence[Tensor]) -> Any:
        TORCH_LEVEL.run(module.graph, target_named("cpu"))
        module.recompile()
        return aot_autograd(fw_compiler=interpret, bw_compiler=interpret, partition_fn=split)(module, examples)

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    assert_same_step(model, compiled, inputs)
    return found


def assert_same_step(model: Model, compiled: Model, inputs: Sequence[Tensor]) -> None:
    """Results and gradients of the cut program against eager's, from one generator state."""
    outcomes = []
    for function in (model, compiled):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        parameters = list(model.parameters()) if isinstance(model, nn.Module) else []
        torch.manual_seed(0)
        result = function(*leaves)
        tangent = torch.linspace(-1, 1, result.numel()).reshape(result.shape)
        outcomes.append((result.detach(), *torch.autograd.grad(result, [*leaves, *parameters], tangent)))
    torch.testing.assert_close(outcomes[1], outcomes[0], rtol=2e-4, atol=2e-5)


def calls(module: fx.GraphModule) -> list[str]:
    return [str(n.target).removeprefix("aten.") for n in module.graph.nodes if n.op == "call_function"]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_block_keeps_no_more_than_pytorch_would(dropout: float) -> None:
    B, S, D, H = 2, 24, 16, 2
    model = transformer_block.case(D=D, H=H, B=B, S=S, dropout=dropout).build()
    found = partitions(model, draw(B, S, D))
    ours, theirs = found["ours"], found["torch"]
    assert ours.nbytes <= theirs.nbytes
    # B·H·S² is no multiple of anything else that is kept.
    assert all(S * S not in (n.meta["val"].numel(), n.meta["val"].numel() // (B * H)) for n in ours.kept)
    assert not any(n.meta["val"].shape[-2:] == (S, S) for n in ours.kept)


SMALL, KEPT, AGAIN = (cases(TABLE, section, texts=["kept"]) for section in ("small", "kept", "computed again"))


def partitioned(row: dict[str, Any], min_cut: bool) -> dict[str, Partition]:
    return partitions(row["program"], *(draw(*shape) for shape in row["shapes"]), min_cut=min_cut)


@pytest.mark.parametrize("name", SMALL)
def test_small_programs_keep_no_more_than_pytorch_would(name: str) -> None:
    found = partitioned(SMALL[name], min_cut=True)
    assert found["ours"].nbytes <= found["torch"].nbytes


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept(name: str) -> None:
    kept = partitioned(KEPT[name], min_cut=False)["ours"].kept
    found = [f"{str(n.target).split('.')[1]} {str(n.meta['val'].dtype).removeprefix('torch.')}" for n in kept]
    assert ", ".join(found) == KEPT[name]["kept"]


def test_mlp_keeps_one_tensor_a_layer() -> None:
    B, D, L = 4, 8, 3
    ours = partitions(mlp.case(dimension=D, layers=L, batch=B).build(), draw(B, D))["ours"]
    # What goes into each gelu; its result, which the next product needs, is computed again.
    assert [str(n.target) for n in ours.kept] == ["aten.add.Tensor"] * L
    assert ours.nbytes == 4 * L * B * D


@pytest.mark.parametrize("zeros", [1, 8])
def test_operands_of_convolutions_with_much_padding_are_padded_again(zeros: int) -> None:
    def program(x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return F.conv1d(F.pad(F.conv1d(x, v).relu(), (0, zeros)), w).sum()

    ours = partitions(program, draw(2, 4, 16), draw(4, 4, 1), draw(4, 4, 3), min_cut=False)["ours"]
    kept_targets = [str(n.target) for n in ours.kept]
    assert "aten.relu.default" in kept_targets
    assert ("aten.constant_pad_nd.default" in kept_targets) == (zeros == 1)


@pytest.mark.parametrize("dropout", [0.1, 0.5])
def test_draws_are_made_once_and_in_forward(dropout: float) -> None:
    model = transformer_block.case(D=8, H=2, B=2, S=6, dropout=dropout).build()
    ours = partitions(model, draw(2, 6, 8), min_cut=False)["ours"]
    draws = [n for m in (ours.forward, ours.backward) for n in m.graph.nodes if n.target is keep_mask]
    assert len(draws) == 2 and all(n.graph is ours.forward.graph for n in draws)
    impure = [n for n in ours.backward.graph.nodes if n.op == "call_function" and not is_pure(n)]
    assert impure == []
    assert sum(n.meta["val"].dtype == torch.bool for n in ours.kept) == 2


def test_a_product_is_not_computed_again() -> None:
    ours = partitions(lambda x, w: torch.tanh(x @ w).exp(), draw(6, 8), draw(8, 4), min_cut=False)["ours"]
    assert calls(ours.forward).count("mm.default") == 1
    # Backward's two products are the gradients of x and w.
    assert calls(ours.backward).count("mm.default") == 2


def test_what_is_computed_from_an_overwritten_input_is_kept() -> None:
    def program(x: Tensor, state: Tensor) -> Tensor:
        y = x * state.sin()
        state.add_(1)
        return y

    keeps_contract(program, [draw(5, 7).requires_grad_(), draw(5, 7)])


def test_the_statistics_of_a_norm_are_kept_and_its_result_computed_again() -> None:
    kept = partitions(lambda x: F.layer_norm(x, (8,)).sin(), draw(9, 8), min_cut=False)["ours"].kept
    assert [node.meta["val"].shape for node in kept] == [(9, 1), (9, 1)]


class Layer(nn.Module):
    """A product with dropout and a residual, normed before or after; large enough not to be small."""

    def __init__(self, normed_first: bool) -> None:
        super().__init__()
        self.norm, self.product, self.normed_first = nn.LayerNorm(256), nn.Linear(256, 256), normed_first

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.product(self.norm(x) if self.normed_first else x), 0.1)
        return x + y if self.normed_first else self.norm(x + y)  # type: ignore[no-any-return]


@pytest.mark.parametrize("normed_first", [False, True])
def test_no_kernel_grows_with_the_number_of_layers(normed_first: bool) -> None:
    """A residual stream is saved, and not computed again from those of all layers before."""
    sizes = []
    for count in (2, 5):
        plan = planned(nn.Sequential(*(Layer(normed_first) for _ in range(count))), "fp32[1024,256]")
        sizes.append(max(len(unit.lowered.nest.steps) for graph in plan.graphs for unit in graph.fusion.regions))
    assert sizes[0] == sizes[1]


ROWS, COLUMNS = 1024, 320
CPU = target_named("cpu")


def inputs(count: int) -> list[Tensor]:
    return [torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(n)) for n in range(count)]


@pytest.mark.parametrize("name", AGAIN)
def test_values_are_computed_again_where_fewer_bytes_move(name: str) -> None:
    again, operands, program = AGAIN[name].values()
    graph = aten(program, *inputs(operands))
    before = [region.lowered for region in fuse(graph, "forward", CPU).regions]
    assert bool(compute_in_each_reader(graph, fuse(graph, "forward", CPU).regions, CPU.profile)) is again
    graph.lint()
    after = [region.lowered for region in fuse(graph, "forward", CPU).regions]
    assert len(before) == len(after) >= 1
    assert (moved(after) < moved(before)) is again


def moved(kernels: list[Any]) -> int:
    return sum(buffer.elements for kernel in kernels for buffer in kernel.nest.buffers)


def test_the_numbers_stay() -> None:
    (graph,) = keeps_contract(AGAIN["it reads g in place of the product"]["program"], inputs(2)).graphs
    large = ROWS * COLUMNS
    kernels = [region.lowered.nest for region in graph.plan.fusion.regions]
    assert [sum(buffer.elements == large for buffer in nest.outputs) for nest in kernels] == [0, 1]
