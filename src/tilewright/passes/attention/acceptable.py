"""Operands that PyTorch's fused attention accepts, in place of those that it leaves to products and a softmax.

    y = sdpa(q, k, v, bias)              q, k, v [B, H, S, 12], bias [1, H, S, S] with last stride H
    →   y = sdpa(pad(q), pad(k), pad(v), bias.contiguous(), scale=12**-0.5)[..., :12]

    y = sdpa(q, k, v, bias)              bias needs a gradient
    →   y = _scaled_dot_product_efficient_attention(q, k, v, bias.expand(B, H, S, S), …)[0]

Which kernel PyTorch takes is PyTorch's to say: the call is made on the fake tensors, and the operator that it reaches
is looked at. Its choice sends the memory-efficient kernel two kinds of call that raise there, and they are mended too:
a mask with one number for all keys of a query, and a mask that alone needs a gradient.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.fx import Node
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright.graph.capture import first_line
from tilewright.passes.attention.form import Writer, of_four_axes
from tilewright.passes.attention.spelling import Refusal, example, static, tensor_of

FUSED = "_scaled_dot_product_"
UNFUSED = "_scaled_dot_product_attention_math"
ALIGNMENT_BYTES = 16
"""Of the rows of q, k and v in PyTorch's fused kernels."""
MASK_ALIGNMENT = 16
"""Elements whose multiples the rows of a mask begin at in PyTorch's memory-efficient kernel."""
EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention.default
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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
    """Of the result; under autocast not that of the operands."""

    def write(self, write: Writer) -> Node:
        """The call in the graph."""
        options: dict[str, Any] = {"attn_mask": self.mask, "dropout_p": self.dropout, "is_causal": self.causal}
        options |= {"scale": self.scale, "enable_gqa": self.grouped}
        return write.call(F.scaled_dot_product_attention, self.q, self.k, self.v, **options)


class _Reached(TorchDispatchMode):
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
    reached = _Reached()
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
            raise Refusal(f"PyTorch takes no such call: {first_line(error)}") from error
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


def accepted(write: Writer, call: SdpaCall) -> tuple[list[str], Node | None]:
    """What was changed in `call` so that a fused kernel takes it, and its result; nothing where one takes it as is."""
    if fused_kernel(write, call) is not None:
        return [], None
    _check(call)
    told: list[str] = []
    scale = tensor_of(call.q).shape[-1] ** -0.5 if call.scale is None else call.scale
    shape = tensor_of(call.q).shape[:-1]
    width = tensor_of(call.v).shape[-1]
    call = _of_four_axes(write, call, told)
    call = _aligned(write, call._replace(scale=scale), told)
    if fused_kernel(write, call) is None:
        call = _by_rows(write, call, told)
    if fused_kernel(write, call) is not None:
        new = call.write(write)
    else:
        told.append("PyTorch's memory-efficient kernel" + _because(call))
        new = _efficient(write, call)
    if tensor_of(new).shape[-1] != width:
        new = write.method("narrow", new, -1, 0, width)
    if tensor_of(new).dim() != len(shape) + 1:
        new = write.method("reshape", new, *shape, width)
    return [f"fused in place of products and a softmax: {', '.join(told)}"], new


def _check(call: SdpaCall) -> None:
    """Refuse what no fused kernel of PyTorch computes on a GPU."""
    operands = [tensor_of(x) for x in (call.q, call.k, call.v)]
    if call.dtype not in DTYPES:
        raise Refusal(f"products and a softmax: PyTorch has no fused attention in {call.dtype} on a GPU")
    if any(isinstance(size, int) and size == 0 for x in operands for size in x.shape):
        raise Refusal("products and a softmax: empty tensors")
    if any(x.dim() != operands[0].dim() or x.dim() < 2 for x in operands):
        raise Refusal("products and a softmax: operands of different ranks")
    if not static([x.shape[-1] for x in operands]):
        raise Refusal("products and a softmax: its head size differs from call to call")


def _check_static(*nodes: Node) -> None:
    if not all(static(tensor_of(x).shape) for x in nodes):
        raise Refusal("products and a softmax: its sizes differ from call to call")


def _because(call: SdpaCall) -> str:
    mask = example(call.mask)
    return ", for the gradient of the mask" if mask is not None and mask.requires_grad else ""


def _of_four_axes(write: Writer, call: SdpaCall, told: list[str]) -> SdpaCall:
    """q, k and v as [B, H, S, D], with one batch size; the mask with 4 axes."""
    rank = tensor_of(call.q).dim()
    mask = call.mask
    if rank != 4:
        _check_static(call.q, call.k, call.v)
        told.append(f"{rank} axes as 4")
        if rank > 4 and mask is not None and tensor_of(mask).dim() > 2:
            raise Refusal(f"products and a softmax: a mask over {rank} axes")
    q, k, v = (of_four_axes(write, x, rank) for x in (call.q, call.k, call.v))
    if mask is not None and tensor_of(mask).dim() != 4:
        axes = tensor_of(mask).dim()
        if axes == 3 and rank == 3:
            mask = write.method("unsqueeze", mask, 1)
        else:
            _check_static(mask)
            mask = write.method("reshape", mask, *[1] * (4 - axes), *tensor_of(mask).shape)
        told.append("the mask over 4 axes")
    if len({str(tensor_of(x).shape[0]) for x in (q, k, v)}) > 1:
        _check_static(q, k, v)
        batch = max(int(tensor_of(x).shape[0]) for x in (q, k, v))
        q, k, v = (_of_batch(write, x, batch, told) for x in (q, k, v))
    return call._replace(q=q, k=k, v=v, mask=mask)


def _of_batch(write: Writer, x: Node, batch: int, told: list[str]) -> Node:
    if tensor_of(x).shape[0] == batch:
        return x
    told.append("one batch entry repeated")
    return write.method("contiguous", write.method("expand", x, batch, -1, -1, -1))


def _aligned(write: Writer, call: SdpaCall, told: list[str]) -> SdpaCall:
    """Rows that begin at multiples of 16 bytes; head sizes padded with zeros to such, which the result's shows.

    Products and a softmax take any; the fused kernels read whole vectors, and raise or fault elsewhere.
    """
    step = ALIGNMENT_BYTES // call.dtype.itemsize

    def padded(x: Node) -> Node:
        missing = -int(tensor_of(x).shape[-1]) % step
        return write.call(F.pad, x, (0, missing)) if missing else x

    def copied(x: Node) -> Node:
        if _begins_aligned(tensor_of(x), step, by_rows=x is not call.mask):
            return x
        return write.method("clone", x, memory_format=torch.contiguous_format)

    q, k, v = (padded(x) for x in (call.q, call.k, call.v))
    if (q, k, v) != (call.q, call.k, call.v):
        told.append(f"head sizes padded to multiples of {step}")
    found = call._replace(q=copied(q), k=copied(k), v=copied(v), mask=None if call.mask is None else copied(call.mask))
    if (found.q, found.k, found.v, found.mask) != (q, k, v, call.mask):
        told.append("rows copied to multiples of 16 bytes")
    return found


def _begins_aligned(value: torch.Tensor, step: int, by_rows: bool) -> bool:
    """Whether `value`, and each of its rows, begins at a multiple of `step` elements, as far as strides are known.

    The rows of a mask need not: PyTorch pads them.
    """
    if value.dtype == torch.bool or str(value.stride(-1)) != "1":
        return True  # written anew
    axes = zip(value.shape[:-1], value.stride()[:-1], strict=True)
    begins = (value.storage_offset(), *(stride for size, stride in axes if by_rows and str(size) != "1"))
    return all(begin % step == 0 for begin in begins if isinstance(begin, int))


def _by_rows(write: Writer, call: SdpaCall, told: list[str]) -> SdpaCall:
    """Operands whose last stride is 1, a mask with a row of its own for the keys, a key head for each query head."""

    def dense(x: Node) -> Node:
        return x if tensor_of(x).stride(-1) == 1 else write.method("contiguous", x)

    q, k, v, mask = dense(call.q), dense(call.k), dense(call.v), call.mask
    if (q, k, v) != (call.q, call.k, call.v):
        told.append("operands copied by rows")
    if mask is not None:
        if _repeats_over_keys(tensor_of(mask), tensor_of(k)):
            _check_static(mask, k)
            mask = write.method("expand", mask, *tensor_of(mask).shape[:-1], tensor_of(k).shape[-2])
        if dense(mask) is not mask:
            mask = dense(mask)
            told.append("the mask copied by rows")
    call = call._replace(q=q, k=k, v=v, mask=mask)
    heads = tensor_of(q).shape[1], tensor_of(k).shape[1]
    times, rest = divmod(int(heads[0]), int(heads[1])) if static(heads) else (1, 0)
    if rest:
        raise Refusal("products and a softmax: heads that do not share keys evenly")
    shared = call._replace(grouped=True)
    if times > 1 and not call.grouped and fused_kernel(write, shared) is not None:
        told.append("heads that share keys read them once")
        return shared
    if times > 1 and fused_kernel(write, call) is None:
        told.append("keys and values repeated for each head")
        k, v = (write.method("repeat_interleave", x, times, 1) for x in (k, v))
        call = call._replace(k=k, v=v, grouped=False)
    return call


def _efficient(write: Writer, call: SdpaCall) -> Node:
    """PyTorch's memory-efficient kernel, called by name."""
    _check_static(call.q, call.k, call.v, *([] if call.mask is None else [call.mask]))
    q, k, v = (
        x if tensor_of(x).dtype == call.dtype else write.method("to", x, call.dtype) for x in (call.q, call.k, call.v)
    )
    bias = None if call.mask is None else _bias(write, call.mask, q, k)
    with_lse = torch.is_grad_enabled() and any(tensor_of(x).requires_grad for x in (q, k, v, bias) if x is not None)
    both = write.call(EFFICIENT, q, k, v, bias, with_lse, call.dropout, call.causal, scale=call.scale)
    return write.call(operator.getitem, both, 0)


def _bias(write: Writer, mask: Node, q: Node, k: Node) -> Node:
    """`mask` as what is added to the scores [B, H, Sq, Sk], in q's dtype, its rows at multiples of 16 elements."""
    if tensor_of(mask).dtype == torch.bool:
        mask = write.call(torch.where, mask, 0.0, float("-inf"))
    if tensor_of(mask).dtype != tensor_of(q).dtype:
        mask = write.method("to", mask, tensor_of(q).dtype)
    keys = int(tensor_of(k).shape[2])
    missing = -keys % MASK_ALIGNMENT
    if missing:
        mask = write.method("narrow", write.call(F.pad, mask, (0, missing)), -1, 0, keys)
    else:
        mask = write.method("contiguous", mask)
    return write.method("expand", mask, *tensor_of(q).shape[:3], keys)
