"""Writes in place, made functional as eager does them.

    y = clone(x)               →   y = clone(x)
    masked_fill_(y, m, 0)          z = masked_fill(y, m, 0)
                                   z' = clone(z), laid out as y

A write in place leaves strides as they are; the functional operator that AOTAutograd puts in its place lays its result
out by rules of its own (`masked_fill` of a transposed tensor is contiguous). What depends on the layout, such as the
mask that dropout draws in memory order, is eager's only with the strides of the tensor that was written to.

    bernoulli_(y, p)           →   bernoulli_(permute(y), p)      contiguous

In place it draws in memory order, the functional one in the order of the dimensions.

    y = dropout(x, 0.5, train=False)   →   y = x                  also with p = 0

Eager returns the operand itself: nothing is copied, and a write to `y` reaches `x`. AOTAutograd would trace a clone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.utils._pytree import tree_leaves

from tilewright.graph.layouts import laid_by, memory_order
from tilewright.pytorch.state import in_real_tensors


@contextmanager
def as_eager() -> Iterator[None]:
    """Let functionalisation give each tensor that is written in place the layout that it had."""
    dispatch = FunctionalTensorMode.__torch_dispatch__

    def laid_out(mode: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if not isinstance(func, torch._ops.OpOverload) or not func._schema.is_mutable:
            return dispatch(mode, func, types, args, kwargs)
        if func is torch.ops.aten.bernoulli_.float and _draws_in_memory_order(args[0]):
            with mode:
                func(args[0].permute(memory_order(args[0].stride())), *args[1:], **kwargs or {})
            return args[0]
        result = dispatch(mode, func, types, args, kwargs)
        for tensor in _written(func, args, kwargs or {}):
            _lay_out(tensor)
        return result

    FunctionalTensorMode.__torch_dispatch__ = laid_out  # type: ignore[method-assign,assignment]
    try:
        with _inactive_dropouts_copy_nothing():
            yield
    finally:
        FunctionalTensorMode.__torch_dispatch__ = dispatch  # type: ignore[method-assign]


@contextmanager
def _inactive_dropouts_copy_nothing() -> Iterator[None]:
    operator = torch.ops.aten.dropout.default
    before = dict(operator.py_kernels)

    def dropout(x: torch.Tensor, p: float, train: bool | None) -> torch.Tensor:
        dropped: torch.Tensor = torch.ops.aten.native_dropout(x, p, train)[0] if train and p != 0 else x
        return dropped

    operator.py_kernels.update(dict.fromkeys(before, dropout))
    operator._dispatch_cache.clear()
    try:
        yield
    finally:
        operator.py_kernels.update(before)
        operator._dispatch_cache.clear()


def _draws_in_memory_order(tensor: torch.Tensor) -> bool:
    """Whether that is another order than that of the dimensions."""
    dims = list(range(tensor.dim()))
    return memory_order(tensor.stride()) != dims and (tensor.device.type != "cpu" or _cpu_draws_in_memory_order())


@functools.cache
def _cpu_draws_in_memory_order() -> bool:
    """False where PyTorch draws by oneMKL: on Intel's processors."""
    with in_real_tensors():
        turned, plain = torch.empty(8, 8).t(), torch.empty(8, 8)
        drawn = [x.bernoulli_(0.5, generator=torch.Generator().manual_seed(0)) for x in (turned, plain)]
        return not torch.equal(*drawn)


def _written(operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The tensors whose elements a call changes, and not the shape."""
    if torch.Tag.inplace_view in operator.tags:
        return
    for place, argument in enumerate(operator._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (x for x in tree_leaves(value) if isinstance(x, FunctionalTensor))


def _lay_out(tensor: FunctionalTensor) -> None:
    """Give the value that stands for `tensor` the order of its dimensions in memory, if it lost that."""
    if tensor.layout is not torch.strided or _lies_as(tensor, torch._from_functional_tensor(tensor.elem)):
        return
    # A view of another tensor gets its layout from that one.
    tensor.sync()
    value = torch._from_functional_tensor(tensor.elem)
    if _lies_as(tensor, value):
        return
    tensor.replace_(laid_by(value, memory_order(tensor.stride())))
    tensor.commit_update()
    tensor.sync()


def _lies_as(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    if tensor.shape != value.shape or (tensor.is_contiguous() and value.is_contiguous()):
        return True
    wide = [dim for dim in range(value.dim()) if value.shape[dim] != 1]
    expanded = any(value.stride(dim) == 0 for dim in wide)
    orders = [[dim for dim in memory_order(x.stride()) if dim in wide] for x in (tensor, value)]
    return not expanded and orders[0] == orders[1]
