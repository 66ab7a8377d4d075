"""How often the Transformer block calls the C++ compiler: once a graph with an empty cache, never again after that."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples.transformer_block import Block
from tests.backend.compiling import compiled
from tilewright.runtime import compiler


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that gets a line for each call, in a process that has loaded nothing."""
    wrapper, calls = tmp_path / "compiler", tmp_path / "calls"
    wrapper.write_text(f'#!/bin/sh\necho x >> {calls}\nexec g++ "$@"\n')
    wrapper.chmod(0o755)
    calls.touch()
    monkeypatch.setenv("CXX", str(wrapper))
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_loaded", {})
    return calls


def train() -> None:
    compiled(Block(32, 4, 0.1))(torch.randn(2, 16, 32)).sum().backward()


def test_one_call_a_graph_and_none_with_a_warm_cache(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    train()
    assert calls.read_text() == "x\n" * 2, "the forward and the backward graph"
    train()
    torch._dynamo.reset()
    train()
    monkeypatch.setattr(compiler, "_loaded", {})
    torch._dynamo.reset()
    train()
    assert calls.read_text() == "x\n" * 2
