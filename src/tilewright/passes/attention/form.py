"""Writes the fused form of one attention into the graph, at the position of the second product.

    out, lse = flash(q, k, v, attn_mask, is_causal, scale)          q, k, v [B, H, N, d]
    out      = out · (1 + (t - t)),  t = lse + Σ q + …              [B, H, Nq, 1]

Fused attention gives a row that sees no key zeros, and PyTorch's CPU kernel also one whose scores
are all NaN; written out, softmax makes such a row NaN. `t` is finite for every other row, so the
factor is 1 there and NaN where eager has NaN, in the output and, through it, in the gradients.
What makes `t` infinite or NaN:

    lse          +Inf or NaN among the scores
    Σ q          a query with NaN or Inf, whose scores are all NaN or infinite
    first key    NaN in the one key that every row sees (in any key, where causality is added)
    max mask     -Inf where an added mask drops all keys of a row

Rows dropped by `masked_fill` or `where` are found in the mask: their weights do not depend on q and k, so their
gradients must not either.
"""

from __future__ import annotations

import math
import operator

import torch
from torch.fx import Graph, Node

from tilewright.graph.canonical import canonical_name, example, mutates, same_shape, static, tensor_of
from tilewright.graph.insert import REFUSED_VIEW, Writer
from tilewright.hardware.target import Language, Target
from tilewright.kernels.device import NARROW
from tilewright.passes.attention.mask import Masking, added_mask, dropped_keys, mask_in_order, shifted
from tilewright.passes.attention.mask_parts import EVERYWHERE
from tilewright.passes.attention.match import Attention
from tilewright.passes.attention.own import WIDEST, check_own, needs_own_kernel, write_own, write_windows
from tilewright.passes.attention.spelling import Operand
from tilewright.records.errors import Refusal


def check_form(attention: Attention, masking: Masking, target: Target) -> None:
    """Refuse what the fused kernels do not support. Raises before the graph is changed."""
    shapes = [tensor_of(x) for x in (attention.q.node, attention.k.node, attention.v.node, attention.result)]
    devices = {x.device.type for x in shapes}
    if devices not in ({"cpu"}, {"cuda"}):
        raise Refusal(f"tensors on {' and '.join(sorted(devices))}")
    if any(static(x.shape) and x.numel() == 0 for x in shapes):
        raise Refusal("empty tensors")
    rank, wanted = len(attention.lead) + 2, shapes[3].dtype
    on_gpu = target.runs_on_gpu(shapes[3].device)
    own = needs_own_kernel(attention, masking, target.language_of(shapes[3].device))
    if own:
        check_own(attention, target)
    if any(tensor_of(term.mask).requires_grad for term in masking.added):
        _check_trained(attention, own, on_gpu)
    if on_gpu or own:
        _check_aligned(shapes[3], attention)
    for mask in [*(term.mask for term in masking.added), *(term.mask for term in masking.filled)]:
        value = tensor_of(mask)
        if value.dim() == 0 or value.dim() > rank or (rank > 4 and value.dim() > 2):
            raise Refusal(f"a mask of {value.dim()} axes for scores of {rank}")
        widest = wanted if on_gpu and not own else torch.promote_types(wanted, torch.float32)
        if value.dtype != torch.bool and torch.promote_types(value.dtype, widest) != widest:
            raise Refusal(f"a mask in {value.dtype} for attention in {wanted}")


def _check_trained(attention: Attention, own: bool, on_gpu: bool) -> None:
    """Refuse an added mask whose gradient no fused kernel gives; PyTorch's memory-efficient one does (`acceptable`)."""
    sizes = (*tensor_of(attention.scores).shape, *attention.lead)
    is_narrow = tensor_of(attention.result).dtype in NARROW
    if own or not on_gpu or not is_narrow or not static(sizes):
        raise Refusal("the added mask needs a gradient, for which there is no fused attention")


def _check_aligned(result: torch.Tensor, attention: Attention) -> None:
    """Refuse calls that PyTorch's fused kernels for GPUs do not take."""
    if result.dtype == torch.float64:
        raise Refusal("PyTorch has no fused attention in float64 on a GPU")
    for operand in (attention.q, attention.v):
        depth = tensor_of(operand.node).shape[-1 if operand.order is None else operand.order[-1]]
        if not isinstance(depth, int) or depth * result.element_size() % 16:
            raise Refusal(f"a head size of {depth}: fused attention on a GPU takes multiples of 16 bytes")
        if depth > WIDEST:
            # Attention over channels, whose head size is an image: scores are smaller than its operands.
            raise Refusal(f"a head size of {depth}: fast fused kernels hold rows of up to {WIDEST}")


def write_attention(graph: Graph, attention: Attention, masking: Masking, target: Target, *, windows: bool) -> Node:
    """Write the fused form before `attention.result`, of `windows` in their kernel; the node that takes its place."""
    write = Writer(graph, attention.result)
    q, k, v = _operands(write, attention)
    if windows:
        return _restored(write, write_windows(write, (q, k, v), attention, masking), attention)
    value_depth = tensor_of(v).shape[-1]
    q, k, v = _of_one_depth(write, q, k, v)
    dropped, mask = None if masking.in_order else dropped_keys(write, masking, attention.lead), None
    signs: list[Node] = []
    language = target.language_of(tensor_of(q).device)
    own = needs_own_kernel(attention, masking, language)
    if language == "c++" or not masking.is_bounded:
        wide = torch.promote_types(tensor_of(q).dtype, torch.float32)
        signs.append(write.method("sum", write.method("detach", q), -1, dtype=wide))
    if masking.added or masking.in_order:
        if masking.in_order:
            mask = mask_in_order(write, masking, attention.lead)
        else:
            mask = added_mask(write, masking, dropped, attention.lead, language)
        if not masking.is_bounded:
            q, mask, top = shifted(write, q, mask)
            signs.append(write.method("squeeze", top, -1))
    elif dropped is not None:
        mask = write.call(torch.logical_not, dropped) if own else write.call(torch.where, dropped, -math.inf, 0.0)
    if own:
        out = write_own(write, (q, k, v), mask, masking.band, attention)
    else:
        out, signs = _fused(write, q, k, v, mask, signs, masking, attention.scale, language)
    if signs:
        out = _with_signs(write, out, signs)
    if masking.band != EVERYWHERE:
        out = _with_unseen_values(write, out, v)
    if dropped is not None and masking.some_row_dropped and not masking.added:
        out = _fill_dropped_rows(write, out, v, dropped, masking)
    if str(tensor_of(out).shape[-1]) != str(value_depth):
        out = write.method("narrow", out, -1, 0, value_depth)
    return _restored(write, out, attention)


def _operands(write: Writer, attention: Attention) -> tuple[Node, Node, Node]:
    """q, k and v as [B, H, N, d]; q with the factors of the scores."""
    q = _ordered(write, attention.q)
    for name, factor in attention.factors:
        q = write.call(torch.mul if name == "mul" else torch.div, q, factor)
    k, v = _ordered(write, attention.k), _ordered(write, attention.v)
    if attention.k_transposed:
        k = write.method("transpose", k, -2, -1)
    lead = tuple(tensor_of(attention.scores).shape[:-2])
    q, k = (_batched(write, x, lead, attention) for x in (q, k))
    return q, k, _batched(write, v, attention.weights_lead, attention)


def _ordered(write: Writer, operand: Operand) -> Node:
    x, order = operand.node, operand.order
    if order is None:
        return x
    present = [axis for axis in order if axis >= 0]
    x = x if present == sorted(present) else write.method("permute", x, *present)
    for axis in (place for place, held in enumerate(order) if held < 0):
        x = write.method("unsqueeze", x, axis)
    return x


def _batched(write: Writer, x: Node, lead: tuple[int | torch.SymInt, ...], attention: Attention) -> Node:
    """x [*own, N, d] as [B, H, N, d]: cast, broadcast to `lead`, viewed as `attention.lead`, of rank 4."""
    x = write.cast(x, tensor_of(attention.result).dtype)
    *own, queries, depth = tensor_of(x).shape
    matrix, rank = (queries, depth), len(attention.lead) + 2
    if len(own) > 1 and own[-1] == 1 and same_shape((*own[:-1], lead[-1]), attention.lead) and static(lead):
        # Heads that share this one are the last to be expanded, and can be distinguished from others.
        return write.method("expand", _of_four_axes(write, x, rank), -1, lead[-1], *matrix)
    for target, how in ((lead, "expand"), (attention.lead, "reshape")):
        if not same_shape(tensor_of(x).shape[:-2], target):
            if not static((*target, *matrix)):
                raise Refusal("heads are broadcast or reshaped over dynamic sizes")
            x = write.method(how, x, *target, *matrix)
    return _of_four_axes(write, x, rank)


def _of_four_axes(write: Writer, x: Node, rank: int) -> Node:
    """An operand of `rank` axes as [B, H, N, d]."""
    if rank == 3:
        return write.method("unsqueeze", x, 1)
    if rank == 2:
        return write.method("unsqueeze", write.method("unsqueeze", x, 0), 0)
    return write.method("flatten", x, 0, rank - 4) if rank > 4 else x


def _of_one_depth(write: Writer, q: Node, k: Node, v: Node) -> tuple[Node, Node, Node]:
    """Pad with zeros to one head size, with unit stride along it: the fused kernels take nothing else."""
    depth, value_depth = (tensor_of(x).shape[-1] for x in (q, v))
    if str(depth) != str(value_depth):
        if not isinstance(depth, int) or not isinstance(value_depth, int):
            raise Refusal("v has another head size than k, and one of them is dynamic")
        missing = value_depth - depth
        if missing > 0:
            q, k = (write.call(torch.nn.functional.pad, x, (0, missing)) for x in (q, k))
        else:
            v = write.call(torch.nn.functional.pad, v, (0, -missing))
    q, k, v = (x if str(tensor_of(x).stride(-1)) == "1" else write.method("contiguous", x) for x in (q, k, v))
    return q, k, v


def _fused(
    write: Writer, q: Node, k: Node, v: Node, mask: Node | None, signs: list[Node], masking: Masking, scale: float,
    language: Language,
) -> tuple[Node, list[Node]]:  # fmt: skip
    """PyTorch's attention: out [B, H, Nq, dv], and what must be finite in rows of out that are not NaN."""
    if language == "c++":
        # scaled_dot_product_attention would call the same kernel, and keep its log-sum-exp to itself.
        both = write.call(
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
            q, k, v, 0.0, masking.causal, attn_mask=mask, scale=scale,
        )  # fmt: skip
        out, lse = (write.call(operator.getitem, both, i) for i in (0, 1))
        return out, [lse, *signs] if mask is not None else [lse, *signs, _nan_of_keys(write, k, masking)]
    # The GPU's kernels keep NaN on their own; only rows without keys become zeros there.
    mask = None if mask is None else write.cast(mask, tensor_of(q).dtype)
    out = write.call(
        torch.nn.functional.scaled_dot_product_attention,
        q, k, v, attn_mask=mask, is_causal=masking.causal, scale=scale,
    )  # fmt: skip
    return out, signs


def _with_signs(write: Writer, out: Node, signs: list[Node]) -> Node:
    """`out`, NaN in rows where a sign [..., Nq] is NaN or infinite."""
    total = write.joined(torch.add, signs)
    factor = write.call(torch.add, write.call(torch.sub, total, total), 1.0)
    factor = write.cast(factor, tensor_of(out).dtype)
    return write.call(torch.mul, out, write.method("unsqueeze", factor, -1))


def _nan_of_keys(write: Writer, k: Node, masking: Masking) -> Node:
    """[B, H, 1]: NaN where a key that reaches every row is NaN.

    Under causality by filling, or none, that is the first key; its Inf is clamped, for its scores
    may be -Inf and harmless. Where -Inf is added to unseen keys, any NaN or +Inf of theirs is NaN.
    """
    k = write.method("detach", k)
    if masking.nan_keys_leak:
        wide = torch.promote_types(tensor_of(k).dtype, torch.float32)
        return write.method("unsqueeze", write.method("sum", k, (-2, -1), dtype=wide), -1)
    first = write.method("select", k, -2, 0)
    return write.method("amax", write.method("clamp", first, -1, 1), -1, keepdim=True)


def _with_unseen_values(write: Writer, out: Node, v: Node) -> Node:
    """In a band: zero weight times NaN is NaN in eager, but the kernel skips blocks of keys that no row sees."""
    dtype = tensor_of(v).dtype
    wide = torch.promote_types(dtype, torch.float32)
    total = write.method("sum", write.method("detach", v), -2, keepdim=True, dtype=wide)
    zero = write.call(torch.mul, total, 0.0)
    return write.call(torch.add, out, write.cast(zero, dtype))


def _fill_dropped_rows(write: Writer, out: Node, v: Node, dropped: Node, masking: Masking) -> Node:
    """Rows without a key: the mean of v where scores were filled with a finite number, else NaN.

    Either way the row depends on v alone, as in eager, where filling cuts the gradient to q and k.
    """
    empty = write.method("all", dropped, -1, keepdim=True)
    rows = write.method("mean", v, -2, keepdim=True)
    if masking.filled[0].value == -math.inf:
        nan = write.call(torch.where, empty, math.nan, 0.0)
        rows = write.call(torch.mul, rows, write.cast(nan, tensor_of(v).dtype))
    return write.call(torch.where, empty, rows, out)


def _restored(write: Writer, out: Node, attention: Attention) -> Node:
    """[B, H, Nq, dv] in the original's shape, order of axes and, where they can be seen, strides."""
    rank, lead = len(attention.lead) + 2, attention.weights_lead
    if rank == 2:
        out = write.method("squeeze", write.method("squeeze", out, 0), 0)
    elif rank == 3:
        out = write.method("squeeze", out, 1)
    if rank > 4 or not same_shape(lead, attention.lead):
        matrix = tuple(tensor_of(out).shape[-2:])
        if not static((*lead, *matrix)):
            raise Refusal("heads are reshaped over dynamic sizes")
        out = write.method("reshape", out, *lead, *matrix)
    ordered = out if attention.order is None else write.method("permute", out, *attention.order)
    if not layout_may_change(write, attention.result, ordered):
        out = write.method("contiguous", out)
        ordered = out if attention.order is None else write.method("permute", out, *attention.order)
    return ordered


def in_old_layout(write: Writer, old: Node, new: Node) -> Node:
    """`new`, or a contiguous copy of it if readers of `old` need that. Raises Refusal if neither suits them."""
    if layout_may_change(write, old, new):
        return new
    new = write.method("contiguous", new)
    if not same_shape(tensor_of(new).stride(), tensor_of(old).stride()):
        raise Refusal("readers of its result need the layout that it has")
    return new


def layout_may_change(write: Writer, old: Node, new: Node) -> bool:
    """Whether readers of `old` work on the strides of `new`, and the caller of the graph never sees them.

    Follows the other strides down the graph until they are gone; a `view` that they forbid, or an
    output that has them, says no. On a yes, the fake tensors on the way are brought up to date.
    """
    changed = {old: tensor_of(new)}
    if same_shape(tensor_of(old).stride(), tensor_of(new).stride()):
        return True
    node = old
    while (node := node.next).op != "root":
        if not any(x in changed for x in node.all_input_nodes):
            continue
        before = example(node)
        if before is None or canonical_name(node) is None or mutates(node) or len(changed) > 32:
            return False
        try:
            after = write.run(node, changed)
        except REFUSED_VIEW:
            return False
        if not same_shape(after.stride(), before.stride()):
            changed[node] = after
    for node, value in changed.items():
        node.meta["example_value"] = value
    return True
