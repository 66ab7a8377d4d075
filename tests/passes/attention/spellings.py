"""Attention as people write it, in `spellings.txt`: unmasked and causal, masked, in other dtypes, and not to be fused.

The files beside this one say what must become of each.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tests.tables import functions, programs, rows, value

B, H, N, D, DV = 2, 3, 7, 5, 4
INF = math.inf
Function = Callable[..., Tensor]
TABLE = Path(__file__).with_suffix(".txt")


def draw(*shapes: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


FLOAT_MASK, DROPPED_ROW = draw((N, N), seed=1)[0], torch.zeros(N, N, dtype=torch.bool)
DROPPED_ROW[3], DROPPED_ROW[:, 1] = True, True
LOST_ROW = FLOAT_MASK.masked_fill(DROPPED_ROW, -INF)
LOW_ROWS = torch.zeros(N, N).index_fill(0, torch.tensor([2, 5]), -1e4)
LONG_KEEP = torch.arange(N).expand(B, N) < torch.tensor([[4], [N]])
NO_KEEP = torch.arange(N).expand(B, N) < torch.tensor([[0], [N]])
NAMED = dict(globals())

UNMASKED, CAUSAL = (functions(TABLE, section, NAMED) for section in ("unmasked", "causal"))
WIDENED, REFUSED = (programs(TABLE, section, NAMED) for section in ("in fp32", "refused"))
MASKS: list[tuple[str, Tensor]] = [(row["program"], value(row["mask"], NAMED)) for row in rows(TABLE, "masks")]
SPELLINGS: dict[str, Function] = {
    **UNMASKED,
    **CAUSAL,
    **functions(TABLE, "masked", NAMED),
    **functions(TABLE, "other", NAMED),
    **{name: program.function for name, program in (WIDENED | REFUSED).items()},
}
"""All of them, by name."""
