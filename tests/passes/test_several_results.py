"""Every rewrite for a GPU where its operands are some of several results of a call: no call itself is a tensor."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.graphs import aten
from tilewright.compile.stages import EACH_GRAPH, JOINT
from tilewright.hardware.target import target_named


def read_index(x: Tensor, index: Tensor) -> list[Tensor]:
    rows, columns = index.shape
    sent, zeros, row = x[:rows, :columns], torch.zeros_like(x), index[:, 0]
    return [
        zeros.scatter_add(0, index, sent), zeros.scatter_reduce(0, index, sent, "amax"),
        zeros.index_add(0, row, x[:rows]), zeros.index_put((row,), x[:rows], accumulate=True),
        F.embedding(index, x * 2), F.cross_entropy(x[:rows], row), x[x[row].argsort(0)[:, 0]], row.sort()[0],
    ]  # fmt: skip


def read_numbers(x: Tensor, q: Tensor) -> list[Tensor]:
    weight = x.reshape(-1)[: q.shape[1]].expand(3, q.shape[1])
    return [
        F.leaky_relu(F.linear(q, weight, x[0, :3])), q.log_softmax(-1)[:, 0], F.layer_norm(q, q.shape[1:]),
        F.rms_norm(q, q.shape[1:]), F.dropout(q, 0.5), torch.cat([q, q]), q.to(torch.bfloat16).sum(0),
        F.conv1d(q[None, :1], x[None, :1, :1]), F.nll_loss(q, torch.zeros_like(q[:, 0], dtype=torch.int64)),
    ]  # fmt: skip


def program(given: Tensor) -> list[Tensor]:
    x = given.detach().requires_grad_()
    indices = [x.cummin(0)[1], x.max(0, keepdim=True)[1], x.topk(8, 1)[1]]
    numbers = [
        torch.var_mean(x, 0, keepdim=True)[1], torch.native_layer_norm(x, [16], None, None, 1e-5)[0],
        torch.frexp(x.detach())[0], x.split(4, 1)[1],
    ]  # fmt: skip
    found = [y for index in indices for y in read_index(x, index)]
    found += [y for q in numbers for y in read_numbers(x, q)]
    return [*found, *torch.autograd.grad(torch.stack([y.sum() for y in found]).sum(), x)]


def test_rewrites_see_one_of_several_results_as_a_tensor() -> None:
    """In strict mode a rewrite that raises is an error."""
    graph, target = aten(program, torch.randn(8, 16)), target_named("h200")
    for stage in (JOINT, EACH_GRAPH):
        stage.run(graph, target)
    graph.lint()
