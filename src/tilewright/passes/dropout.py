"""Dropout draws in the kernel that applies its mask, from a saved state of the generator.

    y, mask = native_dropout(x, p, True)     →   mask = keep_mask(x, p)
                                                 y = x · mask / (1 - p)

The numbers are those that eager's elementwise dropout would draw, in the same order. On a CPU only the generator's
state before the draw is kept, and the kernel that applies the mask computes it:

    stream = draw_stream(x.shape);  mask = keep(stream, x.shape, order, 1 - p)

PyTorch draws serially from MT19937: an element takes two words, and is True where their 53 low bits, as a fraction, are
below p. A stream is int32 [8, 626]. Each row is a state of the generator, so that a thread can begin at any of them:
the last word before a block of 624, the block, and one number, which in row 0 is the word of the block at which the
draw begins and in row 1 the number of blocks between rows. The implementations here fill row 0 only, for graphs that
run without kernels; kernels use `emit/random.h`.

On a GPU seed and offset are kept, and the numbers are Philox's (`kernels/dropout_add/philox.py`). Consecutive draws
share one state, which advances by the sum of their advances:

    state = draw_philox(like, advance);  mask = keep_philox(state, x.shape, order, 1 - p, …)

PyTorch itself draws a mask (`keep_mask`), which is then kept, if it is small on a CPU, if it is fp64 or has a dynamic
size on a GPU, or if this PyTorch draws by another algorithm. With p = 0, or not in training, dropout is the identity;
with p = 1 it multiplies by zero. Neither draws.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from math import prod

import torch
from torch import fx

from tilewright.graph import calls
from tilewright.graph.insert import insert_known, replace_results
from tilewright.graph.layouts import layout
from tilewright.hardware.architectures import DeviceLimits, limits_of
from tilewright.hardware.target import Target
from tilewright.kernels.device import DTYPES
from tilewright.kernels.dropout_add import generator
from tilewright.kernels.dropout_add.philox import draw_philox, keep_philox
from tilewright.kernels.registration import define
from tilewright.measure.truth.contract import ulp
from tilewright.operators.random import threshold
from tilewright.passes.simplify import is_pure
from tilewright.pytorch.state import in_real_tensors

aten = torch.ops.aten
BLOCK = 624
"""Words of the generator's state."""
SHAPE = (8, BLOCK + 2)
ONE_ROW = 2**30
"""Blocks between rows of a stream that has only one row."""

_LEFT = 2
_WORDS = slice(6, 6 + 2 * BLOCK, 2)
"""Where `torch.Generator.get_state()`, read as int32, holds the words left of the block and (each in 64 bits)
the block; the place of the next word is at 4."""


def _draw_stream(size: Sequence[int]) -> torch.Tensor:
    state = torch.default_generator.get_state()
    torch.empty(list(size), dtype=torch.bool).bernoulli_(0.5)
    words = state.view(torch.int32)
    stream = torch.zeros(SHAPE, dtype=torch.int32)
    stream[0, 1:-1] = words[_WORDS]
    stream[0, -1] = BLOCK + 1 - words[_LEFT]
    stream[1, -1] = ONE_ROW
    return stream


def example_stream(elements: int) -> torch.Tensor:
    """A stream of `draws` numbers with all its rows, not from a generator: for timing kernels that read a stream."""
    stream = torch.randint(1, 2**31 - 1, SHAPE, dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    stream[0, -1] = 0
    stream[1, -1] = 2 * elements // BLOCK // SHAPE[0] + 1
    return stream


def _keep(stream: torch.Tensor, size: Sequence[int], order: Sequence[int], p: float) -> torch.Tensor:
    generator = torch.Generator()
    state = generator.get_state()
    words = state.view(torch.int32)
    words[_WORDS] = stream[0, 1:-1]
    words[_LEFT], words[4] = BLOCK + 1 - stream[0, -1], stream[0, -1]
    generator.set_state(state)
    return _laid_out(size, order).bernoulli_(p, generator=generator)


def _laid_out(size: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """An empty mask whose memory runs along the dimensions in `order`, the last one fastest."""
    strides = [1] * len(size)
    reach = 1
    for dim in reversed(order):
        strides[dim] = reach
        reach = reach * size[dim]
    return torch.empty_strided(size, strides, dtype=torch.bool)


define("draw_stream", _draw_stream, lambda size: torch.empty(SHAPE, dtype=torch.int32))
define("keep", _keep, lambda stream, size, order, p: _laid_out(size, order))
# Graphs call the operators themselves.
draw_stream = torch.ops.tilewright.draw_stream.default
keep = torch.ops.tilewright.keep.default


@cache
def generator_is_known() -> bool:
    """Whether this PyTorch draws by the expected algorithm: compared with Python's MT19937 once per process.

    A build that draws by another library does not (PyTorch with MKL before 2.5). The user's generator is not touched.
    """
    with in_real_tensors():
        generator = torch.Generator().manual_seed(20)
        torch.empty(3, dtype=torch.int32).random_(generator=generator)
        return all(_draws_as_known(generator, p) for p in (0.1, 0.5, 0.9))


def _draws_as_known(generator: torch.Generator, p: float) -> bool:
    """One draw in a transposed layout, over two blocks and into a third; then the state it leaves."""
    left, state = _state(generator)
    twin = random.Random()
    twin.setstate((3, (*state, BLOCK + 1 - left), None))
    below = threshold(p)
    expected = [(twin.getrandbits(32) & 0x1FFFFF) << 32 | twin.getrandbits(32) < below for _ in range(700)]
    mask = torch.empty(35, 20, dtype=torch.bool).t().bernoulli_(p, generator=generator)
    *words, place = twin.getstate()[1]
    return mask.t().flatten().tolist() == expected and _state(generator) == (BLOCK + 1 - place, words)


def _state(generator: torch.Generator) -> tuple[int, list[int]]:
    """How many words of the block are left, and the block."""
    words = generator.get_state().view(torch.int32).tolist()
    return words[_LEFT], [word % 2**32 for word in words[_WORDS]]


FEWEST = 32768
"""PyTorch draws smaller masks: saving a stream's 20 kB instead of the mask would hardly pay."""


@fx.has_side_effect
def keep_mask(like: torch.Tensor, p: float) -> torch.Tensor:
    """The boolean mask that eager dropout with probability `p` would draw now for a tensor like `like`."""
    if like.device.type == "cpu":
        return torch.empty_like(like, dtype=torch.bool).bernoulli_(1 - p)
    # PyTorch numbers the elements of a tensor with gaps in another order.
    alike = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    mask: torch.Tensor = torch.ops.aten.native_dropout(alike, p, True)[1]
    return mask


def _operand_laid_alike(x: fx.Node) -> fx.Node:
    """The earliest tensor from which pointwise operators compute `x` and that has its layout and dtype."""
    while calls.class_of(x) == "pointwise":
        alike = next((operand for operand in x.all_input_nodes if layout(operand) == layout(x)), None)
        if alike is None:
            break
        x = alike
    return x


def _by_stream(node: fx.Node, x: fx.Node, p: float) -> fx.Node | None:
    """The mask of dropout `node` from a stream of the CPU's generator; None if PyTorch must draw it."""
    mask = node.meta["val"][1]
    if prod(calls.shape_of(mask)) < FEWEST or not generator_is_known():
        return None
    size = [_extent(node, x, dim) for dim in range(mask.dim())]
    stream = insert_known(node, draw_stream, mask.new_empty(SHAPE, dtype=torch.int32), size)
    return insert_known(node, keep, mask, stream, size, _memory_order(mask), 1 - p)


def _memory_order(tensor: torch.Tensor) -> list[int]:
    """Dimensions, the outermost in memory first."""
    strides = calls.strides_of(tensor)
    return sorted(range(tensor.dim()), key=lambda dim: -strides[dim])


class _PhiloxDraws:
    """The draws of a GPU's generator in one graph, in order."""

    def __init__(self, device: torch.device, limits: DeviceLimits) -> None:
        self._device = device
        self._most_blocks = generator.most_blocks(limits)
        self._state: fx.Node | None = None

    def interrupt(self) -> None:
        """Note that another draw follows, so that the next dropout begins a new state."""
        self._state = None

    def mask(self, node: fx.Node, x: fx.Node, p: float) -> fx.Node | None:
        """The mask of dropout `node`; None if PyTorch must draw it."""
        mask, value = node.meta["val"][1], x.meta["val"]
        if value.device != self._device or value.dtype not in DTYPES:
            return None
        if any(not isinstance(n, int) for n in mask.shape) or not mask.numel():
            return None
        # PyTorch's kernel numbers the elements of a tensor with gaps one by one, in its own order.
        is_dense = value.permute(_memory_order(value)).is_contiguous()
        alignment = generator.VECTOR_BYTES if is_dense else value.element_size()
        geometry = generator.geometry(mask.numel(), value.element_size(), alignment, self._most_blocks)
        order = _memory_order(value) if is_dense and geometry.vector > 1 else list(range(mask.dim()))
        if self._state is None:
            state = mask.new_empty(2, dtype=torch.int64)
            self._state = insert_known(node, draw_philox, state, self._on_device_of(node), 0)
        like, skip = self._state.args
        assert isinstance(skip, int)
        self._state.args = (like, skip + geometry.advance)
        numbering = geometry.vector, geometry.threads, skip
        return insert_known(node, keep_philox, mask, self._state, list(mask.shape), order, 1 - p, *numbering)

    @staticmethod
    def _on_device_of(dropout: fx.Node) -> fx.Node:
        """An input of the graph on the dropout's device; if there is none, the dropout's operand."""
        device = dropout.meta["val"][1].device
        given: list[fx.Node] = [node for node in dropout.graph.nodes if node.op == "placeholder"]
        for node in given:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and value.device == device:
                return node
        return dropout.all_input_nodes[0]


def _extent(before: fx.Node, x: fx.Node, dim: int) -> int | fx.Node:
    """The size of a dimension: a number, or a new `sym_size` node."""
    extent: int | torch.SymInt = x.meta["val"].shape[dim]
    return extent if isinstance(extent, int) else insert_known(before, aten.sym_size.int, extent, x, dim)


def _drawn_in_the_kernel(
    node: fx.Node, x: fx.Node, p: float, target: Target, philox: _PhiloxDraws | None
) -> fx.Node | None:
    """The mask of dropout `node` from a saved state of the generator; None if PyTorch must draw it."""
    if philox is not None:
        return philox.mask(node, x, p)
    on_cpu = node.meta["val"][1].device.type == "cpu" and target.language == "c++"
    return _by_stream(node, x, p) if on_cpu else None


def _philox_draws(graph: fx.Graph, target: Target) -> _PhiloxDraws | None:
    """The draws of the graph's GPU; None on a CPU, or for a GPU of unknown limits."""
    if not target.is_gpu:
        return None
    tensors = (node.meta.get("val") for node in graph.nodes)
    kind = "cpu" if target.is_planned_gpu else "cuda"
    device = next((x.device for x in tensors if isinstance(x, torch.Tensor) and x.device.type == kind), None)
    if device is None:
        return None
    limits = target.profile.limits if target.is_planned_gpu else limits_of(device)
    return None if limits is None else _PhiloxDraws(device, limits)


def _scale(kept: torch.Tensor, p: float) -> float:
    """The factor by which eager multiplies kept elements: on a CPU it is rounded to the dtype of the result."""
    scale = 1 / (1 - p)
    step = ulp(scale, kept.dtype) if kept.device.type == "cpu" else 0.0
    return round(scale / step) * step if step else scale


def _nothing_kept(node: fx.Node, x: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Result and mask of dropout `node` with p = 1, which eager computes by multiplying with zero."""
    value, mask = node.meta["val"]
    zero = insert_known(node, aten.mul.Tensor, value, x, 0)
    return zero, insert_known(node, aten.full_like.default, mask, x, False, dtype=torch.bool)


def split_dropout(graph: fx.Graph, target: Target) -> None:
    """Rewrite every `native_dropout` of `graph`, which is planned for `target`, in place."""
    philox = _philox_draws(graph, target)
    for node in list(graph.nodes):
        if node.target is not aten.native_dropout.default:
            # An impure call may draw from the generator.
            if philox is not None and node.op == "call_function" and not is_pure(node):
                philox.interrupt()
            continue
        x, p, train = node.args[0], float(node.args[1]), node.args[2]
        assert isinstance(x, fx.Node)
        if train is False or p == 0.0:
            continue
        value, mask_meta = node.meta["val"]
        if p == 1.0:
            replace_results(node, _nothing_kept(node, x))
            continue
        mask = _drawn_in_the_kernel(node, x, p, target, philox)
        if mask is None:
            mask = insert_known(node, keep_mask, mask_meta, _operand_laid_alike(x), p)
            if philox is not None:
                philox.interrupt()
        kept = insert_known(node, aten.native_dropout_backward.default, value, x, mask, _scale(value, p))
        replace_results(node, (kept, mask))
