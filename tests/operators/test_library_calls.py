"""Calls that stay PyTorch's have rows, draw what eager draws, and give eager's values and gradients."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.contract import recorded

DRAWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: torch.randperm(9),
    lambda x: torch.randint(5, (3,)),
    lambda x: torch.randint_like(x, 5),
    lambda x: torch.randint_like(x, 2, 5),
    lambda x: F.rrelu(x, training=True),
    lambda x: torch.poisson(x.abs()),
    lambda x: torch.empty(9).exponential_() + 1,
    lambda x: torch.empty(9).geometric_(0.5),
    lambda x: torch.empty(9).cauchy_(),
    lambda x: torch.empty(9).log_normal_(),
    lambda x: torch.normal(x, 0.5),
    lambda x: torch.normal(x, x.abs()),
    lambda x: torch.empty(6).bernoulli_(x.sigmoid()[:, 0]),
    lambda x: F.gumbel_softmax(x, hard=True),
]
SYSTEMS: list[Callable[[Tensor], Tensor]] = [
    torch.linalg.det,
    torch.linalg.inv,
    torch.linalg.cholesky,
    torch.linalg.eigvalsh,
    torch.linalg.svdvals,
    torch.linalg.matrix_exp,
    torch.logdet,
    lambda a: torch.linalg.solve(a, a[:, :2].contiguous()),
    lambda a: torch.linalg.solve_triangular(a.tril(), a, upper=False),
    lambda a: torch.linalg.qr(a)[1],
    lambda a: torch.linalg.lu(a)[2],
    lambda a: torch.cholesky_solve(a[:, :1], a.tril()),
]
OTHERS: list[Callable[[Tensor], Tensor]] = [
    lambda x: torch.logcumsumexp(x, 1),
    lambda x: F.embedding_bag(torch.tensor([[0, 2], [1, 5]]), x, mode="sum"),
    lambda x: F.cross_entropy(x[None, :, :, None], torch.zeros(1, 5, 1, dtype=torch.int64)),
    lambda x: torch.cdist(x, x + 1),
    lambda x: F.pdist(x),
    lambda x: torch.dist(x, x * 2),
    lambda x: F.triplet_margin_loss(x, x + 1, x * 2),
    lambda x: x.renorm(2, 0, 1.0),
    lambda x: torch.addr(x, x[:, 0], x[0]),
    lambda x: torch.block_diag(x, x),
    lambda x: x.repeat_interleave(torch.tensor([1, 2, 1, 1, 1, 1]), 0, output_size=7),
    lambda x: x.new_zeros(6, 5).masked_scatter(x > 0, x),
    lambda x: torch.frexp(x)[0],
    lambda x: torch.hann_window(9) * 2,
    lambda x: torch.tril_indices(5, 5) + 1,
    lambda x: torch.isin(x.round(), 1),
    lambda x: torch.searchsorted(torch.arange(5.0), 2.5),
    lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
    lambda x: F.interpolate(x[None, None], scale_factor=2, mode="bilinear", antialias=True),
    lambda x: F.grid_sample(x[None, None], F.affine_grid(x[None, :2, :3], [1, 1, 4, 4], False), align_corners=False),
    lambda x: torch.linspace(0, 1, 5) * torch.fft.fftfreq(5),
    lambda x: F.soft_margin_loss(x, x.detach().sign()),
    lambda x: torch.special.airy_ai(x.detach()) + torch.special.hermite_polynomial_h(x.detach(), 3),
    lambda x: x.detach().unique(),
    lambda x: torch.unique_consecutive(x.detach(), dim=0),
    lambda x: torch.bincount(x.detach().abs().long().flatten(), minlength=4),
    lambda x: torch.geqrf(x.detach())[0],
    lambda x: torch.histogram(x.detach(), 3).hist,
]


def _gradient(results: list[Tensor], x: Tensor) -> Tensor:
    ends = [t for t in results if t.requires_grad]
    (found,) = torch.autograd.grad(ends, x, [torch.ones_like(t) for t in ends])
    return found


def test_library_calls_have_rows_and_are_eagers() -> None:
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def program(x: Tensor) -> list[Tensor]:
        system = x.mT @ x + 5 * torch.eye(5)
        return [*(f(x) for f in DRAWS), *(f(system) for f in SYSTEMS), *(f(x) for f in OTHERS)]

    call, record = recorded(program)
    torch.manual_seed(3)
    ours, state = call(x), torch.get_rng_state()
    torch.manual_seed(3)
    eager = program(x)
    assert torch.equal(state, torch.get_rng_state())
    torch.testing.assert_close(ours, eager)
    torch.testing.assert_close(_gradient(ours, x), _gradient(eager, x), rtol=1e-4, atol=1e-5)
    assert record.fallbacks == []
