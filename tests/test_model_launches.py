"""`benchmarks/model_launches.py`: launches of a compiled model beside what is predicted and named elsewhere."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.model_launches import LaunchRow, differences, explained, launch_rows, read, table, work_of, write
from benchmarks.model_zoo import Workload
from tilewright import backend
from tilewright.hardware.profiles import local_profile, profile_for


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.linear(self.norm(x)), -1)


def _row(what: str, generated: bool, kernels: tuple[str, ...], recipe: tuple[str, ...] = ()) -> LaunchRow:
    return LaunchRow("m", "infer", "forward", what, what, generated, 8.0, 6.0, None, kernels, recipe)


def test_launches_are_those_of_the_call_with_their_work(tmp_path: Path) -> None:
    model, x = Small(), torch.randn(4, 32)
    with backend.recording() as record:
        compiled = torch.compile(model, backend=backend.backend)
        step: Callable[[], object] = lambda: compiled(x)  # noqa: E731
        step()
    rows = launch_rows("small", "infer", record, step, "cpu", local_profile(device="cpu"))
    assert [row.generated for row in rows] == [True, False, True]
    assert all(row.measured_us > 0 and row.error is not None for row in rows)
    write(tmp_path / "rows", rows)
    again = read(tmp_path / "rows")
    assert work_of(again[1]).products == ((1, 4, 8, 32),)
    text = table(again)
    assert "product" in text and "ALL                                          3" in text and "small infer" in text


def test_a_plan_without_the_device_names_what_is_planned_on_it() -> None:
    planned = explained(Workload(Small(), {"x": torch.randn(4, 32)}, "B4"), False, profile_for("h200"))
    assert isinstance(planned, list)
    assert [graph for graph, _, _ in planned] == ["forward"] * 3 and planned[1][2] == "aten.addmm.default"

    class Broken(Small):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    why = explained(Workload(Broken(), {"x": torch.randn(4, 32)}, "B4"), False, profile_for("h200"))
    assert isinstance(why, str) and "not one graph" in why


def test_the_inputs_of_a_model_want_no_gradient() -> None:
    planned = explained(Workload(nn.Linear(32, 8), {"input": torch.randn(4, 32)}, "B4"), True, profile_for("h200"))
    products = [what for graph, _, what in planned if graph == "backward" and "mm" in what]
    assert products == ["aten.mm.default"], "that of the weight alone"


def test_each_name_that_differs_is_told() -> None:
    ran = [
        _row("forward0_gelu", True, ("forward0_gelu", "forward0_gelu_after")),
        _row("tilewright.norm.default", False, ("void norm_rows<4>(float*)",), ("norm_rows",)),
        _row("aten.mm.default", False, ("nvjet_192x128",)),
    ]
    planned = [("forward", str(i), row.what) for i, row in enumerate(ran)]
    assert differences(planned, ran) == []
    # A call that launches nothing is planned, and not seen.
    assert differences([*planned, ("forward", "a", "aten.lift_fresh.default")], ran) == []
    assert differences(planned[1:], ran) == ["forward0_gelu: 0 planned, 1 ran"]
    assert differences([*planned, planned[1]], ran) == ["tilewright.norm.default: 2 planned, 1 ran"]
    other = [replace(ran[0], kernels=("triton_poi_fused",)), replace(ran[1], kernels=("rows_by_cluster",)), ran[2]]
    assert differences(planned, other) == [
        "forward0_gelu ran as triton_poi_fused",
        "tilewright.norm.default ran as rows_by_cluster, not as norm_rows",
    ]
