"""Programs that random drawing found once, each the shortest that failed."""

import torch

from tests.fuzz.batches import Batch
from tests.fuzz.graphs import Graph, Input

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

FOUND = {
    "a masked sum that g++ 12 compiled wrongly where zeros had no sign": Graph(
        (Input((2, 2, 33, 1), BF16, "transposed"), Input((), BF16, "contiguous")), ("torch.minimum(x1, x0)",), ("v0",)
    ),
    "a sum of everything, done by every thread, over the storage of an operand": Graph(
        (Input((130, 140), F32, "gapped"), Input((), F32, "contiguous")), ("torch.where(x1 > x0, x1, x0)",), ("v0",)
    ),
    "backward compares a rounded value with the maximum of unrounded ones": Graph(
        (Input((16, 1), F16, "expanded"),),
        ("torch.atan2(x0, x0 * x0 + 0.5)", "v0 / (v0 * v0 + 1)", "v1.amax(-1)"),
        ("v2",),
    ),
    "the mean of equal values is another value": Graph(
        (Input((3,), F32, "expanded"),),
        ("(torch.erf(x0) * 0.5).pow(3)", "1 - v0", "F.layer_norm(v1, v1.shape[-1:])"),
        ("v2",),
    ),
    "rounding is all that is left of a normalised single element": Graph(
        (Input((16, 5, 1), F16, "contiguous"),),
        ("F.gelu(x0, approximate='tanh')", "F.layer_norm(v0, v0.shape[-1:], v0.flatten(0, -2).mean(0) + 1)"),
        ("v1",),
    ),
    "moments of what was not yet rounded, met in backward by what was": Graph(
        (Input((7, 2, 16, 2), F16, "contiguous"),),
        ("x0 - x0.mean(-1, keepdim=True)", "F.layer_norm(v0, v0.shape[-1:], v0.flatten(0, -2).mean(0) + 1)"),
        ("v1",),
    ),
    "backward compares, in another kernel, what was computed again without eager's rounding": Graph(
        (Input((1, 33), BF16, "transposed"),),
        ("torch.tanh(x0)", "torch.reciprocal(v0 * v0 + 1)", "v1.expand(2, *v1.shape)", "v2.amax(-3)"),
        ("v3",),
    ),
    "a 16-bit dropout scales by a number of 16 bits": Graph(
        (Input((3, 700), BF16, "contiguous"),), ("F.dropout(x0, 0.3)", "torch.round(v0)"), ("v1", "v0")
    ),
    "a comparison in 16 bits with a wider number": Graph(
        (Input((16, 16, 5), F32, "contiguous"),), ("x0.bfloat16()", "0.01 * x0.sum()", "v0 > v1"), ("v2",)
    ),
    "peaked attention, whose gradients nearly cancel": Graph(
        (Input((130, 140), F32, "contiguous"), Input((1, 33), F32, "transposed")),
        (
            "torch.softmax(x0 @ x0.transpose(-2, -1) * 0.3, -1) @ x0",
            "torch.softmax(x1 @ x1.transpose(-2, -1) * 0.3, -1) @ x1",
        ),
        ("v0", "v1"),
    ),
    "flattened rows beside their reverse, less the mean of each row": Graph(
        (Input((7, 5), F32, "contiguous"),),
        ("x0 - x0.mean(-1, keepdim=True)", "v0.flatten()", "v1 + torch.flip(v1, [0])", "v1 * v1.roll(10, 0)"),
        ("v2", "v3"),
    ),
    "a copy that resolves a conjugated tensor is no needless copy": Graph(
        (Input((1, 2, 7, 1), F32, "contiguous"),),
        ("torch.view_as_complex(torch.stack([x0, -x0], -1))", "v0.mT.conj() * (0.5 + 1j)"),
        ("v1",),
    ),
    "the largest of a single value": Graph((Input((), F32, "contiguous"),), ("x0 * 2", "v0.max(0)[0]"), ("v1",)),
}


def test_what_was_found_stays_found() -> None:
    rows, record = Batch(list(FOUND.values()), 0).check(training=True)
    broken = [row for row in rows if not row.ok]
    assert broken == [] and record.fallbacks == []
