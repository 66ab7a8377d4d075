"""Calls of `scaled_dot_product_attention` as for a GPU: masks, names, and that none becomes products and a softmax."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule, Node
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests.backend.compiling import compiled
from tests.passes.attention.test_recognise import check_numbers, value_and_gradients
from tests.tables import cases
from tilewright.backend import recording
from tilewright.compile.capture import capture
from tilewright.compile.launches import works
from tilewright.compile.planner import Planner
from tilewright.hardware.target import Target, target_named
from tilewright.measure.truth.contract import compare
from tilewright.passes.attention.acceptable import EFFICIENT, _CalledAttention
from tilewright.passes.attention.library import CUDNN, ON_CPU
from tilewright.passes.attention.sdpa import mark_pinned, prepare_calls
from tilewright.records.case import Case, InputSpec
from tilewright.records.program import Decision

B, H, S, K, D = 2, 4, 6, 9, 16
UNFUSED = ("bmm", "_softmax", "_safe_softmax", "matmul", "baddbmm")
Function = Callable[..., Tensor]
sdpa = F.scaled_dot_product_attention


BY_NAME = (EFFICIENT, CUDNN.forward)
TARGET = target_named("h200")
LOW = torch.finfo(torch.float32).min


def written_out(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *options: Any, scale: float | None
) -> tuple[Tensor]:
    """The result of PyTorch's kernels of `BY_NAME`, which no CPU has."""
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale) + (0.0 if bias is None else bias)
    return (scores.softmax(-1) @ v,)


class Settled:
    """A function whose calls were rewritten; `run` computes the rewritten graph."""

    def __init__(self, function: Function, *inputs: Tensor, target: Target = TARGET) -> None:
        found: list[GraphModule] = []

        def backend(gm: GraphModule, _: list[Tensor]) -> Callable[..., object]:
            mark_pinned(gm.graph, target)
            self.decisions: list[Decision] = prepare_calls(gm.graph, target)
            gm.graph.lint()
            gm.recompile()
            found.append(gm)
            return self.runnable(gm)

        self.run = torch.compile(function, backend=backend, fullgraph=True)
        self.run(*inputs)
        self.graph = found[0].graph

    @staticmethod
    def runnable(gm: GraphModule) -> Callable[..., object]:
        copied = GraphModule(gm, gm.graph.__class__(), "copied")
        copied.graph.output(copied.graph.graph_copy(gm.graph, {}))
        for node in copied.graph.nodes:
            if node.target in BY_NAME:
                node.target = written_out
        copied.recompile()
        return copied

    @property
    def call(self) -> Node:
        (node,) = (n for n in self.graph.nodes if n.target in (sdpa, *BY_NAME))
        return node

    @property
    def reason(self) -> str:
        (decision,) = self.decisions
        return decision.reason


def traced(function: Function, *inputs: Tensor) -> list[str]:
    """The operators of forward and backward after AOTAutograd."""
    names: list[str] = []

    def keep(gm: GraphModule, _: list[Tensor]) -> Callable[..., object]:
        names.extend(str(n.target).split(".")[1] for n in gm.graph.nodes if str(n.target).startswith("aten."))
        return gm.forward

    inner = aot_autograd(fw_compiler=keep)

    def backend(gm: GraphModule, examples: Sequence[Tensor]) -> Callable[..., object]:
        prepare_calls(gm.graph, TARGET)
        gm.recompile()
        compiled: Callable[..., object] = inner(gm, examples)
        return compiled

    torch._dynamo.reset()
    try:
        torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    except NotImplementedError as error:
        assert any(str(kernel).split(".")[1] in str(error) for kernel in BY_NAME)  # no CPU computes it
    return names


def check_fused(function: Function, settled: Function, inputs: Sequence[Tensor]) -> None:
    """The rewritten function keeps the numbers contract, gradients too."""
    exact, eager = value_and_gradients(function, inputs, torch.float64), value_and_gradients(function, inputs)
    check_numbers(value_and_gradients(settled, inputs), eager, exact)


def heads(*extra: int, grad: bool = True, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((B, H, S, D), (B, H, K, D), (B, H, K, D))
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


def square(**options: Any) -> list[Tensor]:
    q, k, v = heads(**options)
    return [q, k[:, :, :S].detach().requires_grad_(k.requires_grad), v[:, :, :S].detach().requires_grad_(True)]


def columns(size: int = K) -> Tensor:
    return torch.arange(size)[None, None, None, :]


def rows() -> Tensor:
    return torch.arange(S)[None, None, :, None]


def padding() -> Tensor:
    return torch.tensor([[1] * 5 + [0] * 4, [1] * 9]).bool()


def repeat(x: Tensor, times: int = 2) -> Tensor:
    batch, count, length, width = x.shape
    return x[:, :, None].expand(batch, count, times, length, width).reshape(batch, count * times, length, width)


IS_CAUSAL = "its mask is causal: the kernel needs no mask tensor"


def biased(*shape: int, grad: bool = True) -> Callable[[], list[Tensor]]:
    return lambda: [*heads(), torch.randn(*shape, requires_grad=grad)]


def of_one_head() -> list[Tensor]:
    return [*(x.detach()[:, 0].requires_grad_() for x in heads()), torch.randn(B, S, K) > 0]


def pinned(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(q, k, v, mask)


def packed(q: Tensor) -> Tensor:
    """Hugging Face's causal mask, for positions of which none begins a second sequence."""
    places = torch.arange(q.shape[2]) + 0
    positions = places.unsqueeze(0).expand(B, -1)
    begins = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
    sequence, batch = begins.cumsum(-1), torch.arange(B)[:, None, None, None]
    i, j = places[None, None, :, None], places[None, None, None, :]
    same = sequence[batch, i] == sequence[batch, j]
    seen = i.new_ones((), dtype=torch.bool) & (j <= i).to("cpu") & same
    return seen.expand(B, -1, q.shape[2], q.shape[2])


def places_of(q: Tensor) -> Tensor:
    return torch.arange(q.shape[2])


NAMED = globals()
LESS, STAY, FUSED, VARYING, ANY_LENGTH = (
    cases(Path(__file__).with_name("sdpa.txt"), section, NAMED, texts=["reason", "device"])
    for section in ("less", "stays", "fused", "varying", "any length")
)
IS_CAUSAL = "its mask is causal: the kernel needs no mask tensor"


@pytest.mark.parametrize("name", LESS)
def test_a_mask_is_what_it_amounts_to(name: str) -> None:
    make, shape, reason, function = LESS[name].values()
    inputs = [*make(), padding()]
    settled = Settled(function, *inputs)
    mask = settled.call.kwargs["attn_mask"]
    assert (mask.meta["example_value"].shape if isinstance(mask, Node) else mask) == shape
    assert settled.call.kwargs["is_causal"] == (reason == IS_CAUSAL) and reason in settled.reason
    check_fused(function, settled.run, inputs)


def test_a_mask_made_outside_of_an_activation_checkpoint_is_known_inside() -> None:
    def layer(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return sdpa(q, k, v, mask)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = (columns(S) <= rows()).expand(B, 1, S, S)
        for _ in range(2):
            q = checkpoint(layer, q, k, v, mask, use_reentrant=False)
        return q

    reasons: list[str] = []

    def backend(gm: GraphModule, _: list[Tensor]) -> Callable[..., object]:
        reasons.extend(decision.reason for decision in prepare_calls(gm.graph, TARGET))
        gm.recompile()
        return gm.forward

    settled = torch.compile(function, backend=backend, fullgraph=True)
    check_fused(function, settled, square())
    assert reasons == ["its mask is causal: the kernel needs no mask tensor"] * 2


@pytest.mark.parametrize("name", STAY)
def test_a_call_stays_as_it_is(name: str) -> None:
    make, device, function = STAY[name].values()
    assert Settled(function, *make(), target=target_named(device)).decisions == []


@pytest.mark.parametrize(("way", "masked"), [(repeat, True), (lambda x: x.repeat_interleave(2, 1), False)])
def test_heads_that_share_keys_are_not_repeated(way: Callable[[Tensor], Tensor], masked: bool) -> None:
    def llama(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        mask = seen[:, None, None, :] if masked else None
        return sdpa(q, way(k), way(v), mask)

    q, k, v = heads()
    inputs = [q, k[:, :2].detach().requires_grad_(), v[:, :2].detach().requires_grad_(), padding()]
    settled = Settled(llama, *inputs)
    assert settled.call.kwargs["enable_gqa"] and settled.call.args[1].meta["example_value"].shape == (B, 2, K, D)
    check_fused(llama, settled.run, inputs)


def t5(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """A bias whose heads are its last axis in memory, under a mask that hides nothing."""
    bias = table.permute(2, 0, 1)[None]
    bias = torch.where((rows() >= 0).expand(B, 1, S, K), bias, torch.finfo(bias.dtype).min)
    return sdpa(q, k, v, bias, scale=1.0)


@pytest.mark.parametrize("trained", [False, True])
def test_a_bias_over_heads_is_fused_with_its_gradient(trained: bool) -> None:
    inputs = [*heads(), torch.randn(S, K, H, requires_grad=trained)]
    settled = Settled(t5, *inputs)
    assert settled.call.target is (EFFICIENT if trained else sdpa)
    assert "a mask of 216 elements in place of 432" in settled.reason
    assert ("for the gradient of the mask" in settled.reason) == trained
    check_fused(t5, settled.run, inputs)


@pytest.mark.parametrize("name", FUSED)
def test_what_pytorch_leaves_to_products_is_fused(name: str) -> None:
    make, reason, function = FUSED[name].values()
    settled = Settled(function, *make())
    assert reason in settled.reason and "fused in place of products and a softmax" in settled.reason
    check_fused(function, settled.run, make())
    names = traced(function, *make())
    assert any(name.startswith("_scaled_dot_product_") for name in names)
    assert not set(UNFUSED) & set(names)


def test_the_mask_of_the_memory_efficient_kernel_has_aligned_rows() -> None:
    inputs = [*heads(), torch.randn(1, 1, S, K, requires_grad=True)]
    call = Settled(sdpa, *inputs).call
    bias = call.args[3].meta["example_value"]
    assert bias.shape == (B, H, S, K) and bias.stride() == (0, 0, 16, 1)
    assert call.args[4] is True


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_number_for_all_keys_is_written_for_each(dtype: torch.dtype) -> None:
    """Expanded by PyTorch, its memory-efficient kernel would raise."""
    inputs = [*heads(), (torch.randn(B, 1, S, 1) + 2).to(dtype)]
    settled = Settled(sdpa, *inputs)
    mask = settled.call.kwargs["attn_mask"].meta["example_value"]
    assert mask.shape == (B, 1, S, K) and mask.is_contiguous()
    assert "the mask copied by rows" in settled.reason
    check_fused(sdpa, settled.run, inputs)


@pytest.mark.parametrize("trained", [False, True])
def test_a_mask_that_alone_needs_a_gradient_keeps_the_log_sum_exp(
    trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where PyTorch would take its memory-efficient kernel, as on a GPU, which no choice on a CPU does."""

    class Efficient(_CalledAttention):
        def __init__(self) -> None:
            super().__init__()
            self.name = "_scaled_dot_product_efficient_attention"

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return sdpa(q, k, v, bias)

    monkeypatch.setattr("tilewright.passes.attention.acceptable._CalledAttention", Efficient)
    inputs = [*heads(grad=trained), torch.randn(1, H, S, K, requires_grad=True)]
    settled = Settled(function, *inputs)
    if trained:
        assert settled.decisions == []
    else:
        assert settled.call.target is EFFICIENT and settled.call.args[4] is True
        check_fused(function, settled.run, inputs)


@pytest.mark.parametrize(("late", "spaced"), [(False, False), (True, False), (True, True)])
def test_rows_of_operands_begin_at_multiples_of_16_bytes(late: bool, spaced: bool) -> None:
    """Products and a softmax take any rows, which the fused kernels do not."""
    q, k, v = heads()
    if spaced:
        q = torch.randn(*q.shape[:-1], D + 1)[..., :D].requires_grad_()
    if late:
        k = torch.randn(k.numel() + 1)[1:].view(k.shape).requires_grad_()
    inputs = [q, k, v, torch.randn(1, H, S, K, requires_grad=True)]
    settled = Settled(sdpa, *inputs)
    assert len([node for node in settled.graph.nodes if node.target == "clone"]) == late + spaced
    for value in (node.meta["example_value"] for node in settled.call.args[:3]):
        assert not any(x % 4 for x in (value.storage_offset(), *value.stride()[:-1]))
    assert ("operands copied by rows" in settled.reason) == (late or spaced)
    check_fused(sdpa, settled.run, inputs)


@pytest.mark.parametrize("begin", [0, 3])
def test_a_bias_begins_at_a_multiple_of_16_bytes_and_is_copied_once(begin: int) -> None:
    """Rows of K are padded, which is a copy; rows of S + 10 are not."""

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return sdpa(q, k, v, bias)

    q, k, v = (x.detach() for x in square())
    k, v = (torch.cat([x, x, x[:, :, :4]], 2) for x in (k, v))
    bias = torch.randn(begin + H * S * 16)[begin:].view(1, H, S, 16).requires_grad_()
    graph = Settled(function, q, k, v, bias).graph
    assert len([node for node in graph.nodes if node.target == "clone"]) == (begin > 0)
    odd = Settled(function, *heads(), torch.randn(1, H, S, K, requires_grad=True)).graph
    assert not [node for node in odd.nodes if node.target in ("clone", "contiguous")]


def test_a_wide_mask_is_narrowed_to_the_operands() -> None:
    inputs = [*heads(dtype=torch.bfloat16), torch.randn(1, 1, S, K)]
    settled = Settled(sdpa, *inputs)
    assert settled.call.kwargs["attn_mask"].meta["example_value"].dtype == torch.bfloat16
    assert settled.reason == "the mask in bfloat16"


@pytest.mark.parametrize("name", VARYING)
def test_a_batch_that_varies_is_compiled_once(name: str) -> None:
    reason, function = VARYING[name].values()
    reasons: list[str] = []

    def backend(gm: GraphModule, _: list[Tensor]) -> Callable[..., object]:
        reasons.append("; ".join(decision.reason for decision in prepare_calls(gm.graph, TARGET)))
        gm.recompile()
        gm.graph.lint()
        return gm.forward

    compiled = torch.compile(function, backend=backend, dynamic=True)
    for batch in (2, 3, 5):
        inputs = [torch.randn(batch, H, S, D), torch.randn(batch, H, K, D), torch.randn(batch, H, K, D)]
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 0)
            for axis in (1, 2, 3):
                torch._dynamo.mark_static(x, axis)
        torch.testing.assert_close(compiled(*inputs), function(*inputs))
    assert reasons == [reason]


@pytest.mark.parametrize("name", ANY_LENGTH)
def test_lengths_that_vary_stay_symbols(name: str) -> None:
    causal, mask = ANY_LENGTH[name].values()

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k, v, mask(q))

    options: list[bool] = []

    def backend(gm: GraphModule, _: list[Tensor]) -> Callable[..., object]:
        prepare_calls(gm.graph, TARGET)
        gm.recompile()
        (call,) = (node for node in gm.graph.nodes if node.target is sdpa)
        options.append(bool(call.kwargs.get("is_causal")))
        return gm.forward

    compiled = torch.compile(function, backend=backend, dynamic=True)
    for length in (5, 8, 13):
        inputs = [torch.randn(B, H, length, D) for _ in range(3)]
        torch.testing.assert_close(compiled(*inputs), function(*inputs))
    assert options == [causal]


def test_in_autocast_the_kernel_takes_the_narrow_dtype() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return sdpa(q, k, v, bias)

    inputs = [*heads(), torch.randn(1, H, S, K, requires_grad=True)]
    call = Settled(function, *inputs).call
    assert {x.meta["example_value"].dtype for x in call.args[:4]} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda x: x.double(), "no fused attention in torch.float64"),
        (lambda x: x[None], "operands other than [B, H, S, D] or [B, S, D] of one batch"),
        (lambda x: x[..., :13], "a head size that is no multiple of 16 bytes"),
    ],
    ids=["float64", "five axes", "13 wide"],
)
def test_what_has_no_fused_kernel_stays_pytorchs(change: Callable[[Tensor], Tensor], reason: str) -> None:
    inputs = [change(x.detach()).requires_grad_() for x in heads()]
    bias = torch.randn(S, K, dtype=inputs[0].dtype, requires_grad=True)
    (decision,) = Settled(sdpa, *inputs, bias).decisions
    assert decision.verdict == "refused" and reason in decision.reason


def test_readers_that_need_the_layout_get_it() -> None:
    """Products and a softmax leave [B, H, S, D] dense; the memory-efficient kernel does not."""

    def function(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return sdpa(q, k, v, bias).view(B, H * S, D)

    inputs = [*heads(), torch.randn(1, H, S, K, requires_grad=True)]
    settled = Settled(function, *inputs)
    assert settled.call.target is EFFICIENT
    check_fused(function, settled.run, inputs)


def apart(x: Tensor) -> Tensor:
    """[B, S, H · D] → [B, H, S, D]."""
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


def projected(*width: int) -> list[Tensor]:
    return [torch.randn(B, S, H * D + more, requires_grad=True) for more in (0, *width)]


def copied(x: Tensor, y: Tensor) -> Tensor:
    q, k, v = apart(x).contiguous(), apart(x.sin()).clone(), apart(y).contiguous()
    return sdpa(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("dynamic", [False, True])
def test_operands_are_not_copied_to_lie_densely(dynamic: bool) -> None:
    inputs = projected(0)
    if dynamic:
        for x in inputs:
            torch._dynamo.mark_dynamic(x, 1)
    settled = Settled(copied, *inputs)
    assert not any(node.users for node in settled.graph.nodes if str(node.target) in ("contiguous", "clone"))
    assert "without copies" in settled.reason
    if not dynamic:
        check_fused(copied, settled.run, projected(0))


def written_before_it_is_read(x: Tensor, y: Tensor) -> Tensor:
    wide = y * 1
    k = apart(wide).contiguous()
    wide.mul_(2)
    return sdpa(apart(x), k, k)


def with_odd_rows(x: Tensor, y: Tensor) -> Tensor:
    k = apart(y[..., 1:]).contiguous()
    return sdpa(apart(x), k, k)


def along_keys(x: Tensor, y: Tensor) -> Tensor:
    k = apart(y).mT.contiguous().mT.contiguous()
    return sdpa(apart(x), k, k)


@pytest.mark.parametrize(
    ("function", "more"),
    [(written_before_it_is_read, 0), (with_odd_rows, 1), (along_keys, 0)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_copies_that_are_needed_stay(function: Function, more: int) -> None:
    settled = Settled(function, *projected(more))
    check_fused(function, settled.run, projected(more))
    assert any(node.users for node in settled.graph.nodes if str(node.target) == "contiguous")


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, q[..., :1] > k[..., :1].mT)


def dropping(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


@pytest.mark.parametrize(
    ("device", "dtype", "width", "function", "library"),
    [
        ("h200", "bf16", 64, plain, "cudnn"),
        ("h200", "bf16", 64, masked, "cudnn"),
        ("h200", "bf16", 256, plain, "flash"),
        ("h200", "bf16", 64, dropping, "cudnn"),
        ("h200", "fp32", 64, dropping, "efficient"),
        ("a100", "bf16", 64, plain, "flash"),
        ("a100", "bf16", 64, masked, "efficient"),
        ("cpu", "fp32", 64, plain, "flash"),
    ],
)
def test_attention_is_named_as_on_the_device(
    device: str, dtype: str, width: int, function: object, library: str
) -> None:
    target = target_named(device)
    inputs = InputSpec.parse_many(f"{dtype}[2,4,128,{width}]" + f",{dtype}[2,4,128,{width}]" * 2)
    case = Case("attention", lambda: function, inputs)  # type: ignore[arg-type,return-value]
    plan = capture(case, Planner(target, hand_written=False)).plan
    assert plan is not None
    names = [what for _, _, what in plan.launches() if "attention" in what]
    name = f"aten._scaled_dot_product_{library}_attention" + "_for_cpu" * (device == "cpu")
    assert names == [f"{name}.default", f"{name}_backward.default"]
    kinds = [work.kind for graph in plan.graphs for _, work in works(graph) if work and "attention" in work.kind]
    assert kinds == [f"attention, {library}", f"attention backward, {library}"]


def layers(x: Tensor, table: Tensor) -> Tensor:
    bias = (table * 2).permute(2, 0, 1)[None]
    for _ in range(2):
        x = F.scaled_dot_product_attention(x, x, x, attn_mask=bias)
    return x


def test_the_bias_of_two_layers_is_written_once_and_contiguous() -> None:
    x, table = torch.randn(2, 4, 24, 16), torch.randn(24, 24, 4)
    with torch.no_grad(), recording() as record:
        found = compiled(layers)(x, table)
    torch.testing.assert_close(found, layers(x, table))
    (graph,) = record.graphs
    masks = {node.kwargs["attn_mask"] for node in graph.plan.graph.nodes if node.target is ON_CPU.forward}
    (mask,) = masks
    assert mask.meta["val"].is_contiguous()
    assert len(graph.plan.fusion.regions) == 1 and mask in graph.plan.fusion.regions[0].lowered.outputs


def test_a_mask_that_vmap_makes_is_a_window() -> None:
    """As packages of language models make masks: from a function of four indices, whose parts may change the device."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def mask(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return (j <= i).to(q.device) & (j > i - 3)

        made: Callable[..., Tensor] = mask
        for axis in (3, 2, 1, 0):
            made = torch.vmap(made, in_dims=tuple(0 if i == axis else None for i in range(4)))
        places = torch.arange(q.shape[2])
        return sdpa(q, k, v, made(torch.arange(q.shape[0]), torch.arange(1), places, places))

    q, k, v = (torch.randn(B, H, S, D) for _ in range(3))
    settled = Settled(function, q, k, v)
    truth = function(*(x.double() for x in (q, k, v)))
    assert compare(settled.run(q, k, v), function(q, k, v), truth).ok
    specs = [InputSpec.of(torch.empty(B, H, 32, 64, dtype=torch.bfloat16))] * 3
    plan = capture(Case("mask", lambda: function, specs, training=False), Planner(TARGET)).plan
    assert plan is not None
    assert [work.kind for graph in plan.graphs for _, work in works(graph) if work] == ["tilewright.attention"]
