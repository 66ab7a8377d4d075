"""Operators that are traced as those of their formulas."""

import pytest
import torch
from torch import Tensor

from tests.contract import keeps_contract, launched, targets


@pytest.mark.parametrize("shapes", [((40, 7), (33, 7)), ((2, 30, 5), (2, 1, 5))], ids=str)
def test_distances_are_a_product_and_kernels(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    def near(a: Tensor, b: Tensor) -> Tensor:
        return torch.cdist(a, b, compute_mode="use_mm_for_euclid_dist").neg().exp()

    generator = torch.Generator().manual_seed(0)
    record = keeps_contract(near, [torch.randn(shape, generator=generator) for shape in shapes])
    assert not [target for target in targets(record) if "_euclidean_dist" in target]
    assert "kernel" in launched(record)


@pytest.mark.parametrize("exponent", [True, False])
def test_a_power_of_booleans_is_boolean(exponent: bool) -> None:
    x = torch.tensor([True, False])
    record = keeps_contract(lambda x: ~(x**exponent), [x])
    assert "kernel" in launched(record)
