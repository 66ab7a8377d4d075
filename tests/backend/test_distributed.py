"""Training on two ranks (gloo): eager's losses and gradients; collectives keep their order and what they read."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

from tests.backend.compiling import assert_same, compiled
from tests.backend.ranks import SCENARIOS, train_on_two_ranks
from tilewright.backend import recording
from tilewright.operators.collectives import NAMESPACE, WAIT


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return train_on_two_ranks(tmp_path_factory.mktemp("ranks"), "cpu")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_training(scenario: str, outcome: tuple[str, str]) -> None:
    printed, errors = outcome
    assert f"{scenario} done" in printed.splitlines(), errors[-20000:]


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path / 'rendezvous'}")
    yield
    dist.destroy_process_group()


def gathered(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum reads `scaled` last, but the collective may still read it then."""
    scaled = x * 2
    result = torch.ops._c10d_functional.all_gather_into_tensor(scaled, 1, dist.group.WORLD.group_name)  # type: ignore[union-attr]
    beside = torch.nn.functional.gelu(scaled @ scaled) + scaled
    return torch.ops._c10d_functional.wait_tensor(result), beside


@pytest.mark.usefixtures("one_rank")
def test_operands_live_until_the_result_is_awaited() -> None:
    x = torch.randn(8, 8)
    with recording() as record:
        result = compiled(gathered)(x)
    assert_same(result, gathered(x))
    executable = record.graphs[0].executable
    steps = {step.name: place for place, step in enumerate(executable.steps)}
    (read,) = executable.steps[steps["all_gather_into_tensor"]].reads
    freed = next(place for place, step in enumerate(executable.steps) if read in step.frees)
    assert freed == steps["wait_tensor"]
    written_over = [over for step in executable.kernels for _, _, over in step.outputs]  # type: ignore[attr-defined]
    assert read not in written_over


def reduced(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The second reduction does not read the first; the third is equal to the first."""
    first = collectives.all_reduce(x.sin(), "sum", dist.group.WORLD)
    second = collectives.all_reduce(y.cos(), "sum", dist.group.WORLD)
    third = collectives.all_reduce(x.sin(), "sum", dist.group.WORLD)
    return third * second + first


@pytest.mark.usefixtures("one_rank")
def test_every_collective_runs_in_the_order_of_the_program() -> None:
    x, y = torch.randn(2, 4, 4)
    with recording() as record:
        result = compiled(reduced)(x, y)
    assert_same(result, reduced(x, y))
    (graph,) = record.graphs
    written = [n.name for n in graph.plan.graph.nodes if str(n.target).startswith(NAMESPACE) and str(n.target) != WAIT]
    run = [step.name for step in graph.executable.steps if step.name in written]
    assert run == written and len(run) == 3
    assert not record.fallbacks
