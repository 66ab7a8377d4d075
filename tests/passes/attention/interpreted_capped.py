"""Scores under a soft cap written out, compiled for a GPU, in Triton's interpreter: against float64 and eager."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.passes.attention.interpreted_kernel import inferred, trained
from tests.passes.attention.spellings import draw
from tests.tables import programs, value

pytestmark = pytest.mark.usefixtures("in_triton")
TABLE = Path(__file__).with_name("interpreted.txt")
B, H, K, N, D = 2, 4, 2, 21, 16
CAP = 2.0
"""About the size of the scores, so that the cap changes most of them."""


def capped(scores: Tensor) -> Tensor:
    return CAP * torch.tanh(scores / CAP)


def keep(fewest: int) -> Tensor:
    """Which keys are no padding; so many in the first entry."""
    return torch.arange(N).expand(B, N) < torch.tensor([[fewest], [N - 5]])


BF16, FP16 = torch.bfloat16, torch.float16
NAMED = globals()
CAPPED, OTHERWISE = (programs(TABLE, section, NAMED) for section in ("capped", "capped otherwise"))


@pytest.mark.parametrize("name", CAPPED)
def test_capped_scores_run_in_our_kernels(name: str) -> None:
    row = CAPPED[name]
    dtype, cap, keys, masked, fewest = (
        value(row.fields[field], NAMED) for field in ("dtype", "cap", "keys", "is_masked", "keep")
    )
    inputs = [x.requires_grad_() for x in draw(*[(B, H, N, D)] * 3, dtype=dtype)]
    compiled = trained(row.function, inputs if fewest is None else [*inputs, keep(fewest)])
    assert compiled.targets("tilewright.attention_backward.default") == 1
    assert compiled.targets("bmm") == 0
    call = compiled.attention
    assert call.args[10] == cap and (call.args[3] is not None) == masked
    # Heads that share keys read them once.
    assert call.args[1].meta["val"].shape[1] == keys


@pytest.mark.parametrize("name", OTHERWISE)
def test_what_stays_written_out(name: str) -> None:
    row = OTHERWISE[name]
    compiled = inferred(row.function, draw(*[(B, H, N, D)] * 3, dtype=value(row.fields["dtype"], NAMED)))
    (decision,) = (d for d in compiled.record.decisions if d.passed_by == "attention")
    assert decision.verdict == "refused" and row.fields["reason"] in decision.reason
