"""The kernels that rates are measured with, in Triton's interpreter."""

import pytest
import torch

from tilewright.hardware.probes import chains, walk

PROGRAMS, BLOCK = 3, 16


@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("walks", [1, 3])
def test_every_walk_goes_over_all_of_a_programs_memory(blocks: int, walks: int) -> None:
    elements = blocks * BLOCK
    # Whole numbers, whose sums are exact.
    source = torch.randint(-100, 100, (PROGRAMS * elements,)).float()
    for reads, writes in ((True, True), (True, False), (False, True)):
        target = torch.full_like(source, torch.nan)
        walk[(PROGRAMS,)](source, target, elements, walks, reads, writes, BLOCK)
        if reads and writes:
            assert torch.equal(target, source)
        elif writes:
            assert torch.equal(target, torch.full_like(source, walks - 1.0))
        else:
            sums = source.view(PROGRAMS, blocks, BLOCK).sum(1) * walks
            assert torch.equal(target[: PROGRAMS * BLOCK].view(PROGRAMS, BLOCK), sums)
            assert target[PROGRAMS * BLOCK :].isnan().all()


@pytest.mark.parametrize(("factor", "term", "turns"), [(-1.0, 1.5, 4), (-1.0, 1.5, 0), (0.5, 1.0, 1)])
def test_a_chain_is_as_long_as_it_is_counted(factor: float, term: float, turns: int) -> None:
    steps = 3
    out = torch.full((PROGRAMS * BLOCK,), torch.nan)
    chains[(PROGRAMS,)](out, factor, term, turns, BLOCK, steps)
    x = torch.arange(BLOCK, dtype=torch.float64)
    for _ in range(steps * turns):
        x = x * factor + term
    torch.testing.assert_close(out.view(PROGRAMS, BLOCK).double(), x.expand(PROGRAMS, -1))
