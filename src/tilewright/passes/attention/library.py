"""Fused attentions, PyTorch's and tilewright's: their operators, each called with its part of one set of arguments.

A graph that was captured on a CPU calls the CPU's attention; all other calls are the same on a GPU, and `choice` says
which of PyTorch's runs on a GPU that is absent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx

import tilewright.kernels.attention.decode.prefix
import tilewright.kernels.attention.registered
import tilewright.kernels.attention.window  # noqa: F401, these define the operators
from tilewright.graph import calls
from tilewright.graph.insert import insert_call
from tilewright.hardware.target import Target
from tilewright.kernels.device import NARROW
from tilewright.passes.attention.match import NEGLIGIBLE
from tilewright.passes.rule import Value, call, cpu, rule
from tilewright.records.recipe import dense_strides

if TYPE_CHECKING:
    from tilewright.kernels.attention.request import Request

aten = torch.ops.aten
HOPPER = 9
"""Major compute capability from which PyTorch prefers cuDNN."""
AMPERE = 8
"""Major compute capability from which cuDNN's attention and FlashAttention-2 run."""
MOST_WIDE = 128
"""Largest head size for which PyTorch chooses cuDNN."""
WIDEST = 256
"""Largest head size of FlashAttention-2, and of cuDNN on Hopper."""
STEP = 8
"""cuDNN and FlashAttention-2 need head sizes that are multiples of this."""
RECOGNISED = "tilewright_recognised"
"""Marks an attention that the program wrote out, with its scores in memory."""
Perform = Callable[..., Sequence[Any]]
"""Calls an operator, or inserts its call into a graph: (operator, which results, *args, **kwargs) → these results."""


class Saved(NamedTuple):
    """What a forward leaves to its backward: tensors, or nodes of a graph."""

    out: Any
    lse: Any
    """Natural logarithm of each row's sum of exponentials, fp32 [B, H, Sq] if the kernel `shares_lse`."""
    seed: Any
    offset: Any
    lse64: Any = None
    """As tilewright's backward takes it in fp32."""


@dataclass(frozen=True)
class Peer:
    """A fused kernel, forward and backward."""

    name: str
    forward: Any
    backward: Any
    causal_from_start: bool
    """Whether query i is known to attend to keys 0 to i under its causal mask even if the numbers of queries and keys
    differ."""
    hidden_up_to: float = NEGLIGIBLE
    """A mask value up to this masks a key."""
    random: tuple[int, int] = (6, 7)
    """Which of the forward's results are the seed and the offset."""
    shares_lse: bool = True
    """Whether its forward and backward work with the backward and forward of the others that do."""
    lse_has_column: bool = False
    """Whether its log-sum-exp is [B, H, Sq, 1]."""
    gives_lse: bool = True
    """Whether it has more results than one."""
    exact: int | None = None
    """Which of the forward's results is `Saved.lse64`; its backward then needs that."""

    def attend(self, perform: Perform, options: Mapping[str, Any]) -> Saved:
        """The forward with these `options_of` it."""
        args, kwargs = _arguments(self.forward, options)
        if not self.gives_lse:
            return Saved(perform(self.forward, None, *args, **kwargs)[0], None, None, None)
        wanted = (0, 1, *self.random, *([] if self.exact is None else [self.exact]))
        saved = Saved(*perform(self.forward, wanted, *args, **kwargs))
        # For inference cuDNN gives none.
        if self.lse_has_column and options["compute_log_sumexp"]:
            return saved._replace(lse=perform(aten.squeeze.dim, None, saved.lse, 3)[0])
        return saved

    def differentiate(self, perform: Perform, options: Mapping[str, Any], grad: Any, saved: Saved) -> Sequence[Any]:
        """dq, dk and dv of a forward with these options."""
        if self.exact is not None and saved.lse64 is None:
            saved = _of_library(perform, saved)
        lse = perform(aten.unsqueeze.default, None, saved.lse, 3)[0] if self.lse_has_column else saved.lse
        more = {"grad_out": grad, "grad_out_": grad, "dout": grad, "out": saved.out, "logsumexp": lse, "lse": lse}
        more |= {"philox_seed": saved.seed, "philox_offset": saved.offset, "state": saved.seed, "lse64": saved.lse64}
        args, kwargs = _arguments(self.backward, {**options, **more})
        return perform(self.backward, range(3), *args, **kwargs)

    def refuses(self, request: Request, target: Target) -> str | None:
        """Why the kernel does not take what tilewright's do; None for what it may take."""
        band = request.left, request.right
        plain = band == (None, None) or (band == (None, 0) and request.queries == request.keys)
        reasons = {
            "only on an NVIDIA GPU from Ampere on": target.runs_cuda and target.profile.generation >= AMPERE,
            f"{request.dtype}": request.dtype in NARROW,
            "a mask, a window, or a soft cap": plain and request.mask == "none" and not request.softcap,
            f"head size {request.head_size}": request.head_size % STEP == 0 and request.head_size <= WIDEST,
            "values of a head size of their own": request.head_size == request.value_size,
            "a deterministic order": not request.deterministic,
        }
        return next((reason for reason, fits in reasons.items() if not fits), None)


def _of_library(perform: Perform, saved: Saved) -> Saved:
    """As tilewright's backward takes what another forward saved of 16-bit operands: what it does not read is empty."""
    empty = partial(perform, aten.new_empty.default, None, saved.lse, [0])
    lse = saved.lse
    if not (calls.tensor(lse) if isinstance(lse, fx.Node) else lse).is_contiguous():
        (lse,) = perform(aten.clone.default, None, lse, memory_format=torch.contiguous_format)
    return saved._replace(lse=lse, seed=empty(dtype=torch.int64)[0], lse64=empty(dtype=torch.float64)[0])


def options_of(
    q: Any, k: Any, v: Any, bias: Any, lengths: Sequence[Any], *, training: bool, causal: bool, scale: Any, **own: Any
) -> dict[str, Any]:
    """The arguments of all fused kernels by name, without dropout; `lengths` are of queries and keys.

    What hides keys are `bias` and `causal` to PyTorch's kernels, and to tilewright's what `own` has.
    """
    return {
        "q": q, "k": k, "v": v, "mask": None, "want_dmask": False, "dlse": None, "slopes": None, "starts_q": None,
        "starts_k": None, "left": None, "right": None, "softcap": 0.0, "dropout": 0.0, "longest_q": 0, "longest_k": 0,
        "deterministic": torch.are_deterministic_algorithms_enabled(), "impl": "auto", "prefix": None, "more": 0,
        "else_all": False, "zeros": None,
        "query": q, "key": k, "value": v, "attn_bias": bias, "attn_mask": bias, "compute_log_sumexp": training,
        "dropout_p": 0.0, "is_causal": causal, "scale": scale, "cum_seq_q": None, "cum_seq_k": None,
        "max_q": lengths[0], "max_k": lengths[1], "grad_input_mask": [True, True, True, False],
    } | own  # fmt: skip


def _arguments(operator: Any, options: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of `operator` that are in `options`."""
    args, kwargs = [], {}
    for argument in operator._schema.arguments:
        if argument.kwarg_only:
            kwargs[argument.name] = options[argument.name]
        elif argument.name in options:
            args.append(options[argument.name])
        else:
            args.append(argument.default_value)
    return args, kwargs


def perform_now(operator: Any, wanted: Sequence[int] | None, *args: Any, **kwargs: Any) -> Sequence[Any]:
    """`Perform` on tensors; without `wanted` the operator has one result."""
    results = operator(*args, **kwargs)
    return [results] if wanted is None else [results[index] for index in wanted]


CUDNN = Peer(
    "cuDNN",
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    causal_from_start=False,
    # PyTorch 2.11 replaces False in a bool mask by this number for cuDNN, by -inf for the others (pull request 177868).
    hidden_up_to=-65504.0,
    lse_has_column=True,
)
ON_CPU = Peer(
    "PyTorch's attention for CPUs",
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    causal_from_start=True,
    random=(1, 1),
)
FLASH = Peer(
    "FlashAttention-2",
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_backward.default,
    causal_from_start=False,
)
EFFICIENT = Peer(
    "PyTorch's memory-efficient attention",
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    causal_from_start=True,
    random=(2, 3),
    # It pads the rows of its log-sum-exp.
    shares_lse=False,
)
WINDOWS = Peer(
    "kernel for windows",
    torch.ops.tilewright.window_attention.default,
    torch.ops.tilewright.window_attention_backward.default,
    causal_from_start=False,
    shares_lse=False,
    gives_lse=False,
)
OWN = Peer(
    "tilewright.attention",
    torch.ops.tilewright.attention.default,
    torch.ops.tilewright.attention_backward.default,
    causal_from_start=False,
    random=(3, 3),
    exact=2,
)
PREFIX = Peer(
    "tilewright.attention_prefix",
    torch.ops.tilewright.attention_prefix.default,
    None,
    causal_from_start=False,
    shares_lse=False,
    gives_lse=False,
)
"""The forward of few queries that see a whole cache, or its first keys."""
PEERS = (FLASH, CUDNN, EFFICIENT, ON_CPU)
FILLS = {-math.inf: False, -65504.0: True, -65536.0: True}
"""Mask values that mask a key, and whether a query without any key then attends to all keys as if unmasked: adding one
finite number to all scores does not change a softmax, and fp32 still resolves the scores beside it. bf16 rounds -65504
to -65536."""
BY_FORWARD = {peer.forward: peer for peer in PEERS}
"""By forward operator."""


def choice(target: Target, dtype: torch.dtype, width: int | torch.SymInt, *, has_mask: bool) -> Peer:
    """PyTorch's choice, in the order of its `sdp_utils.cpp` (2.11): cuDNN, FlashAttention-2, memory-efficient."""
    if dtype not in (torch.bfloat16, torch.float16) or width % STEP:
        return EFFICIENT
    if target.profile.generation >= HOPPER and width <= MOST_WIDE:
        return CUDNN
    return EFFICIENT if has_mask else FLASH


@rule(
    call((ON_CPU.forward, ON_CPU.backward), ..., query="query", attn_mask=Value("mask")),
    on=lambda target: target.is_planned_gpu,
)
def name_attention(node: fx.Node, query: fx.Node, mask: fx.Node | None, target: Target) -> fx.Node:
    value = calls.tensor(query)
    peer = choice(target, value.dtype, value.shape[-1], has_mask=mask is not None)
    node.meta[calls.LAUNCHED] = peer.forward if node.target is ON_CPU.forward else peer.backward
    return node


def _is_strided(mask: fx.Node) -> bool:
    """Whether a mask is computed, and not contiguous but for axes along which it repeats (stride 0)."""
    value = calls.tensor(mask)
    axes = [(size, stride) for size, stride in zip(value.shape, value.stride(), strict=True) if stride and size != 1]
    is_dense = [stride for _, stride in axes] == list(dense_strides([size for size, _ in axes]))
    return mask.op != "placeholder" and not is_dense


@rule(call((ON_CPU.forward, ON_CPU.backward), ..., attn_mask="mask"), on=cpu, where=_is_strided)
def make_masks_contiguous(node: fx.Node, mask: fx.Node) -> fx.Node:
    readers = [user for user in mask.users if user.target in (ON_CPU.forward, ON_CPU.backward)]
    copy = insert_call(mask.next, aten.clone.default, mask, memory_format=torch.contiguous_format)
    for reader in readers:
        reader.replace_input_with(mask, copy)
    return node
