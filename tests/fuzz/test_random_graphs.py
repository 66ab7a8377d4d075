"""Random programs, compiled many at a time, keep the numbers contract: results and gradients.

`TILEWRIGHT_FUZZ_GRAPHS` says how many (75 unless told). The programs are the same at every run.
`python -m benchmarks.random_programs` runs thousands, on a GPU too.
"""

import os

import pytest

from tests.fuzz.batches import Batch, drawn, failure

GRAPHS = int(os.environ.get("TILEWRIGHT_FUZZ_GRAPHS") or 75)
FIRST = 25
TOGETHER = 25


@pytest.mark.parametrize("first", range(FIRST, FIRST + GRAPHS, TOGETHER))
def test_random_graphs_keep_the_numbers_contract(first: int) -> None:
    # Every third batch is compiled for inference.
    training = first // TOGETHER % 3 != 2
    batch = Batch(drawn(first, TOGETHER), first)
    try:
        rows, record = batch.check(training)
    except Exception as error:
        found = [failure(g, s, training, []) for g, s in zip(batch.programs, batch.seeds, strict=True)]
        raise AssertionError("\n\n".join(text for text in found if "Error" in text)) from error
    assert record.fallbacks == []
    executables = [graph.executable for graph in record.graphs]
    # Beside a result without dimensions, backward is compiled first without the other gradients, then with all.
    assert 1 + training <= len(executables) <= 1 + 2 * training
    assert all(executable is not None and executable.kernels for executable in executables)
    broken = batch.missed(rows, training)
    assert not broken, "\n\n".join(
        failure(batch.programs[i], batch.seeds[i], training, rows) for i, rows in broken.items()
    )
