"""Converts operands that PyTorch's fused attention rejects, so that a call does not run as products and a softmax.

    y = sdpa(q, k, v, bias)              bias [1, H, S, S] with last stride H
    →   y = sdpa(q, k, v, bias.contiguous())

    y = sdpa(q, k, v)                    [B, S, D]
    →   y = sdpa(q[:, None], k[:, None], v[:, None])[:, 0]

    y = sdpa(q, k, v, bias)              bias needs a gradient
    →   y = _scaled_dot_product_efficient_attention(q, k, v, bias.expand(B, H, S, S), …)[0]

PyTorch chooses the kernel: the pass makes the call with fake tensors and reads which operator it reaches. PyTorch sends
the memory-efficient kernel two kinds of call for which it raises; these are converted too: a mask with one number for
all keys of a query, and a mask that alone needs a gradient.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.fx import Node
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright.graph.canonical import example, static, tensor_of
from tilewright.graph.insert import Writer
from tilewright.hardware.target import Target
from tilewright.kernels.device import DTYPES
from tilewright.passes.attention.library import CUDNN, choice
from tilewright.records.errors import Refusal, first_line

FUSED = "_scaled_dot_product_"
UNFUSED = "_scaled_dot_product_attention_math"
ALIGNMENT_BYTES = 16
"""Alignment of the rows of q, k and v in PyTorch's fused kernels."""
MASK_ALIGNMENT = 16
"""Elements whose multiples the rows of a mask begin at in PyTorch's memory-efficient kernel."""
EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention.default


class SdpaCall(NamedTuple):
    """One call of `scaled_dot_product_attention` on nodes of a torch-level graph."""

    q: Node
    k: Node
    v: Node
    mask: Node | None
    dropout: float | Node
    """A node where Dynamo made the number a symbol; so is `scale`."""
    causal: bool
    scale: float | Node | None
    grouped: bool
    dtype: torch.dtype
    """The dtype of the result; under autocast not that of the operands."""

    def write(self, write: Writer) -> Node:
        """The call in the graph."""
        options: dict[str, Any] = {"attn_mask": self.mask, "dropout_p": self.dropout, "is_causal": self.causal}
        options |= {"scale": self.scale, "enable_gqa": self.grouped}
        return write.call(F.scaled_dot_product_attention, self.q, self.k, self.v, **options)


class _CalledAttention(TorchDispatchMode):
    """Notes the fused attention that is called inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name.startswith(FUSED) and not name.startswith(UNFUSED):
            self.name = name
        return func(*args, **(kwargs or {}))


def fused_kernel(write: Writer, call: SdpaCall) -> str | None:
    """The operator that PyTorch's own choice for `call` reaches; None where that is products and a softmax."""
    q, k, v = (tensor_of(x) for x in (call.q, call.k, call.v))
    mask = None if call.mask is None else tensor_of(call.mask)
    if mask is not None and (mask.dim() == 0 or mask.stride(-1) != 1 or _repeats_over_keys(mask, k)):
        return None  # on a GPU, though not on a CPU
    if mask is not None and _alone_is_trained(mask, q, k, v):
        return None
    reached = _CalledAttention()
    with write.mode, reached:
        # Autocast casts what needs no gradient and what does alike.
        q, k, v = (x if x.dtype == call.dtype else x.to(call.dtype) for x in (q, k, v))
        if mask is not None and mask.dtype != torch.bool and mask.dtype != call.dtype:
            mask = mask.to(call.dtype)
        try:
            F.scaled_dot_product_attention(
                q, k, v, mask, _number(call.dropout), call.causal, scale=_number(call.scale), enable_gqa=call.grouped
            )
        except RuntimeError as error:
            raise Refusal(f"PyTorch refuses this call: {first_line(error)}") from error
    return reached.name


def _repeats_over_keys(mask: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether a mask, such as [B, 1, Sq, 1], has one number for all keys of a query.

    PyTorch's choice finds its last stride to be 1, and expands it; its memory-efficient kernel then raises.
    """
    return isinstance(mask.shape[-1], int) and mask.shape[-1] == 1 and str(k.shape[-2]) != "1"


def _alone_is_trained(mask: torch.Tensor, *operands: torch.Tensor) -> bool:
    """Whether only the mask needs a gradient.

    PyTorch's choice keeps no log-sum-exp for it, without which the memory-efficient backward raises or, with one head,
    reads at address 0 (PyTorch's pull request 188302).
    """
    return torch.is_grad_enabled() and mask.requires_grad and not any(x.requires_grad for x in operands)


def _number(x: float | Node | None) -> Any:
    return x.meta["example_value"] if isinstance(x, Node) else x


def accepted(write: Writer, call: SdpaCall, target: Target) -> tuple[list[str], Node | None]:
    """The changes in words after which a fused kernel takes `call`, none if it takes it unchanged; the result."""
    if fused_kernel(write, call) is not None:
        return [], None
    _check(call)
    changes: list[str] = []
    if one_head := tensor_of(call.q).dim() == 3:
        changes.append("3 axes as 4")
        q, k, v = (write.method("unsqueeze", x, 1) for x in (call.q, call.k, call.v))
        call = call._replace(q=q, k=k, v=v)
        if call.mask is not None and tensor_of(call.mask).dim() == 3:
            call = call._replace(mask=write.method("unsqueeze", call.mask, 1))
    call = _by_rows(write, call, changes)
    mask, width = example(call.mask), tensor_of(call.q).shape[-1]
    trains_mask = mask is not None and mask.requires_grad
    library = choice(target, call.dtype, width, has_mask=mask is not None) if target.is_planned_gpu else None
    if fused_kernel(write, call) is not None:
        new = call.write(write)
    elif library is CUDNN and not trains_mask:
        changes.append("cuDNN, which takes what PyTorch's kernel for CPUs does not")
        new = _by_name(write, call, CUDNN.forward)
    else:
        why = ", for the gradient of the mask" if trains_mask else ""
        changes.append(f"PyTorch's memory-efficient kernel{why}")
        new = _by_name(write, call, EFFICIENT)
    if one_head:
        new = write.method("squeeze", new, 1)
    return [f"fused in place of products and a softmax: {', '.join(changes)}"], new


def _check(call: SdpaCall) -> None:
    """Refuse calls that no fused kernel of PyTorch computes on a GPU, and those that would need padding for one."""
    operands = [tensor_of(x) for x in (call.q, call.k, call.v)]
    if call.dtype not in DTYPES:
        raise Refusal(f"computed as products and a softmax: PyTorch has no fused attention in {call.dtype} on a GPU")
    if any(isinstance(size, int) and size == 0 for x in operands for size in x.shape):
        raise Refusal("computed as products and a softmax: empty tensors")
    if {x.dim() for x in operands} not in ({3}, {4}) or len({str(x.shape[0]) for x in operands}) > 1:
        raise Refusal("computed as products and a softmax: operands other than [B, H, S, D] or [B, S, D] of one batch")
    if not static([x.shape[-1] for x in operands]):
        raise Refusal("computed as products and a softmax: its head size differs from call to call")
    if any(int(x.shape[-1]) * call.dtype.itemsize % ALIGNMENT_BYTES for x in operands):
        raise Refusal(f"computed as products and a softmax: a head size that is no multiple of {ALIGNMENT_BYTES} bytes")


def _check_static(*nodes: Node) -> None:
    if not all(static(tensor_of(x).shape) for x in nodes):
        raise Refusal("computed as products and a softmax: its sizes differ from call to call")


def _by_rows(write: Writer, call: SdpaCall, changes: list[str]) -> SdpaCall:
    """Operands whose rows lie at multiples of 16 bytes, a mask of 4 axes with a row of its own for the keys, a key head
    for each query head."""
    step = ALIGNMENT_BYTES // call.dtype.itemsize
    q, k, v = (_dense(write, x, step, by_rows=True) for x in (call.q, call.k, call.v))
    mask = None if call.mask is None else _mask_by_rows(write, call.mask, k, step)
    if (q, k, v) != (call.q, call.k, call.v):
        changes.append("operands copied by rows")
    if mask is not call.mask:
        changes.append("the mask copied by rows")
    call = call._replace(q=q, k=k, v=v, mask=mask)
    heads = tensor_of(q).shape[1], tensor_of(k).shape[1]
    times, rest = divmod(int(heads[0]), int(heads[1])) if static(heads) else (1, 0)
    if rest:
        raise Refusal(
            "computed as products and a softmax: the number of query heads is no multiple of the number of key heads"
        )
    shared = call._replace(grouped=True)
    if times > 1 and not call.grouped and fused_kernel(write, shared) is not None:
        changes.append("heads that share keys read these once")
        return shared
    if times > 1 and fused_kernel(write, call) is None:
        changes.append("keys and values repeated for each head")
        k, v = (write.method("repeat_interleave", x, times, 1) for x in (k, v))
        call = call._replace(k=k, v=v, grouped=False)
    return call


def _mask_by_rows(write: Writer, mask: Node, k: Node, step: int) -> Node:
    missing = 4 - tensor_of(mask).dim()
    if missing:
        _check_static(mask)
        mask = write.method("reshape", mask, *[1] * missing, *tensor_of(mask).shape)
    if _repeats_over_keys(tensor_of(mask), tensor_of(k)):
        _check_static(mask, k)
        mask = write.method("expand", mask, *tensor_of(mask).shape[:-1], tensor_of(k).shape[-2])
    return _dense(write, mask, step, by_rows=False)


def _dense(write: Writer, x: Node, step: int, *, by_rows: bool) -> Node:
    """`x`, or a copy of it whose last stride is 1 and that begins, with `by_rows` in each row, at a multiple of `step`.

    The fused kernels read whole vectors, and raise or fault if the address is not aligned. Rows of a mask need not:
    PyTorch pads them.
    """
    value = tensor_of(x)
    if str(value.stride(-1)) != "1":
        return write.method("contiguous", x)
    axes = zip(value.shape[:-1], value.stride()[:-1], strict=True)
    begins = (value.storage_offset(), *(stride for size, stride in axes if by_rows and str(size) != "1"))
    if value.dtype == torch.bool or all(begin % step == 0 for begin in begins if isinstance(begin, int)):
        return x
    return write.method("clone", x, memory_format=torch.contiguous_format)


def _by_name(write: Writer, call: SdpaCall, kernel: Any) -> Node:
    """One of PyTorch's kernels, called by its name."""
    _check_static(call.q, call.k, call.v, *([] if call.mask is None else [call.mask]))
    q, k, v = (write.cast(x, call.dtype) for x in (call.q, call.k, call.v))
    bias = None if call.mask is None else _bias(write, call.mask, q, k)
    with_lse = torch.is_grad_enabled() and any(tensor_of(x).requires_grad for x in (q, k, v, bias) if x is not None)
    both = write.call(kernel, q, k, v, bias, with_lse, call.dropout, call.causal, scale=call.scale)
    return write.call(operator.getitem, both, 0)


def _bias(write: Writer, mask: Node, q: Node, k: Node) -> Node:
    """`mask` as a bias of the scores [B, H, Sq, Sk], in q's dtype, its rows at multiples of 16 elements."""
    if tensor_of(mask).dtype == torch.bool:
        mask = write.call(torch.where, mask, 0.0, float("-inf"))
    mask = write.cast(mask, tensor_of(q).dtype)
    keys = int(tensor_of(k).shape[2])
    missing = -keys % MASK_ALIGNMENT
    if missing:
        mask = write.method("narrow", write.call(F.pad, mask, (0, missing)), -1, 0, keys)
    else:
        mask = write.method("contiguous", mask)
    return write.method("expand", mask, *tensor_of(q).shape[:3], keys)
