"""Strides of results are eager's, whatever the strides of the operands."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.contract import recorded
from tests.operators.samples import CALLS, operands
from tilewright.capture.decompositions import decompositions


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() > 1 else x


def expanded(x: torch.Tensor) -> torch.Tensor:
    return x[:1].expand(x.shape) if x.dim() > 1 else x


def only(place: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Of the operands with dimensions that at `place` is channels last, the others are contiguous."""
    seen = iter(range(99))
    return lambda x: channels_last(x) if x.dim() > 1 and next(seen) == place else x.contiguous()


LAYOUTS: dict[str, Callable[[], Callable[[torch.Tensor], torch.Tensor]]] = {
    "channels last": lambda: channels_last,
    "expanded": lambda: expanded,
    "the first alone": lambda: only(0),
    "the second alone": lambda: only(1),
}
EXPANDED_RESULTS = {("_weight_norm_interface.default", "expanded")}
"""Eager's norms lie on top of each other like those given."""


def strides(results: Any) -> list[tuple[int, ...]]:
    """Strides of tensors along dimensions of more than one element."""
    tensors = [x for x in tree_leaves(results) if isinstance(x, torch.Tensor) and x.numel()]
    return [tuple(s for n, s in zip(x.shape, x.stride(), strict=True) if n > 1) for x in tensors]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_traced_strides_of_all_rows_are_eagers(layout: str) -> None:
    mode, wrong, compared = FakeTensorMode(allow_non_fake_inputs=True), [], 0
    for name, makers in CALLS.items():
        target = operator.attrgetter(name)(torch.ops.aten)
        lay = LAYOUTS[layout]()
        args, kwargs = tree_map(
            lambda x, lay=lay: lay(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else x,
            makers[0](operands("matrix", torch.float32)),
        )
        try:
            eager = strides(target(*args, **kwargs))
        except (RuntimeError, NotImplementedError):
            continue
        with mode:
            fakes = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
            traced = decompositions().get(target, target)(*fakes[0], **fakes[1])
            traced = target(*fakes[0], **fakes[1]) if traced is NotImplemented else traced
        compared += 1
        if strides(traced) != eager and (name, layout) not in EXPANDED_RESULTS:
            wrong.append((name, strides(traced), eager))
    assert wrong == []
    assert compared > 200


def _layers(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Sequence[torch.Tensor]:
    return (
        x.roll(1, 2),
        x.roll((1, 2), (1, 3)),
        x.roll(3),
        x.roll(1, 2).as_strided((50,), (1,)),
        *(F.batch_norm(t, None, None, training=True) for t in (x, y, z)),
        *(F.rrelu(t, training=True) for t in (x, y, z)),
        *(F.logsigmoid(t) for t in (y, z)),
        2**y,
        *(F.interpolate(z, scale_factor=1.3, mode=mode) for mode in ("nearest", "nearest-exact", "linear")),
        torch.complex(y, y).angle(),
    )


def test_strides_of_compiled_results_are_eagers() -> None:
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    y, z = torch.randn(4, 5, 2, 3).permute(2, 3, 0, 1), torch.randn(5, 3, 2).permute(2, 1, 0)
    call, _ = recorded(_layers)
    torch.manual_seed(0)
    ours = call(x, y, z)
    torch.manual_seed(0)
    torch.testing.assert_close(ours, _layers(x, y, z), check_stride=True)
