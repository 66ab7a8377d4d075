"""Writes into static caches, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import run_interpreted


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_interpreted(Path(__file__).with_name("interpreted_cache_writes.py"))
