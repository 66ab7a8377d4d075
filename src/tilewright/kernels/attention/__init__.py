"""Scaled dot-product attention, fused: forward and backward.

bf16, fp16 and fp32 run tilewright's kernels on a GPU, with sums in fp32 and products of fp32 in full precision unless
`torch.set_float32_matmul_precision` allows TF32. Other dtypes and head sizes, the CPU, and masks that need a gradient
run PyTorch's operators. Autocast casts q, k and v. Dropout draws from the device's default generator, which advances;
the mask depends on the generator's state alone, is drawn again in backward, and differs from those of PyTorch's
attention kernels, which differ from each other.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from tilewright.kernels.arguments import expect_numbers, expect_tensors, expect_whole_numbers
from tilewright.kernels.attention import plain
from tilewright.kernels.attention.reference import Window
from tilewright.kernels.attention.registered import attend, known
from tilewright.kernels.device import DTYPES, NARROW, autocast, autocast_dtype, interpreted, runs_on_gpu

MOST_WIDTH = 256
_DEVICES = ("cuda", "cpu") if interpreted() else ("cuda",)
"""Where the kernels run; a constant, since `torch.compile` cannot trace the check."""
_UNLIMITED: Window = (None, None)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, window: Window = (None, None),
    scale: float | None = None, softcap: float = 0.0, mask: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None, dropout_p: float = 0.0, cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None, max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    return_lse: bool = False, deterministic: bool = False,
) -> Any:  # fmt: skip
    """softmax(scale · q kᵀ + …) v for each batch entry and head.

    Args:
        q: [B, H, Sq, D], or [Tq, H, D] where sequences are packed. Any strides; a tensor whose last axis is not
            contiguous is copied first. D and Dv up to 256 run tilewright's kernels.
        k, v: [B, Hk, Sk, D] and [B, Hk, Sk, Dv], or [Tk, Hk, D] and [Tk, Hk, Dv], of q's dtype and device. Hk
            divides H: query head h attends with their head h // (H / Hk).
        causal: hide keys after a query's own position. Positions are aligned to the end: that of query i is that
            of key i + Sk - Sq.
        window: (left, right): a query sees the keys from `left` before to `right` after its position; None: no limit.
        scale: of the products; 1 / √D unless given.
        softcap: c > 0 replaces scaled products s by c · tanh(s / c) before anything is added; 0: none.
        mask: broadcastable to [B, H, Sq, Sk]; bool, True where a key is seen, or floating, added to the scores.
        alibi_slopes: [H] or [B, H] (a row for each packed sequence): -slope · distance in positions is added to the
            scores (Press et al., ALiBi, arXiv:2108.12409).
        dropout_p: the probability with which a weight is dropped, always; pass 0 outside of training.
        cu_seqlens_q, cu_seqlens_k: int32 [N + 1], from 0 to Tq or Tk: sequence n has queries cu_seqlens_q[n] to
            cu_seqlens_q[n + 1], and its keys alike; it sees no other. Without a mask.
        max_seqlen_q, max_seqlen_k: the longest sequence. Without it the call waits for the device, and checks the
            values of cu_seqlens.
        return_lse: return (out, lse), lse being the natural logarithm of each query's sum of exponentials, fp32
            [B, H, Sq] or [H, Tq]; both have a gradient.
        deterministic: the backward gives the same bits in every run.

    Returns:
        [B, H, Sq, Dv] in q's dtype and q's order of axes in memory, or [Tq, H, Dv]. A query that sees no key gives
        zeros and a log-sum-exp of -inf.

    Raises:
        ValueError: shapes, dtypes, devices or options that do not fit each other. TypeError: not floating point, or an
            argument of another kind.

    >>> q = k = v = torch.eye(4).reshape(1, 1, 4, 4)
    >>> attention(q, k, v, causal=True, scale=0.0)[0, 0, 1]
    tensor([0.5000, 0.5000, 0.0000, 0.0000])
    """
    if not isinstance(q, torch.Tensor):
        expect_tensors("attention", q=q)
    left, right = window if window == _UNLIMITED else _band(window)
    if causal:
        right = 0 if right is None else min(right, 0)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    cast = autocast_dtype(q)
    is_plain = mask is None and alibi_slopes is None and cu_seqlens_q is None and cu_seqlens_k is None
    if is_plain and q.dtype in NARROW and cast in (None, q.dtype) and q.dim() == 4:
        scale = q.shape[3] ** -0.5 if scale is None else float(scale)
        results = known(
            q, k, v, None, None, None, None, scale, left, right, softcap, dropout_p, 0, 0, deterministic, "auto"
        )
        if results is not None:
            return results[:2] if return_lse else results[0]
    starts, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
    out, lse = _attention(
        q, k, v, (left, right), scale, softcap, mask, alibi_slopes, dropout_p, starts, longest, return_lse,
        deterministic,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _band(window: object) -> Window:
    """`window` as (left, right)."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"attention takes a pair (left, right) for window, not {window!r}")
    left, right = window
    expect_whole_numbers("attention", **{"window's left side": left, "window's right side": right})
    return left, right


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, band: Window, scale: float | None, softcap: float,
    mask: torch.Tensor | None, slopes: torch.Tensor | None, dropout: float,
    starts: tuple[torch.Tensor | None, torch.Tensor | None], longest: tuple[int | None, int | None], with_lse: bool,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Checks the arguments; returns out and lse. PyTorch's operators compute lse only on request, else it is None."""
    expect_tensors(
        "attention", q=q, k=k, v=v, mask=mask, alibi_slopes=slopes, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1]
    )
    expect_numbers("attention", scale=scale, softcap=softcap, dropout_p=dropout)
    expect_whole_numbers("attention", max_seqlen_q=longest[0], max_seqlen_k=longest[1])
    starts_q, starts_k = starts
    longest_q = longest_k = 0
    if starts_q is not None or starts_k is not None:
        starts_q, starts_k = _starts(starts_q, starts_k, q, mask)
        longest_q, longest_k = (
            _longest(name, begins, len(x)) if most is None else most
            for name, begins, x, most in zip("qk", (starts_q, starts_k), (q, k), longest, strict=True)
        )
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if autocast_dtype(q) is not None:
        q, k, v = autocast(q), autocast(k), autocast(v)
    _check(q, k, v, dropout, softcap)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    mask = None if mask is None else _mask(mask, q, k)
    slopes = None if slopes is None else _slopes(slopes, q, starts_q)
    out: torch.Tensor
    lse: torch.Tensor | None
    if not _has_kernels(q, v, starts_q is not None, mask, slopes):
        out, lse = plain.attention(q, k, v, starts_q, starts_k, band, scale, softcap, mask, slopes, dropout, with_lse)
    else:
        options = (
            mask, slopes, starts_q, starts_k, scale, *band, softcap, dropout, longest_q, longest_k, deterministic,
            "auto",
        )  # fmt: skip
        out, lse = attend(q, k, v, *options)[:2]
    if starts_q is not None:
        out, lse = out[0].transpose(0, 1), None if lse is None else lse[0]
    return out, lse


def _has_kernels(
    q: torch.Tensor, v: torch.Tensor, packed: bool, mask: torch.Tensor | None, slopes: torch.Tensor | None
) -> bool:
    """Whether the kernels compute a call; if not, PyTorch's operators do."""
    if q.dtype not in DTYPES or not _runs_on(q.device) or max(q.shape[3], v.shape[3]) > MOST_WIDTH:
        return False
    # For one query PyTorch sums in trees, which is more exact in fp32 than the kernels' chains of products.
    if q.dtype == torch.float32 and q.shape[2] == 1 and not packed:
        return False
    return not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (mask, slopes)))


def _runs_on(device: torch.device) -> bool:
    """Whether the kernels run on `device`, or on the device for which a program captured there is planned."""
    return device.type in _DEVICES or (torch.compiler.is_compiling() and _planned_for_gpu())


# `torch.compile` cannot trace the check, and takes its result as a constant.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _planned_for_gpu() -> bool:
    return runs_on_gpu(torch.device("cpu"))


def _starts(
    starts_q: torch.Tensor | None, starts_k: torch.Tensor | None, q: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The contiguous starts of packed sequences; ValueError if the arguments do not describe packed sequences."""
    if starts_q is None or starts_k is None or q.dim() != 3 or mask is not None:
        raise ValueError(
            "packed attention takes q [Tq, H, D], cu_seqlens_q and cu_seqlens_k, and no mask; "
            f"not q {tuple(q.shape)} with {'one of them' if mask is None else 'a mask'}"
        )
    pair = (starts_q, starts_k)
    fits = all(starts.dim() == 1 and starts.dtype in (torch.int32, torch.int64) for starts in pair)
    if not fits or len(starts_q) != len(starts_k) or len(starts_q) < 2 or any(x.device != q.device for x in pair):
        found = ", ".join(f"{tuple(starts.shape)} {starts.dtype} on {starts.device}" for starts in pair)
        raise ValueError(
            f"packed attention takes cu_seqlens_q and cu_seqlens_k int32 [N + 1] on {q.device}, not {found}"
        )
    return starts_q.contiguous(), starts_k.contiguous()


def _longest(name: str, starts: torch.Tensor, total: int) -> int:
    """The length of the longest sequence; ValueError if the sequences do not cover `total` positions."""
    if torch.compiler.is_compiling():
        return int(starts.diff().max())
    places: list[int] = starts.tolist()
    lengths = [end - begin for begin, end in itertools.pairwise(places)]
    if places[0] != 0 or places[-1] != total or min(lengths) < 0:
        raise ValueError(f"packed attention takes cu_seqlens_{name} that rise from 0 to {total}, not {places}")
    return max(lengths)


def _mask(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """`mask` expanded to [B, H, Sq, Sk], as bool or in a dtype that the kernels add."""
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"attention takes a mask that is bool or floating-point, not {mask.dtype}")
    if mask.dtype not in (torch.bool, q.dtype):
        mask = mask.to(torch.promote_types(q.dtype, torch.float32))
    return _expanded("mask", mask, (*q.shape[:3], k.shape[2]), q.device)


def _slopes(slopes: torch.Tensor, q: torch.Tensor, starts_q: torch.Tensor | None) -> torch.Tensor:
    """`slopes` expanded to [batch entries or packed sequences, H], fp32."""
    sequences = q.shape[0] if starts_q is None else len(starts_q) - 1
    return _expanded("alibi_slopes", slopes, (sequences, q.shape[1]), q.device).to(torch.float32).contiguous()


def _expanded(name: str, tensor: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    if tensor.device != device:
        raise ValueError(f"attention takes {name} on the device of q, {device}, not on {tensor.device}")
    try:
        return tensor.expand(shape)
    except RuntimeError:
        raise ValueError(f"attention takes {name} broadcastable to {shape}, not {tuple(tensor.shape)}") from None


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float, softcap: float) -> None:
    if not q.is_floating_point():
        raise TypeError(f"attention takes floating-point tensors, not {q.dtype}")
    shapes = [tuple(x.shape) for x in (q, k, v)]
    fits = q.dim() == k.dim() == v.dim() == 4 and k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0]
    if not fits or q.shape[3] != k.shape[3] or (q.shape[1] % k.shape[1] if k.shape[1] else q.shape[1]):
        raise ValueError(
            "attention takes q [B, H, Sq, D], k [B, Hk, Sk, D] and v [B, Hk, Sk, Dv] with H a multiple of Hk, "
            f"not {', '.join(map(str, shapes))}"
        )
    if len({(x.dtype, x.device) for x in (q, k, v)}) > 1:
        kinds = ", ".join(f"{x.dtype} on {x.device}" for x in (q, k, v))
        raise ValueError(f"attention takes q, k and v of one dtype on one device, not {kinds}")
    if not 0.0 <= dropout_p <= 1.0 or softcap < 0.0:
        raise ValueError(f"attention takes dropout_p in [0, 1] and softcap ≥ 0, not {dropout_p} and {softcap}")
