"""Hand-written kernels that a compiled program chose, on a GPU: the numbers contract, memory, and explain's word."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.choose import test_padded
from tests.contract import keeps_contract, own
from tests.passes import norms
from tests.passes.losses import LOSSES, Head, inputs
from tilewright.backend import backend
from tilewright.choose import chooser
from tilewright.measure.truth.verify import verify

pytestmark = pytest.mark.gpu


@pytest.fixture
def every_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those for small tensors, whose time is that of launches."""
    monkeypatch.setattr(chooser, "is_faster", lambda *_, **__: True)


@pytest.mark.usefixtures("every_offer")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_cross_entropy(loss: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
    arguments = [x.detach().cuda().requires_grad_(x.requires_grad) for x in inputs(dtype)]
    record = keeps_contract(Head(loss, dtype).cuda(), arguments)
    assert own(record) == {"cross_entropy", "cross_entropy_backward"}


@pytest.mark.parametrize("classes", [50257, 30522])
@pytest.mark.parametrize("loss", [torch.nn.functional.cross_entropy, None], ids=["loss", "logits"])
def test_products_that_are_not_aligned(loss: Callable[..., Tensor] | None, classes: int) -> None:
    model = test_padded.Head(classes, 768, loss, bias=True).cuda()
    x = torch.randn(4096, 768, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    record = keeps_contract(model, [x, torch.randint(0, classes, (4096,), device="cuda")])
    assert [d.verdict for d in record.decisions if d.passed_by == "pad_products"] == ["taken"] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_norms_with_the_residual_stream(dtype: torch.dtype, training: bool) -> None:
    made = (torch.randn(8192, 4096, dtype=dtype, device="cuda", requires_grad=training) for _ in range(2))
    ran = own(keeps_contract(norms.Residual(dtype, 4096).cuda(), list(made), training=training))
    assert "add_norm" in ran and ("norm_backward" in ran) == training


def test_a_loss_beside_logits_whose_gradient_nobody_gives() -> None:
    head = torch.nn.Linear(768, 30522, dtype=torch.bfloat16, device="cuda")

    def both(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(x)
        return torch.nn.functional.cross_entropy(logits.float(), target), logits

    compiled = torch.compile(both, backend=backend, fullgraph=True)
    x = torch.randn(4096, 768, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    arguments = [x, torch.randint(0, 30522, (4096,), device="cuda")]
    rows = verify(lambda *given: both(*given)[0], lambda *given: compiled(*given)[0], arguments)
    rows += verify(both, compiled, arguments)
    assert len(rows) == 5 and [row for row in rows if not row.ok] == []


@pytest.mark.parametrize("training", [False, True])
def test_a_linear_layer_and_its_gelu(training: bool) -> None:
    layers = torch.nn.Linear(768, 3072), torch.nn.GELU(), torch.nn.Linear(3072, 768)
    x = torch.randn(8192, 768, dtype=torch.bfloat16, device="cuda", requires_grad=training)
    record = keeps_contract(torch.nn.Sequential(*layers).to("cuda", torch.bfloat16), [x], training=training)
    assert own(record) == {"linear_gelu"}
    # The executor runs its recipe, and does not call it from Python.
    (step,) = [
        step for graph in record.graphs for step in graph.executable.steps if step.name.startswith("linear_gelu")
    ]
    assert getattr(step, "recipe", None) is not None
