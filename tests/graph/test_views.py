"""Views that no operator computes: what stands for them, and that their elements are the right ones."""

from collections.abc import Sequence

import torch

from tests.backend.compiling import agrees, compiled
from tests.emit.triton_programs import nests_of
from tilewright.backend import Recording
from tilewright.runtime.executable import CallStep, ViewStep
from tilewright.runtime.storage_reuse import writes_after_reads


def steps(record: Recording, kind: type) -> Sequence[str]:
    return [step.name for g in record.graphs for step in g.executable.steps if type(step) is kind]


def test_a_chain_of_views_is_one_step_where_a_product_reads_it() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        heads = x.view(3, 4, 2).transpose(0, 1).unsqueeze(2).squeeze(2)
        return (heads @ w.t()).relu()

    record = agrees(function, [torch.randn(3, 8), torch.randn(5, 2)])
    assert 1 <= len(steps(record, ViewStep)) <= 3


def test_kernels_read_behind_views() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x @ y).t().unsqueeze(0).exp() + 1

    record = agrees(function, [torch.randn(3, 4), torch.randn(4, 5)])
    assert steps(record, ViewStep) == []
    assert all(step.startswith("mm") for step in steps(record, CallStep))


def test_parts_of_a_tensor_stay_where_they_begin() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        halves = x[:, 1:].t().chunk(2)
        return tuple((half.t() @ w).tanh() for half in halves)

    agrees(function, [torch.randn(5, 9), torch.randn(4, 3)])


def test_parts_and_pieces_are_no_calls() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        a, b = x[:, 1:].view(4, 2, 4)[:, 1].chunk(2, 1)
        c, d, e = x.transpose(0, 1).split((1, 3, 5))
        f, g = d.unbind(1)[:2]
        return torch.cat((b, -a), 1) @ w + c.sum() + e[1:, 2].exp().sum() + f @ g + (x[3:, ::2] @ x[1:2, ::2].t()).sum()

    record = agrees(function, [torch.randn(4, 9), torch.randn(4, 3)])
    assert all(name.startswith(("mm", "dot", "bmm")) for name in steps(record, CallStep)), steps(record, CallStep)


def test_a_part_that_is_written_to_counts_its_versions() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> None:
        x[1:3].copy_(y.exp())

    x = torch.zeros(4, 3)
    before = x._version
    agrees(function, [x, torch.randn(2, 3)])
    compiled(function)(x, torch.randn(2, 3))
    assert x._version > before


def test_operands_that_do_not_begin_their_storage() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.t() @ w).exp()

    storage = torch.randn(200)
    agrees(function, [storage[7:67].view(12, 5), storage[3:123:2].view(12, 5)])


def test_a_view_that_leaves_is_still_one() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = (x * 2).t()
        return y, y.unsqueeze(0) @ x.unsqueeze(0)

    agrees(function, [torch.randn(4, 4, requires_grad=True)], backward=True)


def test_storage_is_taken_over_behind_a_view_only_when_all_have_read() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x @ x
        z = y.t().exp()
        return z, (y.unsqueeze(0) @ x).sum(0) + z

    agrees(function, [torch.randn(6, 6)])


def test_a_narrow_result_beside_column_sums_has_storage_of_its_own() -> None:
    """Programs share a row's columns out, and one would write over what another still reads."""

    def function(x: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        doubled = r * 2
        return (doubled * x).sum(0), doubled

    (lowered,) = nests_of(function, torch.empty(64, 64), torch.empty(64, 1))
    rows = [number for number, buffer in enumerate(lowered.nest.buffers) if buffer.elements == 64]
    assert len(rows) == 3
    sources = range(len(lowered.nest.inputs))
    assert not any(writes_after_reads(lowered.nest, source, 0, in_order=True) for source in sources)
