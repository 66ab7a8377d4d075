"""Fused attention runs in tilewright's kernels where they take it and are not slower.

    out, lse, … = _scaled_dot_product_flash_attention(q, k, v, …)        →   out, lse, … = attention(q, k, v, …)
    dq, dk, dv = …_attention_backward(dout, q, k, v, out, lse, …)        →   dq, dk, dv = attention_backward(dout, …)

    m = where((k_places <= q_places) & (k_places > q_places - 8) & padding, 0, -inf)
    out, … = …_attention(q, k, v, m, …)                        →   out, … = attention(q, k, v, padding, left=7, right=0)

PyTorch has chosen one of its own kernels when this pass sees the joint graph, whether attention was written out, a
call of `scaled_dot_product_attention`, or inside one of its modules. What PyTorch fuses gives zeros for a query that
sees no key, and so do the kernels that take its place.

Without a race on this machine, the kernels for Hopper are taken, and the others are not: those were measured on an
H200 alone, where the portable ones lose to cuDNN (161 µs to 90 for a masked forward) and those for decoding take 0.96
to 1.04 times as long. But few queries that see a cache through a mask go to the Triton kernel that splits its keys and
reads each once for all heads that share it: PyTorch's memory-efficient kernel does neither, and cuDNN's was not
measured under a mask. Many short sequences that fill no tiles stay with cuDNN (`_fills_no_tiles`). A training step of a
bf16 block with Hopper's kernels takes 0.95 to 0.97 of the time with cuDNN's as a CUDA graph (0.03 to 8.6 GFLOP of
attention in a forward), and 0.88 to 0.94 of it by calls (D1024, S128 and S512). The same is planned for a GPU that is
not there, by its compute capability.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import fx

from tilewright.choose.attention_race import attention_race
from tilewright.choose.chooser import chosen
from tilewright.graph import calls
from tilewright.hardware.architectures import limits_of
from tilewright.hardware.target import Target
from tilewright.kernels.offer import Offer
from tilewright.passes.attention.constants import Constants
from tilewright.passes.attention.fused import BY_FORWARD, CUDNN, ON_CPU, FusedAttention
from tilewright.passes.attention.library import choice
from tilewright.passes.attention.own import has_triton
from tilewright.passes.attention.pinned import is_pinned
from tilewright.passes.attention.spelling import Refusal, tensor_of

if TYPE_CHECKING:
    from tilewright.kernels.attention.request import Request

KERNELS = "tilewright.kernels.attention"
WRITTEN_IN = {
    "hopper.forward": "Gluon, for Hopper",
    "hopper.backward": "CUDA C++, for Hopper",
    "decode.triton": "Triton, split over the keys",
    "portable.launch": "portable Triton",
}
"""By module of `KERNELS`."""
FOR_HOPPER = frozenset({"hopper.forward", "hopper.backward"})
SPLIT = "decode.triton"
TILE = 128
"""Queries, and keys, of a tile of Hopper's kernels."""
MANY_PROGRAMS = 512
"""Tiles that keep a large GPU busy for several waves."""
FEW_PROGRAMS = 128
"""Heads of all batch entries that leave multiprocessors of a large GPU idle, one program each."""


def offers(graph: fx.Graph, target: Target) -> Iterator[Sequence[Offer]]:
    """An offer for each attention of a joint or inference graph of ATen operators."""
    constants = Constants(graph)
    for node in [node for node in graph.nodes if node.target in BY_FORWARD]:
        yield [_offer(node, constants, target)]


def _offer(node: fx.Node, constants: Constants, target: Target) -> Offer:
    peer = BY_FORWARD[node.target]
    theirs, given = peer, calls.arguments(node)
    if target.is_planned_gpu and peer is ON_CPU:
        query, has_mask = tensor_of(given["query"]), given["attn_mask"] is not None
        theirs = choice(target, query.dtype, query.shape[-1], has_mask=has_mask)
    offer = Offer("tilewright.attention", theirs.name, node, lambda: node)
    try:
        device = tensor_of(node.all_input_nodes[0]).device
        if target.language_of(device) != "triton":
            raise Refusal("tilewright's own kernels are for GPUs, and this was captured on a CPU")
        if not has_triton(target, device):
            raise Refusal("Triton is not installed")
        if is_pinned(node):
            raise Refusal("the user chose among PyTorch's attention kernels")
        call = FusedAttention(node, peer, constants, target)
        if _splits_prefix(call):
            kernel = f"tilewright.attention_prefix ({WRITTEN_IN[SPLIT]}, over the visible keys only)"
            return replace(offer, kernel=kernel, apply=call.rewrite_by_prefix)
        return _with_race(replace(offer, apply=call.rewrite), call, target)
    except Refusal as refusal:
        return replace(offer, refusal=str(refusal))


def _with_race(offer: Offer, call: FusedAttention, target: Target) -> Offer:
    """An offer of the kernels that the request selects; if prediction does not know them, only after a race."""
    request, training = call.request, bool(call.backwards)
    if target.is_planned_gpu:
        ways, unraced = _planned_implementations(request, training, target), None
    else:
        ways = _implementations(request, training)
        unraced = _why_not_fast(request, ways)
    # In a plan PyTorch's kernel for CPUs stands for cuDNN. The interpreter, for tests, takes every call.
    if unraced is None and (target.is_planned_gpu or call.peer is CUDNN) and _fills_no_tiles(request):
        unraced = "many short sequences that fill no tiles, and no race was run here"
    kernel = f"tilewright.attention ({'; backward '.join(WRITTEN_IN[way] for way in ways)})"
    return replace(
        offer, kernel=kernel, races=attention_race(request, training), unraced=unraced, with_backward=training
    )


def _implementations(request: Request, training: bool) -> list[str]:
    """The modules of `KERNELS` that compute `request`, forward first; Refusal if a direction has none."""
    from tilewright.kernels.attention.dispatch import select

    try:
        modules = [select(request, "auto", backward) for backward in (False, True)[: 1 + training]]
    except NotImplementedError as error:
        raise Refusal(str(error)) from None
    return [module.__name__.removeprefix(f"{KERNELS}.") for module in modules]


def _planned_implementations(request: Request, training: bool, target: Target) -> list[str]:
    """`_implementations` for a planned GPU that is absent; Refusal if no implementation is known to be fast there."""
    from tilewright.kernels.attention.decode import triton as decode
    from tilewright.kernels.attention.hopper import backward, forward

    if not target.has_wgmma:
        raise Refusal("the kernels that are known to be as fast take the matrix instructions of a warpgroup (wgmma)")
    if not training and _splits_masked(request):
        return [SPLIT]
    why = forward.refuses(request)
    if why is None and decode.refuses(request) is None:
        why = f"the kernel in {WRITTEN_IN[SPLIT]} comes first"
    if why is None and training:
        why = "few queries or keys" if request.is_short else backward.refuses(request)
    if why is not None:
        raise Refusal(f"{why}, and what takes it was not raced against it here")
    return ["hopper.forward", "hopper.backward"][: 1 + training]


def _fills_no_tiles(request: Request) -> bool:
    """Whether there are many sequences so short that most tiles of Hopper's kernels are partial.

    64 entries of 12 heads and 197 places, head size 64: 52 µs forward and 244 backward, cuDNN 48 and 160; at 128, 256
    and 512 places, or in few programs, these kernels are the faster ones over both directions.
    """
    partial = request.queries % TILE or request.keys % TILE
    programs = request.batch * request.heads * -(-request.queries // TILE)
    return bool(partial) and max(request.queries, request.keys) < 2 * TILE and programs > MANY_PROGRAMS


def _splits_masked(request: Request) -> bool:
    """Whether few queries see a long cache through a mask, and splitting its keys is predicted to pay.

    It pays where heads share keys, which are then read once, and where one program a head would not fill the GPU.
    """
    from tilewright.kernels.attention.decode import triton as decode

    pays = request.group > 1 or request.batch * request.heads < FEW_PROGRAMS
    return request.mask != "none" and pays and decode.refuses(request) is None


def _splits_prefix(call: FusedAttention) -> bool:
    """Whether few queries see the first keys of a cache, how many being in a tensor: other kernels read all keys."""
    if call.prefix is None:
        return False
    from tilewright.kernels.attention.decode import triton as decode

    return decode.refuses(call.request._replace(mask="none")) is None


def _why_not_fast(request: Request, ways: list[str]) -> str | None:
    """Why kernels are not known to be as fast as PyTorch's; None for all in the interpreter, which is for tests."""
    if request.device.type != "cuda" or (ways == [SPLIT] and _splits_masked(request)):
        return None
    for way, own in zip(ways, ("hopper.forward", "hopper.backward"), strict=False):
        if way not in FOR_HOPPER:
            why = importlib.import_module(f"{KERNELS}.{own}").supports(request, limits_of(request.device))
            what = why or f"the kernel in {WRITTEN_IN[way]} comes first"
            return f"{what}, and what takes it was not raced against it here"
    return None


choose_kernels = chosen("attention", offers)
