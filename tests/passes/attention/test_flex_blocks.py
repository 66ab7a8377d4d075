"""Calls of `flex_attention` on a CPU: blocks of queries with the keys that a mask shows them, against float64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.flop_counter import FlopCounterMode

from tests.contract import called, keeps_contract, nodes, recorded
from tests.passes.attention.flex_functions import SLOPES, D, H, K, alibi, of_heads
from tests.passes.attention.spellings import draw
from tilewright.kernels.attention.shown_keys import attend_to_shown_keys
from tilewright.passes.attention.flex import Run, runs_of

pytestmark = [
    # Of eager's call.
    pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning"),
    pytest.mark.filterwarnings("ignore:return_lse is deprecated:FutureWarning"),
]
DOCUMENTS = torch.arange(600) // 150
TURNS = torch.arange(600) // 16 % 5
MARKED = torch.arange(600) % 130 > 128


def near(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & (i - j < 60)


def earlier(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """The first queries see no key: zeros."""
    return j <= i - 150


def of_documents(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return DOCUMENTS[i] == DOCUMENTS[j]


def of_turns(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Another document in the second entry."""
    return TURNS[i] == TURNS[j] + b


def of_marked(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Keys 129 and 259, which the queries before them do not see."""
    return MARKED[j] & (j <= i)


CALLS: dict[str, tuple[Callable[..., Tensor] | None, int, dict[str, Any]]] = {
    "no mask": (None, 90, {"score_mod": alibi}),
    "window": (near, 600, {"scale": 0.3}),
    "window and sums": (near, 400, {"return_lse": True}),
    "no key at first": (earlier, 300, {"return_lse": True}),
    "by heads": (of_heads, 257, {"score_mod": alibi}),
    "documents": (of_documents, 600, {}),
    "documents in turns": (of_turns, 300, {"score_mod": alibi, "return_lse": True}),
    "no key for some": (of_marked, 260, {"return_lse": True}),
}
"""Masks, numbers of queries and keys, and options."""


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in CALLS), ("window", torch.bfloat16)])
def test_blocks_keep_the_contract(name: str, dtype: torch.dtype) -> None:
    mask, n, options = CALLS[name]
    if mask is not None:
        sizes = 2 if mask is of_turns else None, H if mask is of_heads else None
        options = options | {"block_mask": create_block_mask(mask, *sizes, n, n, device="cpu")}

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, enable_gqa=True, **options)

    inputs = draw((2, H, n, D), (2, K, n, D), (2, K, n, D + 8), dtype=dtype)
    record = keeps_contract(call, inputs, training=False)
    (decision,) = (d for d in record.decisions if "flex" in d.reason)
    assert decision.verdict == "taken"
    # No tensor has every score.
    largest = max(value.numel() for node in nodes(record) if isinstance(value := node.meta.get("val"), Tensor))
    assert name in ("no mask", "by heads") or largest < 2 * H * n * n


@pytest.mark.parametrize("lengths", [(512,) * 4, (700, 30, 500, 818)], ids=str)
def test_a_mask_of_documents_costs_its_pairs(lengths: tuple[int, ...]) -> None:
    """Each block of queries meets the documents that it is part of, and no other key."""
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    q, k, v = draw((1, H, 2048, D), (1, K, 2048, D), (1, K, 2048, D))
    with FlopCounterMode(display=False) as counter:
        attend_to_shown_keys(
            *(q, k, v, lambda s, *_: s, [lambda b, h, i, j, ids: ids[i] == ids[j]], 0.25),
            *({"OUTPUT_LOGSUMEXP": False}, (), (documents,)),
        )
    blocks = documents.view(-1, 128)
    keys = sum(int(torch.isin(documents, block).sum()) for block in blocks)
    assert counter.get_total_flops() == 2 * 2 * H * 128 * keys * D


def test_lengths_may_differ_from_call_to_call() -> None:
    def call(q: Tensor, block_mask: BlockMask) -> Tensor:
        out: Tensor = flex_attention(q, q, q, block_mask=block_mask)
        return out

    compiled, record = recorded(call, dynamic=True)
    for n in (200, 330):
        mask = create_block_mask(of_documents, None, None, n, n, device="cpu")
        (q,) = draw((1, H, n, D))
        with torch.no_grad():
            actual, expected = compiled(q, mask), call(q.double(), mask)
        torch.testing.assert_close(actual, expected.float())
    assert called(record, "attend_to_shown_keys") and "s" in str(called(record, "attend_to_shown_keys")[0].meta["val"])


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (100, 300), (1000, 1000), (4096, 4096)])
@pytest.mark.parametrize("left", [0, 127, 5000])
def test_runs_hold_all_that_a_mask_shows(queries: int, keys: int, left: int) -> None:
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    mask = (j <= i) & (j >= i - left)
    left_out = mask.clone()
    for run in runs_of(mask):
        for block in range(run.count):
            at = block * run.size
            left_out[run.first + at : run.first + at + run.size, run.low + at : run.high + at] = False
    assert not left_out.any()
    assert sum(run.count * run.size for run in runs_of(mask)) == queries


def test_a_window_is_two_runs_of_small_blocks() -> None:
    i, j = torch.arange(4096)[:, None], torch.arange(4096)
    assert runs_of((j <= i) & (j > i - 128)) == [Run(0, 128, 1, 0, 128), Run(128, 128, 31, 0, 256)]
    assert sum(run.count * run.size * (run.high - run.low) for run in runs_of(j <= i)) < 0.6 * 4096**2


def test_functions_that_look_beyond_their_element_stay() -> None:
    def over_keys(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + SLOPES.sum() * math.pi

    (q,) = draw((1, H, 32, D))
    record = keeps_contract(lambda q: flex_attention(q, q, q, score_mod=over_keys), [q], training=False)
    (decision,) = (d for d in record.decisions if "flex" in d.reason)
    assert decision.verdict == "refused" and "a function that calls sum" in decision.reason
