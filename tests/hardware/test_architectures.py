"""The table of architectures, and what a device's limits are made of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tilewright.hardware.architectures import INTERPRETER, DeviceLimits, limits_of


@pytest.fixture(autouse=True)
def _forget() -> None:
    limits_of.cache_clear()


@pytest.mark.parametrize(
    ("capability", "features"),
    [((8, 0), (1, False, False)), ((9, 0), (8, True, True)), ((12, 0), (8, True, False)), ((99, 0), (1, False, False))],
)
def test_sizes_are_the_devices_own_and_instructions_the_tables(
    capability: tuple[int, int], features: tuple[int, bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(multi_processor_count=7, shared_memory_per_block_optin=12345)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = limits_of(torch.device("cuda", 0))
    limits_of.cache_clear()
    assert found == DeviceLimits("{}.{}".format(*capability), 7, 12345, *features)


def test_the_cpu_interprets() -> None:
    assert limits_of(torch.device("cpu")) == INTERPRETER
