"""A changed line of a source changes the digests of what is made from it, and of nothing else."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.copied_sources import change_a_line, copied_sources
from tilewright.choose import attention_race
from tilewright.kernels import linear
from tilewright.launch.race import race_key
from tilewright.records import outcomes, sources
from tilewright.records.outcomes import Outcome

RACES = {"linear": linear.MADE_FROM, "attention": attention_race.MADE_FROM}


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    with copied_sources(tmp_path, monkeypatch, "kernels", "emit", "loops", "runtime") as folder:
        yield folder


@pytest.mark.parametrize(
    ("changed", "forgotten"),
    [
        ("kernels/attention/hopper/backward.cu", {"attention"}),
        ("kernels/linear/cuda.py", {"linear"}),
        ("kernels/wgmma.cuh", {"attention", "linear"}),
        ("kernels/dropout_add/philox.py", {"attention", "linear"}),
        ("kernels/softmax/cuda.py", set()),
        ("loops/lower.py", set()),
    ],
)
def test_races_are_forgotten_when_a_line_of_their_candidates_changes(
    copied: Path, changed: str, forgotten: set[str]
) -> None:
    def key(name: str) -> str:
        return race_key((name,), torch.device("cpu"), RACES[name])

    for name in RACES:
        outcomes.keep(key(name), Outcome({"one": 1.0, "other": 2.0}))
    assert all(outcomes.lookup(key(name)) for name in RACES)
    change_a_line(copied / changed)
    assert {name for name in RACES if outcomes.lookup(key(name)) is None} == forgotten


def test_a_race_is_forgotten_under_another_triton_pytorch_or_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from tilewright.launch import race as module

    def key() -> str:
        return race_key(("work",), torch.device("cpu"), ("emit",))

    keys = {key(), race_key(("other work",), torch.device("cpu"), ("emit",))}
    for name, changed in (("versions", lambda: ("torch 3",)), ("device_kind", lambda device: "a CPU of 1999")):
        with monkeypatch.context() as patched:
            patched.setattr(module, name, changed)
            keys.add(key())
    with monkeypatch.context() as patched:
        patched.setenv("CXX", "true")
        keys.add(key())
    assert len(keys) == 5
    assert key() in keys


def test_what_lies_beside_the_sources_does_not_count(copied: Path) -> None:
    before = sources.digest("kernels/softmax")
    (copied / "kernels/softmax/__pycache__").mkdir()
    (copied / "kernels/softmax/__pycache__/cuda.cpython-312.pyc").write_bytes(b"code")
    sources.digest.cache_clear()
    assert sources.digest("kernels/softmax") == before


def test_programs_are_made_from_every_package_between_operators_and_compile() -> None:
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    layers = [layer.strip("()") for layer in settings["tool"]["importlinter"]["contracts"][0]["layers"]]
    compiled = layers[layers.index("compile") : layers.index("operators") + 1]
    assert {place.removesuffix(".py") for place in sources.PROGRAMS} == {"backend", *compiled}
    assert {"loops", "schedule"} < set(sources.GENERATED)
