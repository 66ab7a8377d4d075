"""An operator whose kernels run on the fake driver: `y = by · x + bias` in fp32, with the gradient of x."""

import ctypes
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from tests.launch.driver import FakeDriver, word_at
from tilewright.kernels.registration import without_derivative
from tilewright.launch import twin
from tilewright.launch.builder import Operand, RecipeBuilder, operands_of
from tilewright.launch.eager import EagerOperator
from tilewright.launch.gradient import Gradient, Input, OutputGrad
from tilewright.records.recipe import Recipe

Call = Callable[..., Any]
ADVANCE = 4


class Scaled:
    """The operators `tested::scaled` and `tested::scaled_backward` on a driver."""

    def __init__(self, driver: FakeDriver, is_plain: bool = True) -> None:
        """`is_plain`: the gradient is plain data, and else functions of Python."""
        self.built: list[str] = []
        """Whose recipes were built."""
        self.without_recipe: list[str] = []
        """Which calls were computed by PyTorch's operators."""
        self._scale = driver.kernel("scale", "PPqd", _scale)
        self._add = driver.kernel("add", "PPPq", _add)
        self.backward = self._operator("scaled_backward", self._backward_recipe, self._backward, None)
        plain = Gradient(self.backward.call, (OutputGrad(0), Input(0), Input(2)), (0, None, None, None))
        self.gradient = (plain.backward, plain.save) if is_plain else (self._gradient, _save)
        self.forward = self._operator("scaled", self._recipe, self._forward, plain if is_plain else self.gradient)
        _known[:] = [self]

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, by: float | Sequence[int] = 2.0, how: str = ""
    ) -> Any:
        """`how`: "refused" has no recipe; "drawn" advances the generator. The executor also takes integers as `by`, as
        the sizes of a window are: their product."""
        return self.forward.call(x, bias, by, how)

    def _operator(
        self, name: str, recipe: Call, implementation: Call, gradient: Gradient | tuple[Call, Call] | None
    ) -> EagerOperator:
        def build(*arguments: Any) -> Recipe | None:
            operands = operands_of([x for x in arguments if isinstance(x, torch.Tensor)])
            self.built.append(name)
            places = iter(operands)
            known = [next(places) if isinstance(x, torch.Tensor) else x for x in arguments]
            made: Recipe | None = recipe(RecipeBuilder(f"tested::{name}", operands, compiled=True), *known)
            return made

        def perform(*arguments: Any) -> tuple[torch.Tensor, ...] | None:
            made = build(*arguments)
            return None if made is None else twin.perform(made, [x for x in arguments if isinstance(x, torch.Tensor)])

        operator = getattr(torch.ops.tested, name).default
        return EagerOperator(operator, build, perform, implementation, gradient or (without_derivative(name), None))

    def _recipe(
        self, call: RecipeBuilder, x: Operand, bias: Operand | None, by: float | Sequence[int], how: str
    ) -> Recipe | None:
        if how == "refused":
            return None
        y, count, factor = call.empty(x.shape, x.dtype), x.numel(), prod(by) if isinstance(by, Sequence) else by
        x = x if x.is_contiguous() else call.copy(x)
        if how == "drawn":
            call.draw(ADVANCE)
        scaled = y if bias is None else call.empty(x.shape, x.dtype)
        call.launch(self._scale, (3, 2), x, scaled, count, float(factor))
        if bias is not None:
            call.launch(self._add, (1,), scaled, bias, y, count)
        return call.finish(y)

    def _backward_recipe(self, call: RecipeBuilder, dy: Operand, x: Operand, by: float) -> Recipe:
        dx, nothing = call.empty(dy.shape, dy.dtype), call.empty((0,), dy.dtype)
        dy = dy if dy.is_contiguous() else call.copy(dy)
        call.launch(self._scale, (1,), dy, dx, dy.numel(), by)
        return call.finish(dx, nothing)

    def _forward(self, x: torch.Tensor, bias: torch.Tensor | None, by: float, how: str) -> torch.Tensor:
        self.without_recipe.append(how)
        return by * x if bias is None else by * x + bias

    def _backward(self, dy: torch.Tensor, x: torch.Tensor, by: float) -> tuple[torch.Tensor, torch.Tensor]:
        return by * dy, dy.new_empty(0)

    def _gradient(self, ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return self.backward.call(dy, *ctx.saved_tensors, ctx.by)[0], None, None, None


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, _, ctx.by, _ = inputs
    ctx.save_for_backward(x)


def _rows(count: int, *places: int) -> list[ctypes.Array[ctypes.c_float]]:
    return [(ctypes.c_float * count).from_address(word_at(place)) for place in places]


def _scale(x: int, y: int, count: int, by: int) -> None:
    factor = ctypes.c_double.from_address(by).value
    source, target = _rows(word_at(count), x, y)
    target[:] = [factor * number for number in source]


def _add(x: int, y: int, z: int, count: int) -> None:
    one, other, target = _rows(word_at(count), x, y, z)
    target[:] = [a + b for a, b in zip(one, other, strict=True)]


_known: list[Scaled] = []
_library = torch.library.Library("tested", "FRAGMENT")
_fakes: dict[str, tuple[str, Call]] = {
    "scaled": ("(Tensor x, Tensor? bias, float by, str how) -> Tensor", lambda x, *_: x.new_empty(x.shape)),
    "scaled_backward": (
        "(Tensor dy, Tensor x, float by) -> (Tensor, Tensor)",
        lambda dy, x, by: (dy.new_empty(dy.shape), dy.new_empty(0)),
    ),
}
for _name, (_schema, _fake) in _fakes.items():
    _library.define(_name + _schema, tags=(torch.Tag.pt2_compliant_tag,))
    _which = "forward" if _name == "scaled" else "backward"
    _library.impl(
        _name, lambda *given, which=_which: getattr(_known[0], which).below(*given), "CompositeExplicitAutograd"
    )
    torch.library.register_fake(f"tested::{_name}", _fake, lib=_library)
torch.library.register_autograd(
    "tested::scaled",
    lambda ctx, dy: _known[0].gradient[0](ctx, dy),
    setup_context=lambda ctx, inputs, output: _known[0].gradient[1](ctx, inputs, output),
    lib=_library,
)
torch.library.register_autograd("tested::scaled_backward", without_derivative("scaled_backward"), lib=_library)
