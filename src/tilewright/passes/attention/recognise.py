"""Attention that a user wrote out becomes fused attention, before autograd sees it.

    s = q @ k.transpose(-2, -1)                          [B, H, N, N]
    s = s / sqrt(d) + mask                               [B, H, N, N]   →   out = attention(q, k, v, mask)
    w = softmax(s, -1)                                   [B, H, N, N]           [B, H, N, d]
    out = w @ v                                          [B, H, N, d]

Autograd then differentiates the fused form, and no tensor of N² elements is written or saved. In-place operators on the
scores become functional ones first, if no other node can see the write. What is found but cannot be replaced is a
decision too, with its reason.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod

import torch
from torch.fx import Graph, Node

from tilewright.cost.kinds import attention_kind, attention_us
from tilewright.graph import calls
from tilewright.graph.canonical import (
    MODES,
    argument,
    canonical_name,
    example,
    memory_of,
    mutates,
    same_shape,
    tensor_of,
    written_by,
)
from tilewright.graph.constants import CONSTANT, Constants
from tilewright.graph.insert import Writer
from tilewright.graph.source import source_line
from tilewright.hardware.target import Target
from tilewright.passes.attention.form import check_form, write_attention
from tilewright.passes.attention.library import ON_CPU, RECOGNISED, choice
from tilewright.passes.attention.mask import Masking, classify_masks
from tilewright.passes.attention.mask_parts import EVERYWHERE
from tilewright.passes.attention.match import Attention, match_attention, product_above, product_below
from tilewright.passes.attention.own import in_windows
from tilewright.passes.attention.spelling import ENDS, PRODUCTS, Softmax, scores_at, softmax_at, why_no_softmax
from tilewright.passes.rule import between, memories, undecided
from tilewright.records.errors import Refusal
from tilewright.records.program import Cost, Decision

PURE = (
    CONSTANT
    | PRODUCTS
    | {"empty", "softmax", "log_softmax", "logsumexp", "exp", "max", "amax", "sum", "size", "detach"}
)
"""Calls without side effects: erased once they have no reader."""
VIEWS = frozenset({"view", "unsqueeze", "squeeze", "getitem", "getattr", "expand", "detach", "dropout"})


def recognise_attention(graph: Graph, target: Target) -> list[Decision]:
    """Replace every attention in `graph`, a torch-level graph from Dynamo, in place.

    Each softmax between two matrix products gives one decision (`passed_by="attention"`): taken
    with the bytes of the N² tensors that vanish, or refused with the reason; either with the predicted time of the
    fused kernel's forward.
    """
    if not any(canonical_name(node) in ("softmax", "exp") for node in graph.nodes):
        return []
    write_scores_apart(graph)
    candidates = [(*root, *around) for root in _softmaxes(graph) if (around := _products_around(*root)) is not None]
    constants = Constants(graph)
    return [_decide(graph, *candidate, constants, target) for candidate in candidates]


def _softmaxes(graph: Graph) -> list[tuple[Node, Softmax | None]]:
    """The results of the outermost softmaxes, and of calls that are none but look like one."""
    found, inside = list[tuple[Node, Softmax | None]](), set[Node]()
    for node in reversed(graph.nodes):
        if canonical_name(node) in ENDS and node not in inside:
            softmax = softmax_at(node)
            if softmax is not None or why_no_softmax(node) is not None:
                found.insert(0, (node, softmax))
                inside |= {*node.all_input_nodes} if softmax is None else {*softmax.inside}
    return found


def _products_around(root: Node, softmax: Softmax | None) -> tuple[Node, Node] | None:
    above = product_above(root if softmax is None else softmax.source)
    below = product_below(root) if above is not None else None
    return None if above is None or below is None else (above, below)


def _decide(
    graph: Graph, root: Node, softmax: Softmax | None, above: Node, below: Node, constants: Constants, target: Target
) -> Decision:
    here = replace(undecided(below, "attention", above), source=source_line(root))
    here = replace(here, producer=above.name, predicted_us=_predicted(above, below, target))
    try:
        if softmax is None:
            raise Refusal(why_no_softmax(root) or "")
        attention = match_attention(softmax, constants.scalar)
        masking = classify_masks(attention, constants)
        within = in_windows(attention, masking, target)
        if not within:
            check_form(attention, masking, target)
        _check_order(attention)
        unread = _unread_afterwards(attention, masking)
        saved = sum(_nbytes(node, attention.scores) for node in attention.replaced)
        write = partial(write_attention, graph, attention, masking, target, windows=within)
        _replace(graph, attention, unread, write)
    except Refusal as refusal:
        return replace(here, reason=str(refusal))
    reason = f"fused attention{_kind(attention, masking, within)}: no N² tensor is written or saved"
    return replace(here, verdict="taken", reason=reason, bytes_saved=saved)


def _kind(attention: Attention, masking: Masking, within: bool) -> str:
    how = "with its mask" if masking.masks else "unmasked"
    how = "causal" if masking.causal else "in a band" if masking.band != EVERYWHERE else how
    where = " within windows" if within else " under a soft cap" if attention.softcap else ""
    where = " beside a sink" if attention.softmax.sink is not None else where
    return f"{where}, {how}"


def _predicted(above: Node, below: Node, target: Target) -> float | None:
    """The price of the fused forward of these two products, by PyTorch's kernel for them: q, k and v read once, out and
    the log-sum-exp written."""
    try:
        query, scores, result = scores_at(above).q, tensor_of(above), tensor_of(below)
        depth = _hint(tensor_of(query.node).shape[-1 if query.order is None else query.order[-1]])
    except Refusal:
        return None
    *_, queries, keys = map(_hint, scores.shape)
    pairs, written = prod(map(_hint, scores.shape)), prod(map(_hint, result.shape))
    if not pairs:
        return None
    heads, rows = pairs // (queries * keys), pairs // keys
    width = written // rows
    read = heads * (queries * depth + keys * (depth + width))
    size = result.element_size()
    cost = Cost(
        reads=read,
        writes=written + rows,
        bytes_read=read * size,
        bytes_written=written * size + rows * 4,
        flops=2 * pairs * (depth + width),
        transcendentals=pairs,
    )
    library = choice(target, result.dtype, depth, has_mask=False) if target.is_gpu else ON_CPU
    kind, dtype = attention_kind(library.forward), str(result.dtype).removeprefix("torch.")
    return attention_us(kind, cost, dtype, target.profile)


def _check_order(attention: Attention) -> None:
    """Refuse where what the attention has read is written, or a mode changes, before the fused form reads it."""
    members = {*attention.replaced, *attention.folded} - {attention.result}
    for node in between(members, attention.result):
        members.discard(node)
        if canonical_name(node) in MODES:
            raise Refusal(f"{node.name} changes a mode between the products")
        if mutates(node) and memory_of(written_by(node)) in memories(members):
            raise Refusal(f"{node.name} writes in place between the products to what they read")


def _unread_afterwards(attention: Attention, masking: Masking) -> set[Node]:
    """The nodes without readers after the rewrite; Refusal if something else reads an N² tensor."""
    inside = {*attention.replaced, attention.result}
    kept = {attention.q.node, attention.k.node, attention.v.node, *(x for _, x in attention.factors)}
    kept |= {term.mask for term in masking.masks}
    if attention.softmax.sink is not None:
        kept.add(attention.softmax.sink)
    unread = set(inside)

    def is_unread(node: Node) -> bool:
        if node in unread:
            return True
        if node in kept or node.op not in ("call_function", "call_method") or canonical_name(node) not in PURE:
            return False
        if not all(is_unread(user) for user in node.users):
            return False
        unread.add(node)
        return True

    for node in attention.replaced:
        for user in node.users:
            if not is_unread(user):
                reader = "the caller" if user.op == "output" else user.name
                raise Refusal(f"{node.name} is also used by {reader}: its N² values must be written")
    return unread


def _nbytes(node: Node, scores: Node) -> int:
    """Bytes of `node`'s own N² values; 0 for a view, a row statistic, or a call that does nothing."""
    value, whole = example(node), example(scores)
    if value is None or whole is None or canonical_name(node) in VIEWS:
        return 0
    sizes = [_hint(size) for size in value.shape]
    if len(sizes) < 2 or sizes[-2:] != [_hint(size) for size in whole.shape[-2:]]:
        return 0
    source = example(argument(node, 0, "input"))
    if canonical_name(node) == "cast" and source is not None and source.dtype == value.dtype:
        return 0
    return prod(sizes) * value.element_size()


def _hint(size: int | torch.SymInt) -> int:
    """A size; of a symbol, the size it had when it was traced."""
    return size if isinstance(size, int) else int(size.node.hint or 0)


def _replace(graph: Graph, attention: Attention, unread: set[Node], write: Callable[[], Node]) -> None:
    result, before = attention.result, set(graph.nodes)
    try:
        new = write()
    except Refusal:
        for node in reversed([node for node in graph.nodes if node not in before]):
            graph.erase_node(node)
        raise
    for node in graph.nodes:
        if node not in before:
            calls.mark(node, RECOGNISED)
    result.replace_all_uses_with(new)
    # Erase what only the old form read, too: constants of masks, transposes of k.
    old = {*attention.replaced, *attention.folded, *unread, result}
    for node in reversed(list(graph.nodes)):
        if not node.users and (node in old or canonical_name(node) in PURE):
            graph.erase_node(node)


FUNCTIONS: dict[str, Callable[..., object]] = {
    "iadd": operator.add, "isub": operator.sub, "imul": operator.mul, "itruediv": operator.truediv,
}  # fmt: skip
METHODS = frozenset({"add_", "sub_", "mul_", "div_", "masked_fill_", "tanh_"})


def write_scores_apart(graph: Graph) -> None:
    """Rewrite `graph`, a torch-level graph from Dynamo, in place: in-place calls between two matrix products."""
    nodes = list(graph.nodes)
    if any(canonical_name(node) == "_enter_inference_mode" for node in nodes):
        return
    places = {node: place for place, node in enumerate(nodes)}
    enabled = True
    for node in nodes:
        if canonical_name(node) == "_set_grad_enabled":
            enabled = node.args[0] is True
        written = node.args[0] if node.args and canonical_name(node) in (*FUNCTIONS, *METHODS) else None
        # With gradients off, a written tensor still requires its gradient, but a new tensor would not.
        value = example(written)
        if not isinstance(written, Node) or value is None or (value.requires_grad and not enabled):
            continue
        between = product_above(node) is not None and product_below(node if node.users else written) is not None
        if between and _is_seen_alone(node, written, places):
            _write_apart(node, written, places)


def _is_seen_alone(node: Node, written: Node, places: dict[Node, int]) -> bool:
    """Whether later calls read the memory that `node` writes only through `written` or the result of `node`."""
    here, memory = places[node], memory_of(written)
    aliases = [x for x in places if places[x] < here and memory_of(x) == memory]
    if not all(x.op in ("call_function", "call_method") for x in aliases):
        return False
    return all(places[user] <= here for x in aliases if x is not written for user in x.users)


def _write_apart(node: Node, written: Node, places: dict[Node, int]) -> None:
    write, name = Writer(node.graph, node), str(canonical_name(node))
    if name in FUNCTIONS:
        new = write.call(FUNCTIONS[name], *node.args, **node.kwargs)
    else:
        new = write.method(name.removesuffix("_"), *node.args, **node.kwargs)
    before, after = tensor_of(written), tensor_of(new)
    alike = same_shape(before.shape, after.shape) and same_shape(before.stride(), after.stride())
    if not alike or before.dtype != after.dtype:
        node.graph.erase_node(new)
        return
    places[new] = here = places.pop(node)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    for user in list(written.users):
        if places[user] > here:
            user.replace_input_with(written, new)
