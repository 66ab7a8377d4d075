"""Reads one of PyTorch's fused attentions and its backward in a graph of ATen operators, and rewrites both.

    out, lse, … = _scaled_dot_product_flash_attention(q, k, v, …)        →   out, lse, … = attention(q, k, v, …)
    dq, dk, dv = …_attention_backward(dout, q, k, v, out, lse, …)        →   dq, dk, dv = attention_backward(dout, …)

The results keep the strides of PyTorch's results, since later views were traced for these.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from tilewright.graph import calls
from tilewright.graph.canonical import same_shape, static, tensor_of
from tilewright.graph.constants import Constants
from tilewright.graph.insert import insert_call, insert_formula, replace
from tilewright.graph.layouts import laid_by, memory_order
from tilewright.hardware.target import FOR_GPUS, Target
from tilewright.passes.attention.library import OWN, PREFIX, RECOGNISED, Peer, options_of
from tilewright.passes.attention.mask_parts import Band, Prefix, prefix_of, read_hidden_keys
from tilewright.passes.attention.spelling import unrepeated
from tilewright.passes.zeros import shared_zeros
from tilewright.pytorch.state import in_real_tensors
from tilewright.records.errors import Refusal
from tilewright.records.recipe import dense_strides

if TYPE_CHECKING:
    from tilewright.kernels.attention.request import Request

aten = torch.ops.aten
MOST_SCORES, MOST_RECOGNISED = 1, 4
"""Bytes of scores that may be written over those of q, k, v and the result; the second if the program writes them too,
at least three times. 256 queries and keys of heads of 64 have 1, 1024 have 4."""


class FusedAttention:
    """One fused attention of a graph with its backward. Raises Refusal if tilewright's kernels cannot replace it."""

    def __init__(self, node: fx.Node, peer: Peer, constants: Constants, target: Target) -> None:
        self.node, self.peer, self.target = node, peer, target
        named = calls.arguments(node)
        self.q, self.k, self.v = (_node(named[name]) for name in ("query", "key", "value"))
        mask = named.get("attn_bias", named.get("attn_mask"))
        self.mask = mask if isinstance(mask, fx.Node) else None
        if named["dropout_p"] != 0.0:
            raise Refusal("dropout on the weights, whose mask must be the one that eager draws")
        self.results = _results(node)
        self.backwards = self._find_backwards()
        if not self.backwards and all(unrepeated(x) is not x for x in (self.k, self.v)):
            self.k, self.v = unrepeated(self.k), unrepeated(self.v)
        queries, keys = (tensor_of(x).shape[2] for x in (self.q, self.k))
        causal = bool(named["is_causal"])
        if causal and str(queries) != str(keys):
            if not (isinstance(queries, int) and isinstance(keys, int) and peer.causal_from_start):
                raise Refusal("it is causal, but queries and keys differ in length")
            self.band = Band(None, queries - keys)
        else:
            self.band = Band(None, 0 if causal else None)
        # A kernel is compiled for one head size, also if the graph's is symbolic.
        width, scale = int(tensor_of(self.q).shape[3]), named["scale"]
        self.scale: Any = width**-0.5 if scale is None else scale
        self._check_operands()
        self.masks: tuple[fx.Node, ...] = ()
        """The mask beside the band: bool tensors that must all be True, or one bias."""
        self.prefix: Prefix | None = None
        """The mask, if all it says is how many of the first keys of a cache are visible."""
        if self.mask is not None:
            self._read_mask(self.mask, constants)
        read = [self.results[0]] if 0 in self.results else []
        for result in (*read, *(result for call in self.backwards for result in _results(call).values())):
            _order(tensor_of(result))
        self.request = self._request()

    def _find_backwards(self) -> list[fx.Node]:
        """The calls of the peer's backward for this forward; no other call may read the forward's statistics."""
        found: list[fx.Node] = []
        out = self.results.get(0)
        for index, result in self.results.items():
            for user in result.users:
                named = calls.arguments(user)
                if user.target is self.peer.backward and named["out"] is out:
                    found.append(user)
                elif index:
                    reader = "the caller" if user.op == "output" else user.name
                    raise Refusal(f"{reader} reads result {index} of PyTorch's own kernel")
        found = list(dict.fromkeys(found))
        for backward in found:
            named = calls.arguments(backward)
            if [named[name] for name in ("query", "key", "value")] != [self.q, self.k, self.v]:
                raise Refusal(f"{backward.name} reads other operands than its forward")
            if 3 in _results(backward):
                raise Refusal("the mask needs a gradient")
        return found

    def _check_operands(self) -> None:
        from tilewright.kernels.device import DTYPES, interpreted

        operands = q, k, v = tensor_of(self.q), tensor_of(self.k), tensor_of(self.v)
        if not self.target.runs_on_gpu(q.device) and not interpreted():
            raise Refusal(FOR_GPUS)
        if any(getattr(x, "fake_mode", None) is None for x in operands):
            raise Refusal("the graph was not traced with fake tensors")
        if q.dtype not in DTYPES or {q.dtype} != {k.dtype, v.dtype}:
            raise Refusal(f"{q.dtype}: the kernels take bfloat16, float16 and float32")
        batches, heads = ({str(x.shape[axis]) for x in operands} for axis in (0, 1))
        grouped = all(isinstance(x.shape[1], int) for x in operands) and k.shape[1] == v.shape[1]
        if len(batches) > 1 or (len(heads) > 1 and not (grouped and q.shape[1] % max(k.shape[1], 1) == 0)):
            raise Refusal("operands that broadcast")
        sizes = [size for x in operands for size in zip(calls.shape_of(x), calls.strides_of(x), strict=True)]
        if any(size == 0 for size, _ in sizes):
            raise Refusal("empty tensors")
        if any(size > 1 and stride == 0 for size, stride in sizes):
            raise Refusal("an expanded operand")
        if not isinstance(self.scale, float):
            raise Refusal("a scale that differs from call to call")

    def _read_mask(self, mask: fx.Node, constants: Constants) -> None:
        """Set `band`, `masks` and `prefix`."""
        if self.band.right is not None:
            raise Refusal("it has a mask and is causal, too")
        queries, keys = self._scores()[2:]
        self.masks = (mask,)
        if static((queries, keys)):
            hidden = read_hidden_keys(mask, constants, self.peer.hidden_up_to)
            if not self.backwards and static(self._scores()):
                self.prefix = prefix_of(hidden, constants, keys)
            found = hidden.or_opaque(mask, queries, keys)
            band = found.band(queries, keys)
            taken = (tensor_of(self.q).dtype, torch.float32)
            one_kind = not found.biases or (not found.conditions and len(found.biases) == 1)
            if band is not None and one_kind and all(tensor_of(x).dtype in taken for x in found.biases):
                self.band, self.masks = band, found.conditions or found.biases
                return
        if not self._fits(mask) and not static(self._scores()):
            raise Refusal("a mask that broadcasts over sizes that differ from call to call")

    def _scores(self) -> tuple[int | torch.SymInt, ...]:
        """The shape of the scores, [B, H, Sq, Sk]."""
        return (*tensor_of(self.q).shape[:3], tensor_of(self.k).shape[2])

    def _fits(self, mask: fx.Node) -> bool:
        """Whether a mask has the shape of the scores."""
        return same_shape(tensor_of(mask).shape, self._scores())

    def _request(self) -> Request:
        """The call as plain data, with the sizes of the capture and the alignment that its strides imply."""
        from tilewright.kernels.attention.dispatch import has_aligned_rows, with_aligned_rows
        from tilewright.kernels.attention.registered import request_of

        deterministic = torch.are_deterministic_algorithms_enabled()
        with in_real_tensors():
            lie = ((calls.shape_of(x), calls.strides_of(x), x.dtype) for x in map(tensor_of, (self.q, self.k, self.v)))
            given = [torch.empty_strided(*sizes, dtype=dtype, device="meta") for *sizes, dtype in lie]
            self.has_rows = all(map(has_aligned_rows, given))
            """Whether the rows of all operands begin at multiples of 16 bytes."""
            q, k, v = map(with_aligned_rows, given)
            mask = torch.empty((), dtype=tensor_of(self.masks[0]).dtype, device="meta") if self.masks else None
            mask = mask if mask is None else mask.expand(*q.shape[:3], k.shape[2])
            rest = *self.band, 0.0, 0.0, 0, 0, deterministic
            return request_of(q, k, v, mask, None, None, None, self.scale, *rest)._replace(
                device=tensor_of(self.q).device
            )

    def rewrite(self, forward: Peer = OWN, backward: Peer = OWN) -> fx.Node:
        """Replace the calls by those of other kernels, of one kind or sharing the log-sum-exp; the forward's node."""
        options = self._options({forward, backward} if self.backwards else {forward})
        saved = forward.attend(partial(_inserted, self.node), options)
        for call in self.backwards:
            gradients = backward.differentiate(partial(_inserted, call), options, call.args[0], saved)
            for index, result in _results(call).items():
                self._replace(result, gradients[index])
            _erase(call)
        if 0 in self.results:
            self._replace(self.results[0], saved.out)
        _erase(self.node)
        new: fx.Node = saved.out.args[0] if saved.out.target is operator.getitem else saved.out
        return new

    def _options(self, kernels: Container[Peer]) -> dict[str, Any]:
        """The arguments of these kernels by name."""
        own: dict[str, Any] = {}
        if OWN in kernels:
            own = {"mask": self._written_mask(), "left": self.band.left, "right": self.band.right}
        elif PREFIX in kernels:
            own["zeros"] = shared_zeros(self.q, self.request.batch * self.request.kv_heads)
            if self.prefix is not None:
                own["prefix"] = self.prefix.write(self.node, self.request.batch, self.request.queries)
                own |= {"more": self.prefix.more, "else_all": self.prefix.else_all}
        mask, causal = self.of_library
        operands, training = (self.q, self.k, self.v, mask), bool(self.backwards)
        return options_of(*operands, self._scores()[2:], training=training, causal=causal, scale=self.scale, **own)

    def _written_mask(self) -> fx.Node | None:
        """The mask beside the band, of the shape of the scores."""
        mask = self.masks[0] if self.masks else None
        for part in self.masks[1:]:
            mask = insert_call(self.node, aten.logical_and.default, mask, part)
        if mask is not None and not self._fits(mask):
            mask = insert_call(self.node, aten.expand.default, mask, list(self._scores()))
        return mask

    @property
    def splits_cache(self) -> bool:
        """Whether `attention_prefix` computes it: few queries, whose number is known, see a whole cache or a prefix."""
        from tilewright.kernels.attention.decode.prefix import takes

        unmasked = self.request._replace(mask="none") if self.prefix is not None else self.request
        return not self.backwards and unmasked.mask == "none" and takes(unmasked) and static(self._scores())

    @property
    def fits_windows(self) -> bool:
        """Whether the kernel for windows computes it: short sequences whose places all see each other."""
        from tilewright.kernels.attention.window.triton import refuses

        r = self.request
        sees_all = not self.masks and self.band == Band(None, None) and r.group == 1 and static(self._scores())
        return sees_all and refuses(r.dtype, r.queries, r.keys, r.head_size, r.value_size) is None

    @property
    def writes_scores(self) -> bool:
        """Whether its scores may be written to memory: it has no backward, their sizes are known, and they are few
        beside its operands and its result, unless the program itself writes them."""
        knows_band = self.is_plain or not self.of_library[1]
        if self.backwards or not knows_band or not static(self._scores()):
            return False
        r, most = self.request, MOST_RECOGNISED if calls.is_marked(self.node, RECOGNISED) else MOST_SCORES
        return r.queries * r.keys <= most * (r.queries + r.keys) * (r.head_size + r.value_size)

    @property
    def is_plain(self) -> bool:
        """Whether every kernel knows what hides keys: nothing, or a causal mask over as many queries as keys."""
        queries, keys = map(str, self._scores()[2:])
        causal = self.band == Band(None, 0) and queries == keys
        return not self.masks and (causal or self.band == Band(None, None))

    @property
    def of_library(self) -> tuple[fx.Node | None, bool]:
        """The mask of PyTorch's kernels, and whether they are causal."""
        if self.is_plain:
            return None, self.band.right == 0
        return self.mask, bool(calls.arguments(self.node)["is_causal"])

    def _replace(self, old: fx.Node, new: fx.Node) -> None:
        """Replace `old` by `new` with the strides of `old`, for which later views were traced.

        In a plan for an absent GPU the strides stay: there FlashAttention-2 and cuDNN give gradients the layout of the
        operands, as tilewright's kernels do.
        """
        value = tensor_of(old)
        shape, strides = calls.shape_of(value), calls.strides_of(value)
        alike = all(n == 1 or a == b for n, a, b in zip(shape, strides, calls.strides_of(tensor_of(new)), strict=True))
        if not alike and not self.target.is_planned_gpu:
            new = insert_formula(old, laid_by, new, _order(value))
        replace(old, new)


def _inserted(
    before: fx.Node, operator_: Any, wanted: Sequence[int] | None, *args: Any, **kwargs: Any
) -> Sequence[fx.Node]:
    """`Perform` in the graph of `before`."""
    node = insert_call(before, operator_, *args, **kwargs)
    return [node] if wanted is None else [insert_call(before, operator.getitem, node, index) for index in wanted]


def _node(argument: object) -> fx.Node:
    if not isinstance(argument, fx.Node):
        raise Refusal("an operand is no tensor of the graph")
    return argument


def _results(node: fx.Node) -> dict[int, fx.Node]:
    """The results that are read, by index."""
    found: dict[int, fx.Node] = {}
    for user in node.users:
        index = user.args[1]
        if user.users and isinstance(index, int) and found.setdefault(index, user) is not user:
            raise Refusal(f"result {index} of {node.name} is taken twice")
    return found


def _order(value: torch.Tensor) -> list[int]:
    """The axes of a dense tensor from the outermost in memory to the innermost. Raises Refusal if it has gaps, which
    tilewright's results cannot have."""
    sizes, strides = calls.shape_of(value), calls.strides_of(value)
    order = memory_order(strides)
    dense = dense_strides(sizes, order)
    if any(size > 1 and stride != step for size, stride, step in zip(sizes, strides, dense, strict=True)):
        raise Refusal("PyTorch's kernel leaves gaps in its result")
    return order


def _erase(node: fx.Node) -> None:
    """Erase a call with several results, none of which has a reader."""
    for result in list(node.users):
        node.graph.erase_node(result)
    node.graph.erase_node(node)
