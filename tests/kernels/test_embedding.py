"""The embedding without a GPU: formula, registration, machine code for an H200."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.kernels.machine_code import compiled, spilled
from tilewright.bench.catalogue import suite
from tilewright.kernels.embedding import embedding, reference
from tilewright.measure.truth.proof import prove


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("sizes", [(0, 3, 5), (1, 1, 1), (50, 11, 7), (4, 3, 0)], ids=str)
@pytest.mark.parametrize("padding", [None, 0, -1])
def test_the_contract_is_kept(sizes: tuple[int, ...], dtype: str, padding: int | None) -> None:
    inputs = suite("embedding").workload(sizes, dtype).make(torch.device("cpu"), torch.Generator().manual_seed(0))
    rows = prove(suite("embedding"), embedding, (*inputs, padding))
    assert [row for row in rows if not row.ok] == []


@pytest.mark.parametrize("padding", [None, 2, -3])
def test_the_reference_is_pytorchs(padding: int | None) -> None:
    indices, weight = torch.randint(5, (4, 3)), torch.randn(5, 6, requires_grad=True)
    gradients = []
    for function in (reference.embedding, embedding, F.embedding):
        out = function(indices, weight, padding)
        assert torch.equal(out, weight[indices])
        gradients.append(torch.autograd.grad(out.square().sum(), weight)[0])
    torch.testing.assert_close(gradients[0], gradients[2])
    torch.testing.assert_close(gradients[1], gradients[2])


def test_operators_are_registered_well() -> None:
    indices, weight = torch.randint(5, (4, 3), dtype=torch.int32), torch.randn(5, 6, requires_grad=True)
    torch.library.opcheck(torch.ops.tilewright.embedding.default, (indices, weight, 2))
    torch.library.opcheck(torch.ops.tilewright.embedding_backward.default, (torch.randn(4, 3, 6), indices, 5, -1))
    keys, order = indices.flatten().sort(stable=True)
    torch.library.opcheck(torch.ops.tilewright.embedding_sums.default, (torch.randn(4, 3, 6), keys, order, 5, -1))
    given = torch.randn(5, 6), torch.randn(4, 3, 6), keys, order, -1
    torch.library.opcheck(torch.ops.tilewright.add_embedding_sums_.default, given)


def test_what_does_not_fit_is_refused() -> None:
    indices, weight = torch.tensor([0, 5]), torch.randn(5, 6)
    with pytest.raises(TypeError, match=r"int64 or int32 indices and a floating weight, not torch\.float32"):
        embedding(indices.float(), weight)
    with pytest.raises(ValueError, match=r"weight\[V, D\] on one device, not cpu and \(6,\)"):
        embedding(indices, weight[0])
    with pytest.raises(ValueError, match=r"padding_idx in \[-5, 5\), a row of weight, or None, not 5"):
        embedding(indices, weight, 5)
    with pytest.raises(IndexError):
        embedding(indices, weight)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_kernels_compile_without_spills(dtype: str) -> None:
    pytest.importorskip("triton")
    from tilewright.kernels.embedding import triton as kernels

    types = {name: f"*{dtype}" for name in ("weight", "out", "dout", "dweight")}
    types |= dict.fromkeys(("indices", "order", "bounds"), "*i64") | {"keys": "*i32", "parts": "*fp32"}
    types |= {"columns": "i32"} | dict.fromkeys(("count", "entries", "weight_row", "padding"), "i64")
    aligned = ("columns", "weight_row")
    forward = {"ROWS": kernels.ELEMENTS // kernels.COLUMNS, "COLUMNS": kernels.COLUMNS}
    backward = {"CHUNK": kernels.CHUNK, "ROWS": kernels.PART_ROWS, "COLUMNS": kernels.BACKWARD_COLUMNS, "ADD": False}
    codes = [
        compiled(kernels.forward, types, forward, aligned),
        compiled(kernels.backward, types, backward, aligned),
        compiled(kernels.backward, types, backward | {"ADD": True}, aligned),
        compiled(kernels.long_runs, types, backward, aligned),
    ]
    bounds = compiled(kernels.find_bounds, types, {"STEPS": 20, "ENTRIES": kernels.BOUNDS})
    assert spilled(bounds) == 0
    assert [spilled(code) for code in codes] == [0, 0, 0, 0]
    assert all("ld.global.v4.b32" in code.asm["ptx"] for code in codes)
