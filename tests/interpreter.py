"""Triton's interpreter as the tests need it: a scalar counts in `range`, and nothing is done anew for each call.

A process that interprets kernels does nothing else. So what the interpreter replaces in Triton's language for one call
of a function can stay replaced, which takes half of the time; and equal shapes and dtypes share what describes them.
"""

import functools
import math
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

ENDED = "ended with exit code "


@functools.cache
def install() -> None:
    """Patch Triton's interpreter in this process, permanently."""
    import triton.language as tl
    from triton._utils import validate_block_shape
    from triton.language import core
    from triton.runtime import interpreter

    interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": core}))
    interpreter._patch_lang = lambda _: interpreter._LangPatchScope()
    # Each sum and product of integers is computed again in 64 bits, for an assertion that is then left out.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.ReduceOps.generic_reduce = reduce_in_halves
    # A scalar is kept as an array of one, which NumPy from 2.4 on does not convert to a number.
    core.tensor.__index__ = lambda own: int(own.handle.data.item())

    look_up, in_numpy = interpreter._get_np_dtype, dict[str, Any]()

    def numpy_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in in_numpy:
            in_numpy[name] = look_up(dtype)
        return in_numpy[name]

    interpreter._get_np_dtype = numpy_dtype

    @functools.cache
    def shapes(sizes: tuple[int, ...]) -> tuple[int, Any, Any, Any]:
        """Elements; the shape of a block's type; elements and shape of a tensor: the same objects for equal sizes."""
        of_type, of_tensor = core.tuple(sizes), core.tuple([core.constexpr(size) for size in sizes])
        of_type.sizes = of_tensor.sizes = sizes
        return validate_block_shape(sizes), of_type, core.constexpr(math.prod(sizes)), of_tensor

    def begin_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = vars(shape).get("sizes") if isinstance(shape, core.tuple) else None
        self.element_ty = element_ty
        self.numel, self.shape, _, _ = shapes(tuple(core._unwrap_shape(shape)) if sizes is None else sizes)
        self.name = f"<{self.shape}, {element_ty}>"

    def begin_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        _, _, self.numel, self.shape = shapes(type.shape.sizes if type.is_block() else ())

    equal = core.tuple.__eq__
    core.block_type.__init__, core.tensor.__init__ = begin_type, begin_tensor
    core.tuple.__eq__ = lambda own, other: core.constexpr(True) if own is other else equal(own, other)


def reduce_in_halves(self: Any, given: Sequence[Any]) -> list[Any]:
    """As a GPU combines, by halves; the interpreter combines element by element, each in Python."""
    import numpy as np

    rank, kinds = given[0].handle.data.ndim, [x.dtype for x in given]
    axis = 0 if self.axis is None else self.axis
    parts = [x.handle.data.reshape(-1) if self.axis is None else x.handle.data for x in given]
    while (extent := parts[0].shape[axis]) > 1:
        halves = [np.take(part, range(start, extent, 2), axis) for start in (0, 1) for part in parts]
        found = self.combine_fn.fn(*map(self.to_tensor, halves, kinds * 2))
        results = found if isinstance(found, tuple) else (found,)
        assert [x.dtype for x in results] == kinds, "the interpreter keeps numbers of 16 bits as integers"
        parts = [x.handle.data for x in results]
    if self.keep_dims:
        parts = [part.reshape((1,) * rank) if self.axis is None else part for part in parts]
    else:
        parts = [np.take(part, 0, axis) for part in parts]
    return [self.to_tensor(part, kind) for part, kind in zip(parts, kinds, strict=True)]


def main() -> None:
    """Run pytest for each file whose path stands on a line of standard input."""
    import pytest

    os.dup2(sys.stdout.fileno(), sys.stderr.fileno())
    for line in sys.stdin:
        code = pytest.main(["-q", "-p", "no:cacheprovider", "--show-capture=no", line.strip()])
        print(f"\n{ENDED}{int(code)}", flush=True)


if __name__ == "__main__":
    main()
