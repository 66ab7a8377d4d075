"""Losses of log-probabilities on a GPU: the contract, and no row of probabilities in memory."""

import pytest
import torch

from tests.contract import keeps_contract, launched
from tests.passes.test_log_softmaxes import COLUMNS, LOSSES, ROWS
from tests.passes.test_picked_losses import pairs
from tests.passes.test_shifted_losses import LOSSES as SHIFTED
from tests.passes.test_shifted_losses import drawn

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_keep_the_contract(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator(GPU).manual_seed(3)
    x, other = (3 * torch.randn(ROWS, COLUMNS, generator=generator, device=GPU).to(dtype) for _ in "ab")
    record = keeps_contract(LOSSES[name], [x.requires_grad_(), other])
    assert record.fallbacks == []
    written = [
        output.name
        for graph in record.graphs
        for region in graph.plan.fusion.regions
        for output in region.lowered.outputs
        if output.meta["val"].numel() == ROWS * COLUMNS
    ]
    # The gradient of the logits alone.
    assert len(written) == 1


def test_a_sum_over_rows_too_long_to_hold_keeps_the_contract() -> None:
    """More of them than programs."""
    generator = torch.Generator(GPU).manual_seed(3)
    x, other = (3 * torch.randn(2200, 20000, generator=generator, device=GPU).bfloat16() for _ in "ab")
    assert keeps_contract(LOSSES["distilled"], [x.requires_grad_(), other]).fallbacks == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_losses_of_pairs_keep_the_contract(dtype: torch.dtype) -> None:
    generator = torch.Generator(GPU).manual_seed(3)
    x, y = (torch.randn(1000, 64, generator=generator, device=GPU).to(dtype).requires_grad_() for _ in "xy")
    assert not any("cross_entropy" in what or "nll" in what for what in launched(keeps_contract(pairs, [x, y])))


@pytest.mark.usefixtures("afresh")
@pytest.mark.parametrize("name", SHIFTED)
def test_losses_of_all_positions_but_the_last_keep_the_contract(name: str) -> None:
    y, targets = drawn(torch.bfloat16)
    ran = launched(keeps_contract(SHIFTED[name], [y.to(GPU).requires_grad_(), targets.to(GPU)]))
    assert "tilewright.cross_entropy.default" in ran
