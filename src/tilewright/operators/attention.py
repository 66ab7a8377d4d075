"""PyTorch's attention in all its forms, and what tilewright's has in common with it."""

from __future__ import annotations

from functools import partial

from tilewright.operators.arithmetic import Arithmetic, CallSizes, Count, Formula, Shape, UnknownCost, elements
from tilewright.operators.row import calls
from tilewright.operators.shapes import CallAxes, Result, Rule

OPERANDS = ("query", "key", "value")


def _operands(sizes: CallSizes, names: tuple[str, ...]) -> list[Shape]:
    found = [sizes.shape(name) for name in names]
    if None in found:
        raise UnknownCost("attention without operands")
    return [shape for shape in found if shape is not None]


def attention_arithmetic(
    pairs: Formula, names: tuple[str, str, str] = OPERANDS, *, backward: bool = False
) -> Arithmetic:
    """`pairs` is how often a query of any head meets a key, twice.

    Each product of a row with the keys (or the values) takes 2·d for each pair: QKᵀ and PV, on the way back QKᵀ
    again, dQ and dK of width d, dP and dV of the values' width.
    """

    def flops(sizes: CallSizes) -> Count:
        query, _, value = _operands(sizes, names)
        key_products, value_products = (3, 2) if backward else (1, 1)
        return pairs(sizes) * (key_products * query[-1] + value_products * value[-1])

    return Arithmetic(flops, lambda sizes: pairs(sizes) // 2)


def pairs_twice(
    names: tuple[str, str, str] = OPERANDS, causal: str = "is_causal", *, heads_first: bool = True
) -> Formula:
    """Twice the (query, key) pairs of operands [B, H, S, d], or [B, S, H, d]; the argument `causal` halves them."""

    def count(sizes: CallSizes) -> Count:
        query, key, _ = _operands(sizes, names)
        keys = key[-2] if heads_first else key[-3]
        return elements(query[:-1]) * keys * (1 if sizes.argument(causal) else 2)

    return count


def attention_shapes(names: tuple[str, str, str] = OPERANDS) -> Rule:
    """The output and the log-sum-exp of each row; what else there is is small."""

    def rule(call: CallAxes) -> Result:
        query, key, value = (call.tensor(name) for name in names)
        call.names.unify(query[-1], key[-1])
        call.names.unify(key[-2], value[-2])
        mask = call.axes("attn_mask") or call.axes("attn_bias") or call.axes("mask")
        if mask:
            call.broadcast((*query[:-1], key[-2]), mask)
        output = (*query[:-1], value[-1])
        if call.count is None:
            return output
        if call.known is None:
            return [output, query[:-1]]
        return [output, *(None if s is None else call.kept(query[:-1], shape=s) for s in call.shapes[1:])]

    return rule


def _rows_first_shapes(call: CallAxes) -> Result:
    """Results of operands [B, S, H, d]; the log-sum-exp is [B, H, S]."""
    query, value = call.tensor("query"), call.tensor("value")
    return [(*query[:-1], value[-1]), (query[0], query[2], query[1])]


def gradient_shapes(names: tuple[str, str, str] = OPERANDS) -> Rule:
    def rule(call: CallAxes) -> Result:
        return [*(call.tensor(name) for name in names), call.axes("attn_bias")]

    return rule


def _attention(
    texts: str, *, backward: bool = False, causal: str = "is_causal", heads_first: bool = True, priced: bool = True
) -> None:
    calls(
        texts,
        "compute",
        arithmetic=attention_arithmetic(pairs_twice(causal=causal, heads_first=heads_first), backward=backward),
        shapes=gradient_shapes() if backward else attention_shapes() if heads_first else _rows_first_shapes,
        role="attention backward" if backward else "attention",
        dtypes=("query", "key", "value", "attn_bias") if backward else ("query", "float32"),
        priced=priced,
    )


_backward = partial(_attention, backward=True)
_attention(
    """
    scaled_dot_product_attention.default(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    """,
    priced=False,
)
_attention(
    """
    _scaled_dot_product_flash_attention.default(query, key, value, dropout_p, is_causal, return_debug_mask, scale)
    _scaled_dot_product_flash_attention_for_cpu.default(query, key, value, dropout_p, is_causal, attn_mask, scale)
    _scaled_dot_product_efficient_attention.default(query, key, value, attn_bias, compute_log_sumexp, dropout_p,
        is_causal, scale)
    _scaled_dot_product_cudnn_attention.default(query, key, value, attn_bias, compute_log_sumexp, dropout_p,
        is_causal, ...)
    _scaled_dot_product_fused_attention_overrideable.default(query, key, value, attn_bias, dropout_p, is_causal, ...)
    _cudnn_attention_forward.default(query, key, value, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k,
        compute_log_sumexp, dropout_p, is_causal, ...)
    """
)
_backward(
    """
    _scaled_dot_product_flash_attention_backward.default(grad_out, query, key, value, out, logsumexp, cum_seq_q,
        cum_seq_k, max_q, max_k, dropout_p, is_causal, ...)
    _scaled_dot_product_flash_attention_for_cpu_backward.default(grad_out, query, key, value, out, logsumexp,
        dropout_p, is_causal, attn_mask, scale)
    _scaled_dot_product_efficient_attention_backward.default(grad_out_, query, key, value, attn_bias, out,
        logsumexp, philox_seed, philox_offset, dropout_p, grad_input_mask, is_causal, scale)
    _scaled_dot_product_cudnn_attention_backward.default(grad_out, query, key, value, out, logsumexp, philox_seed,
        philox_offset, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, scale)
    _cudnn_attention_backward.default(grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset,
        attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, scale)
    """
)
# The operators that these call, with operands [B, S, H, d].
_attention(
    """
    _flash_attention_forward.default(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, ...)
    """,
    heads_first=False,
)
_backward(
    """
    _flash_attention_backward.default(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q,
        max_k, dropout_p, is_causal, ...)
    """,
    heads_first=False,
)
_attention(
    """
    _efficient_attention_forward.default(query, key, value, bias, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, dropout_p, custom_mask_type, ...)
    """,
    causal="custom_mask_type",
    heads_first=False,
)
_backward(
    """
    _efficient_attention_backward.default(grad_out_, query, key, value, bias, out, cu_seqlens_q, cu_seqlens_k,
        max_seqlen_q, max_seqlen_k, logsumexp, dropout_p, philox_seed, philox_offset, custom_mask_type, ...)
    """,
    causal="custom_mask_type",
    heads_first=False,
)
