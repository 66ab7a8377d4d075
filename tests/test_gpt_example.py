"""The GPT example: it learns, a compiled run has eager's losses, and a resumed one those of a run never stopped."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.gpt import compare, plot
from examples.gpt.model import GPT, Shape, sample
from examples.gpt.train import Corpus, Options, Trainer, train

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
SHAPE = Shape(layers=1, heads=2, width=32, sequence=32, dropout=0.1)


@pytest.fixture
def options(tmp_path: Path) -> Options:
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.py").write_text("def double(x):\n    return 2 * x\n" * 400)
    return Options("eager", steps=6, batch=4, warmup=2, validate_every=3, validation_batches=2, data=data, shape=SHAPE)


def curve(options: Options) -> list[dict[str, Any]]:
    """The log of a run."""
    assert options.curve
    train(options, CPU, quiet=True)
    return [json.loads(line) for line in options.curve.read_text().splitlines()]


def losses(rows: list[dict[str, Any]]) -> list[float]:
    return [loss for row in rows for loss in (row["loss"], row.get("validation_loss", 0.0))]


def test_a_compiled_run_has_eagers_losses(options: Options, tmp_path: Path) -> None:
    runs = {name: curve(replace(options, backend=name, curve=tmp_path / name)) for name in ("eager", "tilewright")}
    assert [row["step"] for row in runs["eager"]] == list(range(6))
    torch.testing.assert_close(losses(runs["eager"]), losses(runs["tilewright"]), rtol=1e-5, atol=0)
    assert [row["run"] for row in plot.chart(runs).hconcat[1].data.values] == ["eager", "tilewright"]


def test_eager_runs_of_other_draws_say_how_far_apart_curves_may_be(options: Options, tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.jsonl" for name in ("eager", "again", "same")]
    for path, draws in zip(paths, (0, 1, 0), strict=True):
        curve(replace(options, draws=draws, curve=path))
    runs = compare.read(paths)
    assert compare.distance(runs["eager"], runs["same"]) == 0
    assert 0 < compare.distance(runs["eager"], runs["again"]) < 0.5
    told = compare.lines(runs)
    assert told[2].endswith("from eager 0.0000") and told[3].startswith("eager runs are 0.")


def test_a_run_learns(options: Options, tmp_path: Path) -> None:
    rows = curve(replace(options, steps=40, rate=3e-3, curve=tmp_path / "log"))
    assert rows[-1]["validation_loss"] < 0.8 * rows[0]["loss"]


def test_a_resumed_run_has_the_losses_of_one_never_stopped(options: Options, tmp_path: Path) -> None:
    whole = curve(replace(options, curve=tmp_path / "whole"))
    path = tmp_path / "checkpoints" / "gpt.pt"
    stopped = Trainer(replace(options, checkpoint=path, save_every=3), CPU)
    for row in stopped.steps():
        if row["step"] == 2:
            break
    resumed = curve(replace(options, checkpoint=path, curve=tmp_path / "resumed"))
    assert [row["step"] for row in resumed] == [3, 4, 5]
    assert losses(resumed) == losses(whole[3:])


def test_two_halves_of_a_batch_have_its_gradient(options: Options) -> None:
    """Without dropout; the batch that both halves draw is the same one, so its mean is each half's."""
    shape = replace(SHAPE, dropout=0.0)
    norms = []
    for accumulate in (1, 2):
        trainer = Trainer(replace(options, accumulate=accumulate, shape=shape, steps=1), CPU)
        given = trainer.corpus.batch("train", (4, 32), (7,))
        trainer.corpus.batch = lambda *_, given=given: given  # type: ignore[method-assign]
        norms.append(next(trainer.steps())["norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_no_byte_sees_those_after_it() -> None:
    model = GPT(replace(SHAPE, dropout=0.0))
    text = torch.randint(0, 256, (1, 32))
    other = text.clone()
    other[0, 20:] = 7
    torch.testing.assert_close(model(text)[:, :20], model(other)[:, :20])
    assert sample(model, b"def ", 5).startswith(b"def ") and len(sample(model, b"a", 9)) == 10


def test_batches_follow_from_their_seed_and_targets_are_the_next_bytes(options: Options) -> None:
    corpus = Corpus(options.data)
    x, y = corpus.batch("train", (3, 16), (0, 1))
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(x, corpus.batch("train", (3, 16), (0, 1))[0])
    assert not torch.equal(x, corpus.batch("train", (3, 16), (0, 2))[0])


def test_two_ranks_by_torchrun(options: Options, tmp_path: Path) -> None:
    log, sizes = tmp_path / "log", ["--layers", "1", "--heads", "2", "--width", "32", "--sequence", "32"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    run = [
        "-m",
        "examples.gpt.train",
        "--backend",
        "eager",
        "--steps",
        "2",
        "--batch",
        "2",
        "--validation-batches",
        "1",
        "--data",
    ]
    arguments = [*command, *run, str(options.data), "--curve", str(log), *sizes]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["ranks"] for line in log.read_text().splitlines()] == [2, 2]
