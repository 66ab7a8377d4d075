"""Reads one of PyTorch's fused attentions and its backward in a graph of ATen operators, and rewrites both.

    out, lse, … = _scaled_dot_product_flash_attention(q, k, v, …)        →   out, lse, … = attention(q, k, v, …)
    dq, dk, dv = …_attention_backward(dout, q, k, v, out, lse, …)        →   dq, dk, dv = attention_backward(dout, …)

The results keep the strides of PyTorch's results, since later views were traced for these.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from tilewright.graph import calls
from tilewright.graph.canonical import same_shape, static
from tilewright.graph.insert import insert_call, replace
from tilewright.hardware.target import Target
from tilewright.passes.attention.constants import Constants
from tilewright.passes.attention.library import FILLS, Peer, Perform, Saved, options_of
from tilewright.passes.attention.mask_parts import Band, read_hidden_keys, read_mask
from tilewright.passes.attention.prefix import Prefix, prefix_of, unrepeated
from tilewright.passes.attention.spelling import Refusal, tensor_of
from tilewright.passes.zeros import shared_zeros
from tilewright.pytorch.state import in_real_tensors
from tilewright.records.recipe import dense_strides

if TYPE_CHECKING:
    from tilewright.kernels.attention.request import Request

aten = torch.ops.aten


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
                raise Refusal("causal, over queries and keys of different lengths")
            self.band = Band(None, queries - keys)
        else:
            self.band = Band(None, 0 if causal else None)
        # A kernel is compiled for one head size, also if the graph's is symbolic.
        width, scale = int(tensor_of(self.q).shape[3]), named["scale"]
        self.scale = width**-0.5 if scale is None else scale
        self._check_operands()
        self.masks = self._read_mask(constants)
        """The mask beside the band: bool tensors that must all be True, or one bias."""
        self.prefix = self._read_prefix(constants)
        """The mask, if all it says is how many of the first keys of a cache are visible."""
        self._check_results()
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
            raise Refusal("tilewright's own kernels are for GPUs, and this was captured on a CPU")
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

    def _read_mask(self, constants: Constants) -> tuple[fx.Node, ...]:
        """The parts of the mask beside its band; sets `band`."""
        if self.mask is None:
            return ()
        if self.band.right is not None:
            raise Refusal("a mask beside a causal one")
        queries, keys = self._scores()[2:]
        if static((queries, keys)):
            found = read_mask(self.mask, constants, queries, keys, self.peer.hidden_up_to)
            band = found.band(queries, keys)
            taken = (tensor_of(self.q).dtype, torch.float32)
            one_kind = not found.biases or (not found.conditions and len(found.biases) == 1)
            if band is not None and one_kind and all(tensor_of(x).dtype in taken for x in found.biases):
                self.band = band
                return found.conditions or found.biases
        if not self._fits(self.mask) and not static(self._scores()):
            raise Refusal("a mask that broadcasts over sizes that differ from call to call")
        return (self.mask,)

    def _read_prefix(self, constants: Constants) -> Prefix | None:
        if self.mask is None or self.backwards or not static(self._scores()):
            return None
        found = read_hidden_keys(self.mask, constants, self.peer.hidden_up_to)
        if len(found.conditions) != 1 or found.biases or not found.shows_all or not found.fill_values <= FILLS.keys():
            return None
        (condition,) = found.conditions
        if tensor_of(condition).shape[-1] != self._scores()[3]:
            return None
        prefix = prefix_of(condition, constants)
        shows_all = any(FILLS[fill] for fill in found.fill_values)
        return None if prefix is None else prefix._replace(else_all=shows_all)

    def _check_results(self) -> None:
        """Refuse results with gaps in memory, a layout that tilewright's results cannot have."""
        read = [self.results[0]] if 0 in self.results else []
        for node in (*read, *(result for backward in self.backwards for result in _results(backward).values())):
            _order(tensor_of(node))

    def _scores(self) -> tuple[int | torch.SymInt, ...]:
        """The shape of the scores, [B, H, Sq, Sk]."""
        return (*tensor_of(self.q).shape[:3], tensor_of(self.k).shape[2])

    def _fits(self, mask: fx.Node) -> bool:
        """Whether a mask has the shape of the scores."""
        return same_shape(tensor_of(mask).shape, self._scores())

    def _request(self) -> Request:
        """The call as plain data, with the sizes of the capture and the alignment that its strides imply."""
        from tilewright.kernels.attention.dispatch import with_aligned_rows
        from tilewright.kernels.attention.registered import request_of

        with in_real_tensors():
            q, k, v = (with_aligned_rows(_without_data(tensor_of(x))) for x in (self.q, self.k, self.v))
            mask = torch.empty((), dtype=tensor_of(self.masks[0]).dtype, device="meta") if self.masks else None
            mask = mask if mask is None else mask.expand(*q.shape[:3], k.shape[2])
            return request_of(q, k, v, mask, *self._options()[:-1])._replace(device=tensor_of(self.q).device)

    def _options(self) -> tuple[Any, ...]:
        deterministic = torch.are_deterministic_algorithms_enabled()
        return None, None, None, self.scale, *self.band, 0.0, 0.0, 0, 0, deterministic, "auto"

    def rewrite_by_prefix(self) -> fx.Node:
        """Replace the call by the operator that splits the keys, as many as the device reads that there are to see."""
        import tilewright.kernels.attention.decode.prefix  # noqa: F401, defines the operator

        request, last, rest = self.request, None, (0, False)
        if self.prefix is not None:
            last = self.prefix.write(self.node, request.batch, request.queries)
            rest = self.prefix.more, self.prefix.else_all
        zeros = shared_zeros(self.q, request.batch * request.kv_heads)
        operands = (self.q, self.k, self.v, last, *rest, zeros, self.scale)
        new = insert_call(self.node, torch.ops.tilewright.attention_prefix.default, *operands)
        if 0 in self.results:
            self._replace(self.results[0], new)
        _erase(self.node)
        return new

    def rewrite(self, forward: Peer | None = None, backward: Peer | None = None) -> fx.Node:
        """Replace the calls by others of PyTorch's, where None by tilewright's operators; returns the forward's node.

        Forward and backward are of one kind unless both share the log-sum-exp.
        """
        mask = None if forward and backward else self._written_mask()
        perform: Perform = partial(_inserted, self.node)
        saved = self._attended(perform, forward, mask)
        for call in self.backwards:
            gradients = self._differentiated(partial(_inserted, call), backward, mask, call.args[0], saved)
            for index, result in _results(call).items():
                self._replace(result, gradients[index])
            _erase(call)
        if 0 in self.results:
            self._replace(self.results[0], saved.out)
        _erase(self.node)
        new: fx.Node = saved.out.args[0] if saved.out.target is operator.getitem else saved.out
        return new

    def _written_mask(self) -> fx.Node | None:
        """The mask beside the band, of the shape of the scores."""
        mask = self.masks[0] if self.masks else None
        for part in self.masks[1:]:
            mask = insert_call(self.node, aten.logical_and.default, mask, part)
        if mask is not None and not self._fits(mask):
            mask = insert_call(self.node, aten.expand.default, mask, list(self._scores()))
        return mask

    def _attended(self, perform: Perform, kernel: Peer | None, mask: fx.Node | None) -> Saved:
        if kernel is not None:
            return kernel.attend(perform, self.library_options())
        return attend(perform, (self.q, self.k, self.v), (mask, *self._options()))

    def _differentiated(
        self, perform: Perform, kernel: Peer | None, mask: fx.Node | None, grad: Any, saved: Saved
    ) -> Sequence[Any]:
        if kernel is not None:
            return kernel.differentiate(perform, self.library_options(), grad, saved)
        return differentiate(perform, (self.q, self.k, self.v), (mask, *self._options()), grad, saved)

    @property
    def has_rows(self) -> bool:
        """Whether the rows of all operands begin at multiples of 16 bytes."""
        from tilewright.kernels.attention.dispatch import has_aligned_rows

        with in_real_tensors():
            return all(has_aligned_rows(_without_data(tensor_of(x))) for x in (self.q, self.k, self.v))

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
    def is_plain(self) -> bool:
        """Whether every kernel knows what hides keys: nothing, or a causal mask over as many queries as keys."""
        queries, keys = map(str, self._scores()[2:])
        causal = self.band == Band(None, 0) and queries == keys
        return not self.masks and (causal or self.band == Band(None, None))

    def library_options(self) -> dict[str, Any]:
        """The arguments of PyTorch's kernels."""
        mask, causal = self.mask, bool(calls.arguments(self.node)["is_causal"])
        if self.is_plain:
            mask, causal = None, self.band.right == 0
        operands, training = (self.q, self.k, self.v, mask), bool(self.backwards)
        return options_of(*operands, self._scores()[2:], training=training, causal=causal, scale=self.scale)

    def _replace(self, old: fx.Node, new: fx.Node) -> None:
        """Replace `old` by `new` with the strides of `old`, for which later views were traced.

        In a plan for an absent GPU the strides stay: there FlashAttention-2 and cuDNN give gradients the layout of the
        operands, as tilewright's kernels do.
        """
        value = tensor_of(old)
        shape, strides = calls.shape_of(value), calls.strides_of(value)
        alike = all(n == 1 or a == b for n, a, b in zip(shape, strides, calls.strides_of(tensor_of(new)), strict=True))
        if not alike and not self.target.is_planned_gpu:
            order = _order(value)
            back = [order.index(axis) for axis in range(len(order))]
            ordered = insert_call(old, aten.permute.default, new, order)
            dense = insert_call(old, aten.clone.default, ordered, memory_format=torch.contiguous_format)
            new = insert_call(old, aten.permute.default, dense, back)
        replace(old, new)


def attend_cache(perform: Perform, operands: Sequence[Any], zeros: Any, scale: float) -> Saved:
    """tilewright's forward of few queries that see a whole cache."""
    import tilewright.kernels.attention.decode.prefix  # noqa: F401, defines the operator

    forward = torch.ops.tilewright.attention_prefix.default
    return Saved(*perform(forward, None, *operands, None, 0, False, zeros, scale), *[None] * 3)


def attend(perform: Perform, operands: Sequence[Any], options: Sequence[Any]) -> Saved:
    """tilewright's forward."""
    import tilewright.kernels.attention.registered  # noqa: F401, defines the operators

    forward = torch.ops.tilewright.attention.default
    out, lse, lse64, state = perform(forward, range(4), *operands, *options)
    return Saved(out, lse, state, state, lse64)


def differentiate(
    perform: Perform, operands: Sequence[Any], options: Sequence[Any], grad: Any, saved: Saved
) -> Sequence[Any]:
    """tilewright's backward of a forward that shares its log-sum-exp."""
    import tilewright.kernels.attention.registered  # noqa: F401, defines the operators

    backward = torch.ops.tilewright.attention_backward.default
    out, lse, state, _, lse64 = saved
    if lse64 is None:
        # Of 16-bit operands without dropout these are empty.
        (lse64,) = perform(aten.new_empty.default, None, lse, [0], dtype=torch.float64)
        (state,) = perform(aten.new_empty.default, None, lse, [0], dtype=torch.int64)
        if not (tensor_of(lse) if isinstance(lse, fx.Node) else lse).is_contiguous():
            (lse,) = perform(aten.clone.default, None, lse, memory_format=torch.contiguous_format)
    return perform(backward, range(3), grad, None, *operands, out, lse, lse64, state, *options)


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


def _without_data(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(calls.shape_of(value), calls.strides_of(value), dtype=value.dtype, device="meta")


def _order(value: torch.Tensor) -> list[int]:
    """The axes of a dense tensor from the outermost in memory to the innermost."""
    sizes, strides = calls.shape_of(value), calls.strides_of(value)
    order = sorted(range(len(sizes)), key=lambda axis: (-strides[axis], axis))
    dense = dense_strides(sizes, order)
    if any(size > 1 and stride != step for size, stride, step in zip(sizes, strides, dense, strict=True)):
        raise Refusal("PyTorch's kernel leaves gaps in its result")
    return order


def _erase(node: fx.Node) -> None:
    """Erase a call with several results, none of which has a reader."""
    for result in list(node.users):
        node.graph.erase_node(result)
    node.graph.erase_node(node)
