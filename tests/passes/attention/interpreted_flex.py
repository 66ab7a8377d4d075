"""Calls of `flex_attention`, compiled for a GPU, in Triton's interpreter: against float64 and eager."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.passes.attention.flex_functions import D, H, K, alibi, of_heads
from tests.passes.attention.interpreted_kernel import Compiled, inferred
from tests.passes.attention.spellings import draw
from tilewright.records.program import Decision

pytestmark = [
    pytest.mark.usefixtures("in_triton"),
    # Of eager's call.
    pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning"),
]
B, N = 2, 128


def cap(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return 2 * torch.tanh(score / 2)


def double(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score * 2


def near(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & (i - j < 20)


def earlier(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """The first queries see no key: zeros."""
    return j <= i - 10


def prefix(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) | (j < 16)


NEAR, EARLIER, OF_HEADS, PREFIX = (
    create_block_mask(mask, None, H if mask is of_heads else None, N, N, device="cpu")
    for mask in (near, earlier, of_heads, prefix)
)


def run(dtype: torch.dtype = torch.bfloat16, **options: object) -> tuple[Compiled, Decision]:
    """A call with these options keeps the numbers contract; what was decided of it."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = flex_attention(q, k, v, enable_gqa=True, **options)
        return found[0] + found[1][..., None].to(dtype) if "return_lse" in options else found

    compiled = inferred(call, draw((B, H, N, D), (B, K, N, D), (B, K, N, D), dtype=dtype))
    (decision,) = (d for d in compiled.record.decisions if "flex" in d.reason)
    return compiled, decision


BANDS: dict[str, tuple[dict[str, object], tuple[object, ...]]] = {
    "plain": ({}, (None, None, 0.0)),
    "capped": ({"score_mod": cap, "block_mask": NEAR, "scale": 0.4}, (19, 0, 2.0)),
    "unseen": ({"block_mask": EARLIER}, (None, -10, 0.0)),
}
"""Options of calls, and what becomes of them: the window's sides and the soft cap."""


@pytest.mark.parametrize("name", BANDS)
def test_bands_and_soft_caps_run_in_our_kernels(name: str) -> None:
    options, expected = BANDS[name]
    compiled, decision = run(**options)  # type: ignore[arg-type]
    assert decision.verdict == "taken" and compiled.targets("flex_attention") == 0
    assert compiled.attention.args[8:11] == expected


OTHERS: dict[str, tuple[dict[str, object], str]] = {
    "doubled": ({"score_mod": double}, "other than a soft cap"),
    "alibi": ({"score_mod": alibi}, "reads tensors"),
    "by heads": ({"block_mask": OF_HEADS}, "from head to head"),
    "prefix": ({"block_mask": PREFIX}, "other than a band"),
    "with sums": ({"return_lse": True}, "log-sum-exp"),
    "fp32": ({"dtype": torch.float32}, "16 bits"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_stay(name: str) -> None:
    options, reason = OTHERS[name]
    compiled, decision = run(**options)  # type: ignore[arg-type]
    assert decision.verdict == "refused" and reason in decision.reason
    assert compiled.targets("tilewright.attention") == 0
