"""Windows' attention written out, compiled for a GPU, in Triton's interpreter: against float64 and eager."""

import pytest
import torch
from torch import Tensor

from tests.passes.attention.interpreted_capped import TABLE
from tests.passes.attention.interpreted_kernel import trained
from tests.tables import programs

pytestmark = pytest.mark.usefixtures("in_triton")
B, M, H, N, D = 8, 4, 4, 9, 16


@pytest.fixture(autouse=True)
def enough_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """These fill no large GPU."""
    monkeypatch.setattr("tilewright.passes.attention.own.FEWEST", B * H)


def split(x: Tensor) -> tuple[Tensor, ...]:
    return x.reshape(-1, N, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)


def merged(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(-1, N, H * D)


def leaf(*shape: int, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw).bfloat16().requires_grad_()


def bands() -> Tensor:
    mask = torch.zeros(M, N, N)
    mask[1::2, : N // 2, N // 2 :] = -100.0
    return mask.bfloat16()


WINDOWS = programs(TABLE, "windows", globals())


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_written_out(name: str) -> None:
    masks = int(WINDOWS[name].fields["masks"])
    inputs = [leaf(B, N, 3 * H * D, seed=0), leaf(H, N, N, seed=1), bands()][: 1 + masks]
    compiled = trained(WINDOWS[name].function, inputs)
    assert compiled.targets("tilewright.window_attention.default") == 1
    assert compiled.targets("tilewright.window_attention_backward.default") == 1
    assert compiled.targets("bmm") == 0


def test_a_row_that_sees_nothing_is_nan_where_eager_has_it() -> None:
    mask = bands()
    mask[2, 3] = -torch.inf
    inputs = [leaf(B, N, 3 * H * D, seed=0), leaf(H, N, N, seed=1), mask]
    shifted = WINDOWS["shifted"].function
    with torch.no_grad():
        actual, eager = torch.compile(shifted, backend="tilewright")(*inputs), shifted(*inputs)
    assert torch.equal(actual.isnan(), eager.isnan())
    assert eager[2::M, 3].isnan().all()


def test_few_windows_keep_pytorch_s_attention() -> None:
    assert trained(WINDOWS["unmasked"].function, [leaf(3, N, 3 * H * D, seed=0)]).targets("window_attention") == 0


def test_windows_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def called(x: Tensor) -> Tensor:
        return merged(torch.nn.functional.scaled_dot_product_attention(*split(x), scale=0.3))

    inputs = [leaf(B, N, 3 * H * D, seed=0)]
    assert trained(called, inputs).targets("window_attention") == 0
    monkeypatch.setattr("tilewright.choose.attention.MANY_WINDOWS", B * H)
    compiled = trained(called, inputs)
    (choice,) = compiled.choices
    assert choice.verdict == "taken" and choice.reason.startswith("tilewright.window_attention in place of")
    assert compiled.targets("window_attention") == 2 and compiled.targets("scaled_dot_product") == 0
