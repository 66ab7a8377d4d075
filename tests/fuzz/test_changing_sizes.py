"""Random programs, compiled once for changing sizes, keep the numbers contract at sizes that have nothing in common.

Every number of such a program is also compared with a plan for the sizes of the call (`TILEWRIGHT_VERIFY`).
`TILEWRIGHT_FUZZ_GRAPHS` says how many (3 unless told).
"""

import os
from random import Random

import pytest
import torch

from tests.fuzz.batches import drawn
from tests.fuzz.conditioning import unverified
from tests.fuzz.graphs import MOST_ELEMENTS, Graph
from tests.fuzz.test_random_graphs import TOGETHER
from tilewright.backend import backend, recording
from tilewright.measure.truth.verify import verify

GRAPHS = int(os.environ.get("TILEWRIGHT_FUZZ_GRAPHS") or 3)
FIRST = 50_000
SIZES = 4
TRIES = 30


def runs(graph: Graph) -> bool:
    """Whether PyTorch runs it, with results of some elements."""
    try:
        with torch.no_grad():
            results = graph.function()(*graph.make_inputs(0))
    except (RuntimeError, IndexError):
        return False
    results += graph.make_inputs(0)
    return all(0 < x.numel() <= 2 * MOST_ELEMENTS for x in results)


def resized(graph: Graph, random: Random) -> Graph:
    """The program for other sizes, which are different where its own are."""
    extents = sorted({n for given in graph.inputs for n in given.shape if n > 1})
    others = {n: random.choice([n * random.choice([3, 5, 7]), random.randint(2, 40)]) for n in extents}
    return graph.with_sizes(others) if len(set(others.values())) == len(extents) else graph


def at_several_sizes(graph: Graph, random: Random) -> list[Graph]:
    found = [graph]
    for _ in range(TRIES):
        other = resized(graph, random)
        if other not in found and runs(other):
            found.append(other)
        if len(found) == SIZES:
            break
    return found


@pytest.mark.parametrize("number", range(GRAPHS))
def test_random_graphs_of_changing_sizes_keep_the_numbers_contract(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEWRIGHT_VERIFY", "1")
    seed, place = FIRST + TOGETHER * (number // TOGETHER), number % TOGETHER
    graph, training = drawn(seed, TOGETHER)[place], number % 3 != 2
    function = graph.function()
    torch._dynamo.reset()
    run = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    with recording() as record:
        for sized in at_several_sizes(graph, Random(number)):
            inputs = sized.make_inputs(number)
            missed = {row.tensor: row for row in verify(function, run, inputs, seed=number, training=training)}
            missed = {name: row for name, row in missed.items() if not row.ok}
            for name in unverified(function, inputs, number, training) if missed else []:
                missed.pop(name, None)
            assert not missed, f"{sized.reproducer(number)}\n" + "\n".join(map(str, missed.values()))
    assert record.fallbacks == []
