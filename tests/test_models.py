"""`benchmarks/models.py`: rows of a model measured in this process, and the table of rows."""

from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.curves import distance, train
from benchmarks.model_runs import Request, run
from benchmarks.model_table import lines, table
from benchmarks.model_zoo import DECODERS, Scored, Size
from tilewright.measure.racing.results import read_results
from tilewright.records.measurement import Direction, Measurement


def _row(case: str, impl: str, us: float, direction: Direction = "infer", peak: int | None = None) -> Measurement:
    return Measurement("models", case, impl, direction, us, us, us, 9, peak_bytes=peak, launches=7, gpu_us=us / 2)


def test_rows_of_a_model_in_inference_and_training(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    run(Request("unet", "cpu", True, ("infer", "train"), ("eager",), 0.2, tmp_path))
    rows = read_results(tmp_path / "unet.jsonl")
    assert {(row.case, row.direction, row.impl) for row in rows} == {
        ("unet B1 16x16 fp32", "infer", "eager"),
        ("unet B1 16x16 fp32", "step", "eager"),
    }
    for row in rows:
        assert row.peak_bytes and row.first_call_us
        # Eager is compared with float64 as the others are.
        assert row.error == row.eager_error and row.error is not None and 0 < row.error < 1e-4


def test_decoding_attends_to_the_token_that_it_writes() -> None:
    workload = DECODERS["llama-B1"](Size(tiny=True))
    first = workload.model(**workload.inputs)
    cached = workload.model.blocks[0].keys  # type: ignore[index,union-attr]
    assert torch.equal(workload.model(**workload.inputs), first)
    # What stands at the position before the call is overwritten, what stands elsewhere counts.
    cached[:, :, -1] = 7.0  # type: ignore[index,operator]
    assert torch.equal(workload.model(**workload.inputs), first)
    cached[:, :, 0] = 7.0  # type: ignore[index,operator]
    assert not torch.equal(workload.model(**workload.inputs), first)


class Dropped(nn.Module):
    """Least squares behind dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 1), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Scored:
        found = self.dropout(self.linear(x))
        return Scored((found - 1).square().mean(), found)


def test_runs_of_a_model_begin_with_the_same_weights_and_differ_by_what_is_drawn() -> None:
    model, inputs = Dropped(), {"x": torch.randn(64, 8)}
    first, again, other = (train(model, model, inputs, 200, seed) for seed in (0, 0, 1))
    assert first.losses == again.losses and len(first.seconds) == 200
    assert sum(first.losses[-50:]) < sum(first.losses[:50])
    assert distance(first.losses, again.losses) == 0 < distance(first.losses, other.losses)
    # The last five of 25 steps are a window, too.
    assert distance([1.0] * 25, [1.0] * 20 + [1.5] * 5) == 0.5


def test_table_pairs_entrants_of_one_means_and_lists_the_slowest_first() -> None:
    rows = [
        _row("vit B2 bf16", "eager", 300.0),
        _row("vit B2 bf16", "inductor", 100.0, peak=100),
        _row("vit B2 bf16", "tilewright", 50.0, peak=50),
        _row("vit B2 bf16", "inductor-reduce-overhead", 40.0),
        _row("vit B2 bf16", "tilewright-reduce-overhead", 80.0),
        _row("vit B2 bf16", "tilewright", 50.0, "step"),
    ]
    made = lines(rows)
    assert [(line.by, line.ratio) for line in made] == [("replay", 0.5), ("calls", 2.0)]
    assert made[1].memory == 0.5 and made[1].of_eager == 6.0
    text = table(rows).splitlines()
    assert text[1].split()[:4] == ["vit", "infer", "B2", "bf16"] and "0.05 / 0.03" in text[2]
    assert "infer, calls, 1 cases: 2.00 × Inductor (worst 2.00), 6.00 × eager" in text[3]
