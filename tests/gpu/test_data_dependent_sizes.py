"""On a GPU, training graphs with sizes that depend on data have eager's gradients and are planned once."""

import pytest
import torch

from tests.backend.test_custom_operators import experts as grouped_experts
from tests.backend.test_data_dependent_sizes import SHIFTS, TRAINED, agrees_at_each, whole_graphs
from tilewright.backend import backend

pytestmark = pytest.mark.gpu
__all__ = ["whole_graphs"]


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("name", TRAINED)
def test_gradients_are_eagers(name: str, mode: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    function = TRAINED[name]
    # What reads how many there are is not recorded: that these graphs stay by calls is a line, not an error.
    monkeypatch.setenv("TILEWRIGHT_STRICT", "0" if mode else "1")
    record = agrees_at_each(lambda x: function(x).sum(), SHIFTS, device="cuda", mode=mode)
    assert len(record.graphs) == 2
    assert all(any(step.generated for step in graph.executable.steps) for graph in record.graphs)


def test_a_custom_gradient_that_reads_data_is_one_call() -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    run = torch.compile(grouped_experts, backend=backend)
    for ends in ([2, 2, 7], [0, 5, 7], [1, 2, 7]):
        x = torch.randn(7, 9, generator=generator, device="cuda", requires_grad=True)
        w = torch.randn(3, 9, 4, generator=generator, device="cuda", requires_grad=True)
        ours, theirs = (each(x, w, torch.tensor(ends, device="cuda")) for each in (run, grouped_experts))
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(torch.autograd.grad(ours, (x, w)), torch.autograd.grad(theirs, (x, w)))
