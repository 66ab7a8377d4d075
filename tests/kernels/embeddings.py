"""Sums of an embedding's gradient compared with float64, on any device."""

import torch

SUMMED = {torch.float64: 2**-48}
"""By dtype, the rounding of sums as a share of the sum of their terms' sizes; 2⁻²⁰ in fp32."""


def sorted_by_index(indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and order, as the operators take them."""
    keys, order = indices.flatten().to(torch.int32).sort(stable=True)
    return keys, order


def assert_sums(dout: torch.Tensor, indices: torch.Tensor, entries: int, padding: int = -1) -> torch.Tensor:
    """The sums, which are the exact ones, rounded once."""
    found: torch.Tensor = torch.ops.tilewright.embedding_sums(dout, *sorted_by_index(indices), entries, padding)
    assert (found.dtype, found.shape) == (dout.dtype, (entries, dout.shape[-1]))
    _assert_near(found, dout.new_zeros(found.shape), dout, indices, padding)
    return found


def assert_added(table: torch.Tensor, dout: torch.Tensor, indices: torch.Tensor, padding: int = -1) -> None:
    """Rows that nobody asked for keep their bits; the others get their sums, rounded once."""
    before = table.clone()
    torch.ops.tilewright.add_embedding_sums_(table, dout, *sorted_by_index(indices), padding)
    asked = torch.bincount(indices.flatten(), minlength=len(table)) > 0
    if padding >= 0:
        asked[padding] = False
    assert torch.equal(table[~asked], before[~asked]) and asked.any() and not asked.all()
    _assert_near(table, before, dout, indices, padding)


def _assert_near(
    found: torch.Tensor, before: torch.Tensor, dout: torch.Tensor, indices: torch.Tensor, padding: int
) -> None:
    rows = dout.double().reshape(indices.numel(), dout.shape[-1])
    rows = torch.where((indices.flatten() == padding)[:, None], 0.0, rows)
    exact = before.double().index_add(0, indices.flatten(), rows)
    terms = before.double().abs().index_add(0, indices.flatten(), rows.abs())
    allowed = terms * SUMMED.get(dout.dtype, 2**-20) + exact.abs() * torch.finfo(dout.dtype).eps / 2
    assert ((found.double() - exact).abs() <= allowed).all()
