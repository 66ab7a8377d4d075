"""The wave tail, predicted from occupancy, against a measured sweep of grid sizes."""

from __future__ import annotations

import functools

import pytest
import torch

from benchmarks.staircase import Staircase, errors, staircases, sweep

pytestmark = pytest.mark.gpu
WITHIN = 0.05


@functools.cache
def _stairs() -> dict[str, Staircase]:
    return {stairs.name: stairs for stairs in staircases(torch.device("cuda:0"))}


@pytest.mark.parametrize("name", ["product", "vector"])
def test_every_grid_size_takes_the_time_predicted(name: str) -> None:
    found = errors(sweep(_stairs()[name], torch.cuda.get_device_name(), torch.device("cuda:0")))
    assert len(found) >= 15
    assert {case: error for case, error in found.items() if abs(error) > WITHIN} == {}


def test_a_tail_of_one_program_is_seen() -> None:
    """The prediction must not be right for want of a tail: one program more than a wave costs a step."""
    stairs = _stairs()["product"]
    rows = sweep(stairs, torch.cuda.get_device_name(), torch.device("cuda:0"))
    by_size = {int(row.case.split()[1]): row.median_us for row in rows}
    assert by_size[stairs.width + 1] > 1.5 * by_size[stairs.width - 1]
