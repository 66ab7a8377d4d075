"""Sums of an embedding's gradient compared with float64, on any device."""

import torch

SUMMED = {torch.float64: 2**-48}
"""By dtype, the rounding of sums as a share of the sum of their terms' sizes; 2⁻²⁰ in fp32."""


def sorted_by_index(indices: torch.Tensor, entries: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, order and bounds, as the operators take them."""
    keys, order = indices.flatten().to(torch.int32).sort(stable=True)
    bounds = torch.ops.tilewright.sorted_bounds(keys, entries)
    lengths = torch.bincount(indices.flatten(), minlength=entries)
    assert bounds[0] == 0 and torch.equal(bounds.diff(), lengths)
    return keys, order, bounds


def assert_sums(dout: torch.Tensor, indices: torch.Tensor, entries: int, padding: int = -1) -> torch.Tensor:
    """The sums, which are the exact ones, rounded once."""
    found: torch.Tensor = torch.ops.tilewright.embedding_sums(
        dout, *sorted_by_index(indices, entries), entries, padding
    )
    assert (found.dtype, found.shape) == (dout.dtype, (entries, dout.shape[-1]))
    _assert_near(found, dout.new_zeros(found.shape), dout, indices, padding)
    return found


def assert_added(table: torch.Tensor, dout: torch.Tensor, indices: torch.Tensor, padding: int = -1) -> None:
    """Rows that nobody asked for keep their bits; the others get their sums, rounded once."""
    before = table.clone()
    torch.ops.tilewright.add_embedding_sums_(table, dout, *sorted_by_index(indices, len(table)), padding)
    asked = torch.bincount(indices.flatten(), minlength=len(table)) > 0
    if padding >= 0:
        asked[padding] = False
    assert torch.equal(table[~asked], before[~asked]) and asked.any() and not asked.all()
    _assert_near(table, before, dout, indices, padding)


def assert_extremes(table: torch.Tensor, taken: torch.Tensor, indices: torch.Tensor, entries: int) -> None:
    """Largest and smallest of the rows `taken` of `table`, which are exact, and their gradients' sums; some are NaN."""
    keys, order, bounds = sorted_by_index(indices, entries)
    where = keys, taken[order], bounds
    rows, places = table[taken].double(), indices[:, None].expand(len(indices), table.shape[1])
    for how in ("amax", "amin"):
        for include in (True, False):
            found = torch.ops.tilewright.row_extremes(table, *where, entries, how == "amax", 0.5, include)
            start = torch.full(found.shape, 0.5, dtype=torch.float64, device=table.device)
            exact = start.scatter_reduce(0, places, rows, how, include_self=include)
            assert found.dtype == table.dtype and torch.equal(found.double().nan_to_num(99.0), exact.nan_to_num(99.0))
    own = found.nan_to_num(0.0)
    same = (table[taken] == own[indices]).double()
    count = torch.ops.tilewright.matching_sums(table, own, None, *where)
    exact = torch.zeros_like(own, dtype=torch.float64).index_add(0, indices, same)
    assert torch.equal(count, exact.to(count.dtype)) and exact.any()
    values = table.sin().nan_to_num(0.0)
    total = torch.ops.tilewright.matching_sums(table, own, values, *where)
    exact = torch.zeros_like(exact).index_add(0, indices, same * values[taken])
    terms = torch.zeros_like(exact).index_add(0, indices, same * values[taken].abs())
    allowed = terms * 2**-20 + exact.abs() * torch.finfo(table.dtype).eps / 2
    assert ((total.double() - exact).abs() <= allowed).all()


def _assert_near(
    found: torch.Tensor, before: torch.Tensor, dout: torch.Tensor, indices: torch.Tensor, padding: int
) -> None:
    rows = dout.double().reshape(indices.numel(), dout.shape[-1])
    rows = torch.where((indices.flatten() == padding)[:, None], 0.0, rows)
    exact = before.double().index_add(0, indices.flatten(), rows)
    terms = before.double().abs().index_add(0, indices.flatten(), rows.abs())
    allowed = terms * SUMMED.get(dout.dtype, 2**-20) + exact.abs() * torch.finfo(dout.dtype).eps / 2
    assert ((found.double() - exact).abs() <= allowed).all()
