"""Attention sinks written out, compiled for a GPU, in Triton's interpreter: against float64 and eager."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.attention.interpreted_capped import TABLE, B, D, H, K, N, keep
from tests.passes.attention.interpreted_kernel import inferred, trained
from tests.passes.attention.spellings import draw
from tests.tables import programs

pytestmark = pytest.mark.usefixtures("in_triton")


def beside(scores: Tensor, sinks: Tensor) -> Tensor:
    """The weights as transformers' gpt-oss computes them."""
    column = sinks.reshape(1, -1, 1, 1).expand(B, -1, N, -1)
    together = torch.cat([scores, column], dim=-1)
    together = together - together.max(dim=-1, keepdim=True).values
    return F.softmax(together, dim=-1, dtype=together.dtype)[..., :-1]


def repeated(x: Tensor) -> Tensor:
    return x[:, :K][:, :, None].expand(B, K, H // K, N, D).reshape(B, H, N, D)


SINKS, OTHERS = (programs(TABLE, section, globals()) for section in ("sinks", "other columns"))


@pytest.mark.parametrize("name", SINKS)
def test_sinks_run_in_our_kernels(name: str) -> None:
    inputs = [x.requires_grad_() for x in draw(*[(B, H, N, D)] * 3, (H,), dtype=torch.bfloat16)]
    inputs += [keep(0)] if SINKS[name].fields["is_masked"] == "True" else []
    compiled = trained(SINKS[name].function, inputs)
    assert compiled.targets("tilewright.attention.default") == 1
    assert compiled.targets("tilewright.attention_backward.default") == 1
    assert compiled.targets("bmm") == compiled.targets("softmax") == 0


@pytest.mark.parametrize("name", OTHERS)
def test_other_columns_stay_written_out(name: str) -> None:
    compiled = inferred(OTHERS[name].function, draw(*[(B, H, N, D)] * 3, (H,), dtype=torch.bfloat16))
    assert compiled.targets("tilewright.attention") == 0
