"""Fused attention runs in the kernels that take it and are fastest: tilewright's, cuDNN's or FlashAttention-2's.

    m = where((k_places <= q_places) & (k_places > q_places - 8) & padding, 0, -inf)
    out, … = …_attention(q, k, v, m, …)                        →   out, … = attention(q, k, v, padding, left=7, right=0)

PyTorch has chosen one of its own kernels when this pass sees the joint graph, whether attention was written out, a
call of `scaled_dot_product_attention`, or inside one of its modules. What PyTorch fuses gives zeros for a query that
sees no key, and so do the kernels that take its place.

Forward and backward are chosen together: cuDNN, FlashAttention-2 and tilewright's kernels save the same log-sum-exp, so
that of three forwards and three backwards, each raced once, nine pairs are known.

Without a race on this machine, the kernels for Hopper are taken, but not the portable ones, which lose to cuDNN on an
H200 (161 µs to 90 for a masked forward). Few queries over a long cache go to the kernel that splits its keys, where
heads share keys or are few: 0.98 to 1.3 times cuDNN's speed, 1.05 to 1.4 under a mask. A training step of a bf16 block
takes 0.95 to 0.97 of the time with cuDNN's as a CUDA graph, and 0.88 to 0.94 by calls. The same is planned for a GPU
that is not there, by its compute capability.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from torch import fx

from tilewright.choose.attention_race import attention_races
from tilewright.choose.chooser import chosen
from tilewright.choose.generated import Groups, work_of
from tilewright.cost.kinds import attention_kind
from tilewright.cost.work import Work
from tilewright.graph import calls
from tilewright.graph.canonical import tensor_of
from tilewright.graph.constants import Constants
from tilewright.hardware.architectures import DeviceLimits, limits_of
from tilewright.hardware.target import FOR_GPUS, Target
from tilewright.kernels.device import NARROW
from tilewright.kernels.offer import CLEAR, THEIRS, Offer
from tilewright.passes.attention.fused import FusedAttention
from tilewright.passes.attention.library import BY_FORWARD, CUDNN, FLASH, ON_CPU, OWN, PREFIX, WINDOWS, Peer, choice
from tilewright.passes.attention.own import has_triton
from tilewright.passes.attention.sdpa import is_pinned
from tilewright.passes.attention.written_out import WRITTEN_OUT
from tilewright.records.errors import Refusal

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
MANY_WINDOWS = 4096
"""1,024 sequences and heads of 64 places, head size 64, took cuDNN 23 µs forward and 65 backward, the kernel for
windows 16 and 89; 12,288 of 49 places, head size 32, 203 and 456, and 64 and 113."""
WIDTH = 16
"""Head sizes are multiples of it. 21,504 sequences of 42 places, head size 8, took cuDNN 349 µs forward, the kernel for
windows 690: it loads narrower rows element by element."""
LEAST_FILLED = 0.75
LONG_WALK = 8192
"""Queries of all heads that share keys from which a program's time is its walk over them, not the launches."""
IDLE = "few key heads leave multiprocessors idle in the backward, and no race was run here"
"""Then a library's backward runs, the one that is predicted to be fastest."""
MANY_HEADS = "many key heads that nothing shares, and no race was run here"
FEW_PROGRAMS = 128
"""Heads of all batch entries that leave multiprocessors of a large GPU idle, one program each."""


def offers(graph: fx.Graph, target: Target) -> Iterator[Sequence[Offer]]:
    """The offers for each attention of a joint or inference graph of ATen operators."""
    constants = Constants(graph)
    for node in [node for node in graph.nodes if node.target in BY_FORWARD]:
        yield _offers(node, constants, target)


def _offers(node: fx.Node, constants: Constants, target: Target) -> list[Offer]:
    peer = BY_FORWARD[node.target]
    theirs, given = peer, calls.arguments(node)
    if target.is_planned_gpu and peer is ON_CPU:
        query, has_mask = tensor_of(given["query"]), given["attn_mask"] is not None
        theirs = choice(target, query.dtype, query.shape[-1], has_mask=has_mask)
    offer = Offer(OWN.name, theirs.name, node, lambda: node)
    try:
        device = tensor_of(node.all_input_nodes[0]).device
        if target.language_of(device) != "triton":
            raise Refusal(FOR_GPUS)
        if not has_triton(target, device):
            raise Refusal("Triton is not installed")
        if is_pinned(node):
            raise Refusal("the user chose among PyTorch's attention kernels")
        call = FusedAttention(node, peer, constants, target)
        if call.prefix is not None and call.splits_cache:
            kernel = f"tilewright.attention_prefix ({WRITTEN_IN[SPLIT]}, over the visible keys only)"
            return [replace(offer, kernel=kernel, apply=partial(call.rewrite, PREFIX))]
        return _raced_offers(offer, call, theirs, target)
    except Refusal as refusal:
        return [replace(offer, refusal=str(refusal))]


def _raced_offers(offer: Offer, call: FusedAttention, theirs: Peer, target: Target) -> list[Offer]:
    """Offers of all pairs of a forward and a backward whose log-sum-exps are alike; that of tilewright's first.

    They take the place of `theirs`, which is the kernel of the graph if the GPU is here.
    """
    training, own = bool(call.backwards), PREFIX if call.splits_cache else OWN
    ours, libraries = _ours(offer, call, target), _libraries(call, theirs, target)
    kernels = [*([] if ours.refusal else [own]), *libraries, *([WINDOWS] if call.fits_windows else [])]
    kernels += [WRITTEN_OUT] if call.writes_scores and WRITTEN_OUT.refuses(call.request, target) is None else []
    # Without a race the forward alone may be known to be as fast.
    is_known = not ours.refusal and ours.unraced is None
    idles = training and is_known and theirs in libraries and _idles(call.request, target)
    races = attention_races(call, kernels)
    ours = replace(ours, races=races, with_backward=training, saves=_masking(call) if races else ())
    found = [_of(replace(ours, unraced=IDLE if idles else ours.unraced), call, theirs, (own,) * (1 + training))]
    if WINDOWS in kernels:
        windows = _windows(found[0], call, theirs)
        found.insert(0 if windows.unraced is None else 1, windows)
    # A library gives way to another one only if that clearly won.
    base = replace(found[-1], refusal=None, unraced="no race was run here", clear=1 / CLEAR)
    if WRITTEN_OUT in kernels:
        found.append(_written_out(base, call, theirs))
    for pair in product([own, *libraries], repeat=1 + training):
        if {*pair} in ({own}, {theirs}) or (own in pair and ours.refusal):
            continue
        kernel = " with the backward of ".join(dict.fromkeys(peer.name for peer in pair))
        found.append(_of(replace(base, kernel=kernel), call, theirs, pair))
        if idles and pair[0] is own:
            work, instead = _work(call, *pair), _work(call, theirs, theirs)
            found[-1] = replace(found[-1], unraced=None, work=work, instead=instead)
    return found


def _masking(call: FusedAttention) -> tuple[Work, ...]:
    """The kernels that compute, for this attention alone, PyTorch's mask of what tilewright's kernels read."""
    mask, _ = call.of_library
    if mask is None or call.prefix is not None:
        return ()
    readers, alone = {call.node, *call.backwards}, set[fx.Node]()
    for node in reversed(mask.graph.nodes):
        computes = node.op == "call_function" and node not in call.masks and (node is mask or alone & {*node.users})
        if computes and {*node.users} <= alone | readers:
            alone.add(node)
    return tuple(Groups(mask.graph).works(alone)) if alone else ()


def _of(offer: Offer, call: FusedAttention, theirs: Peer, pair: Sequence[Peer]) -> Offer:
    """The offer of this forward and, in training, this backward."""
    apply = partial(call.rewrite, *(call.peer if peer is theirs else peer for peer in pair))
    return replace(offer, apply=apply, ways=tuple(THEIRS if peer is theirs else peer.name for peer in pair))


def _work(call: FusedAttention, forward: Peer, backward: Peer) -> tuple[Work, ...]:
    """The launches of a training step with this forward and this backward."""
    kinds = [attention_kind(forward.forward), *[attention_kind(backward.backward)] * len(call.backwards)]
    return tuple(
        replace(work_of([node]), kind=kind) for node, kind in zip((call.node, *call.backwards), kinds, strict=True)
    )


def _written_out(base: Offer, call: FusedAttention, theirs: Peer) -> Offer:
    """The offer of two products and a softmax; for a GPU that is not there it is predicted."""
    mask, causal = call.of_library
    # It reads the mask that tilewright's kernels make needless.
    saves = base.saves if mask is None else ()
    offer = replace(base, kernel=WRITTEN_OUT.name, saves=saves)
    if offer.races:
        hides = causal or mask is not None
        offer = replace(offer, saves=(*saves, *WRITTEN_OUT.apart(call.request, hides=hides)))
    else:
        work = WRITTEN_OUT.works(call.request, 0 if mask is None else calls.nbytes(mask))
        instead = _work(call, theirs, theirs)
        offer = replace(offer, unraced=None, work=work, instead=instead, clear=CLEAR)
    return _of(offer, call, theirs, (WRITTEN_OUT,))


def _windows(ours: Offer, call: FusedAttention, theirs: Peer) -> Offer:
    """The offer of tilewright's kernel for windows, without a race for many sequences alone."""
    r = call.request
    many = r.batch * r.heads >= MANY_WINDOWS and not (r.head_size % WIDTH or r.value_size % WIDTH)
    unraced = None if many else f"fewer than {MANY_WINDOWS} sequences and heads, and no race was run here"
    offer = replace(ours, kernel="tilewright.window_attention", refusal=None, unraced=unraced)
    return _of(offer, call, theirs, (WINDOWS,) * (1 + bool(call.backwards)))


def _libraries(call: FusedAttention, theirs: Peer, target: Target) -> list[Peer]:
    """PyTorch's kernels that take the call too, `theirs` among them."""
    takes = theirs.shares_lse and call.is_plain and call.has_rows and call.request.dtype in NARROW
    takes = takes and target.runs_on_gpu(call.request.device)
    return [peer for peer in (CUDNN, FLASH) if takes and (peer is theirs or peer.refuses(call.request, target) is None)]


def _ours(offer: Offer, call: FusedAttention, target: Target) -> Offer:
    """The offer of the kernels that the request selects; if prediction does not know them, only after a race."""
    request, training = call.request, bool(call.backwards)
    if call.splits_cache:
        kernel, slower = f"tilewright.attention_prefix ({WRITTEN_IN[SPLIT]})", None if _splits(request) else MANY_HEADS
        return replace(offer, kernel=kernel, unraced=slower)
    limits = (target.profile.limits if target.is_planned_gpu else None) or limits_of(request.device)
    try:
        ways = _implementations(request, training, limits)
    except NotImplementedError as error:
        return replace(offer, refusal=str(error))
    # The interpreter, for tests, takes every call.
    unraced = _why_not_fast(request, ways, limits) if target.is_gpu else None
    # In a plan PyTorch's kernel for CPUs stands for cuDNN.
    if unraced is None and (target.is_planned_gpu or call.peer is CUDNN) and _fills_no_tiles(request):
        unraced = "many short sequences that fill no tiles, and no race was run here"
    kernel = f"tilewright.attention ({'; backward '.join(WRITTEN_IN[way] for way in ways)})"
    return replace(offer, kernel=kernel, unraced=unraced)


def _implementations(request: Request, training: bool, limits: DeviceLimits) -> list[str]:
    """The modules of `KERNELS` that compute `request`, forward first; NotImplementedError if a direction has none."""
    from tilewright.kernels.attention.dispatch import choose

    modules = [choose(request, limits, "auto", backward).module for backward in (False, True)[: 1 + training]]
    return [module.__name__.removeprefix(f"{KERNELS}.") for module in modules]


def _fills_no_tiles(request: Request) -> bool:
    """Whether there are many sequences so short that most tiles of Hopper's kernels are partial.

    64 entries of 12 heads and 197 places, head size 64: 52 µs forward and 244 backward, cuDNN 48 and 160; at 128, 256
    and 512 places, or in few programs, these kernels are the faster ones over both directions.
    """
    partial = request.queries % TILE or request.keys % TILE
    programs = request.batch * request.heads * -(-request.queries // TILE)
    return bool(partial) and max(request.queries, request.keys) < 2 * TILE and programs > MANY_PROGRAMS


def _idles(request: Request, target: Target) -> bool:
    """Whether a program for each block of keys leaves multiprocessors idle that one for each head would fill.

    Heads 24 on 4 of 96, 2 entries of 2222 places fill 0.55 of the time and take 511 µs, cuDNN 417; 16 on 2 of 256, 1536
    places 0.36, 490 µs, cuDNN 229; 40 on 8 of 128, 6000 places 0.95, 3204 µs, cuDNN 3382.
    """
    from tilewright.kernels.attention.hopper.backward import filled

    whole = filled(request._replace(kv_heads=request.heads), target.profile.sms)
    is_long = request.group * request.queries >= LONG_WALK
    return is_long and filled(request, target.profile.sms) < LEAST_FILLED * whole


def _splits(request: Request) -> bool:
    """Whether few queries see a long cache, and splitting its keys is predicted to pay.

    It pays where heads share keys, which are then read once, and where one program a head would not fill the GPU.
    """
    from tilewright.kernels.attention.decode import triton as decode

    pays = request.group > 1 or request.batch * request.heads < FEW_PROGRAMS
    return pays and decode.refuses(request) is None


def _why_not_fast(request: Request, ways: list[str], limits: DeviceLimits) -> str | None:
    """Why kernels are not known to be as fast as PyTorch's, or None."""
    if ways == [SPLIT] and _splits(request):
        return None
    for way, own in zip(ways, ("hopper.forward", "hopper.backward"), strict=False):
        if way not in FOR_HOPPER:
            why = importlib.import_module(f"{KERNELS}.{own}").supports(request, limits)
            why = why or ("few queries or keys" if request.is_short and len(ways) > 1 else None)
            what = why or f"the kernel in {WRITTEN_IN[way]} comes first"
            return f"its Hopper kernels do not take this call ({what}), and no other was timed against PyTorch's here"
    return None


choose_kernels = chosen("attention", offers)
