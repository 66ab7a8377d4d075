"""`tilewright explain` end to end: the figures of the definitions, the tree, JSON, every kind of target."""

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields
from pathlib import Path

import pytest

from tests.cli.commands import MODELS, OWN_PATH, WITHOUT_MEASURED_CEILINGS, Tilewright, between, documented_keys
from tests.waiting import HANG_S, until
from tilewright import cli
from tilewright.hardware import profiles
from tilewright.records.measurement import Ceiling, Measurement, Verified
from tilewright.records.program import Fallback
from tilewright.store import query, read_program, read_rows
from tilewright.verbs.bisection import Bisected

EXAMPLES = Path(__file__).parents[2] / "examples"
GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("flags", [(), ("--inference",)])
def test_the_naive_softmax_reads_and_writes_what_the_definitions_say(
    flags: tuple[str, ...], tilewright: Tilewright
) -> None:
    ended = tilewright("explain", f"{EXAMPLES}/naive_softmax.py:softmax", "--on", "cpu", *flags)
    assert (ended.code, ended.err) == (0, "")
    before, after = between(ended.lines, "before fusion:"), between(ended.lines, "after fusion:")
    assert before[0].startswith("before fusion: 5 launches, 640 MB moved")
    assert before[1:] == ["  reads 5·N·M + 2·N  writes 3·N·M + 2·N", "  unused N (indices of max)", "  FLOPs 4·N·M"]
    assert after[0].startswith("after fusion: 1 launch, 160 MB moved")
    assert after[1:] == ["  reads N·M  writes N·M", "  FLOPs 4·N·M"]
    assert between(ended.lines, "saved by fusion:") == [
        "saved by fusion: 480 MB",
        "  reads 4·N·M + 2·N  writes 2·N·M + 2·N  unused N",
    ]


@pytest.mark.parametrize("name", ["attention", "square"])
def test_attention_names_the_products_and_the_squares_that_vanish(name: str, tilewright: Tilewright) -> None:
    ended = tilewright("explain", f"{EXAMPLES}/attention.py:{name}", "--on", "cpu", "--inference")
    assert (ended.code, ended.err) == (0, "")
    for total in ("before fusion:", "after fusion:"):
        assert "  matmul FLOPs 4·B·N²·d" in between(ended.lines, total)
    assert "  reads 3·B·N² + 3·B·N·d  writes 3·B·N² + B·N·d" in between(ended.lines, "before fusion:")
    assert "N²" not in between(ended.lines, "after fusion:")[1]
    reads, writes = between(ended.lines, "saved by fusion:")[1].split("  writes ")
    assert reads.startswith("  reads 3·B·N² − ") and writes.startswith("3·B·N² − ")


def test_the_tree_of_the_block(tilewright: Tilewright) -> None:
    ended = tilewright("explain", f"{EXAMPLES}/transformer_block.py:block", "--tree", "--on", "cpu")
    assert ended.code == 0
    steps = "LN → Q,K,V → heads → QKᵀ/√d → softmax → PV → merge → out-projection → dropout → residual"
    assert ended.lines[0] == f"block  {steps} → LN → FF1 → GELU → FF2 → dropout → residual"
    leaves = "\n".join(ended.lines)
    for kind in (
        "compute addmm",
        "compute bmm",
        "pointwise gelu",
        "pointwise add",
        "reduction native_layer_norm",
        "reduction _softmax",
        "layout transpose",
        "random native_dropout",
    ):
        assert f"── {kind}" in leaves, kind
    assert "float32[B, H, S, D/H]" in leaves and "transformer_block.py:" in leaves


SOFTMAX_SCHEDULES = {
    "h200": "tile 1 × 5·1024, 8 warps, 4000 programs",
    "a100": "tile 1 × 5·1024, 8 warps, 4000 programs",
    "cpu": "tile 1 × 512, columns in a loop, 4000 for all threads",
}


def test_floors_of_a_device_that_is_not_here(tilewright: Tilewright) -> None:
    floors = {}
    for device in ("h200", "a100", "cpu"):
        ended = tilewright("explain", f"{EXAMPLES}/naive_softmax.py:softmax", "--on", device, "--json")
        document = json.loads(ended.out)
        assert {row["device"] for row in document["ceilings"]} == {device}
        (floors[device],) = [op["floor_us"] for op in document["operators"] if op["stage"] == "after"]
        (region,) = document["regions"]
        assert region["language"] == ("c++" if device == "cpu" else "triton")
        assert ("tl.load" in region["source_code"]) == (device != "cpu")
        assert region["schedule"] == SOFTMAX_SCHEDULES[device]
    # 160 MB at the 4255 GB/s that were measured on an H200.
    assert floors["h200"] == pytest.approx(160e6 / 4255e3, rel=0.01)
    assert floors["h200"] < floors["a100"] < floors["cpu"]


NORMED = """
from torch import nn

net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
"""


def test_a_network_with_buffers_is_explained_whole(
    tilewright: Tilewright, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[object] = []
    monkeypatch.setattr(logging.Logger, "exception", lambda *said, **_: logged.append(said))
    (tmp_path / "model.py").write_text(NORMED)
    inputs = ("--inputs", "f32[B=2,3,8,8]")
    document = json.loads(tilewright("explain", f"{tmp_path}/model.py:net", "--on", "h200", "--json", *inputs).out)
    after = [op for op in document["operators"] if op["stage"] == "after"]
    assert {"_foreach_copy_", "_foreach_add_"} <= {op["name"] for op in after} and not logged
    assert [op["name"] for op in after if op["cost"]["provenance"] == "unknown"] == []


ATTENDED = """
import torch.nn.functional as F


def attended(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)
"""


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_whose_attention_a_device_that_is_not_here_runs(dtype: str, tilewright: Tilewright, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    (tmp_path / "model.py").write_text(ATTENDED)
    inputs = ",".join([f"{dtype}[B=2,H=4,N=1024,d=64]"] * 3)
    ended = tilewright("explain", f"{tmp_path}/model.py:attended", "--on", "h200", "--training", "--inputs", inputs)
    assert (ended.code, ended.err) == (0, "")
    golden = GOLDEN / f"attention_{dtype}_on_h200.txt"
    # What is predicted is the model's of kernel times; whose kernel runs is what counts here.
    shown = [re.sub(r"\d[\d.]* µs", "µs", " ".join(line.split())) for line in between(ended.lines, "decisions")]
    assert shown == golden.read_text(encoding="utf-8").splitlines()


def test_json_is_json_and_all_of_it(tilewright: Tilewright, models: str) -> None:
    ended = tilewright("explain", f"{models}:small", "--json", "--on", "cpu")
    assert (ended.code, ended.err) == (0, "")
    document = json.loads(ended.out)
    assert document.keys() == documented_keys("explain, optimize")
    assert {op["graph"] for op in document["operators"]} == {"forward", "backward"}
    headings = {"operators": "a row of `operators`, before or after fusion"}
    for name in ("operators", "regions", "decisions", "memory", "ceilings"):
        rows, heading = document[name], headings.get(name, f"a row of `{name}`")
        assert rows and all(row.keys() == documented_keys(heading) for row in rows), name
    assert all(row["cost"].keys() == documented_keys("a row of `cost`") for row in document["operators"])


@pytest.mark.parametrize(("row", "heading"), [(Verified, "verified"), (Fallback, "fallbacks")])
def test_rows_that_a_plan_has_none_of_are_documented_too(row: type, heading: str) -> None:
    assert {field.name for field in fields(row)} == documented_keys(f"a row of `{heading}`")


def test_what_bisect_finds_as_json(tilewright: Tilewright, models: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests/test_bisection.py` has the search itself."""
    found = Bisected(
        [Verified("fwd", "out", "fp32", 1.0, 0.0, 1.0, 0.0, 1e-6, 1e-5, False)], "simplify", "exp", "m.py:3"
    )
    monkeypatch.setattr("tilewright.verbs.bisection.bisect_case", lambda *_: found)
    document = json.loads(tilewright("bisect", f"{models}:small", "--json").out)
    assert document.keys() == documented_keys("bisect") and document["broken"] == ["out"]
    assert "the rewrite simplify breaks the numbers contract at exp (m.py:3): out" in document["outcome"]


def test_quiet_prints_results_only(tilewright: Tilewright, models: str) -> None:
    loud, quiet = (tilewright("explain", f"{models}:small", "--on", "cpu", *flags) for flags in ((), ("-q",)))
    assert (quiet.code, quiet.err) == (0, "") and quiet.out == loud.out


@pytest.mark.parametrize(
    ("name", "inputs", "flags"),
    [
        ("Normed", "fp32[B=4,8]", ("--training",)),
        ("instance", "fp32[B=4,8]", ("--inference",)),
        ("two", "i=i64[K=3]<9,x=fp32[N=9,M=8]", ("--training",)),
        ("product", "fp32[N=4,K=6];fp32[K=6,M=3]", ()),
    ],
)
def test_modules_classes_and_functions(
    name: str, inputs: str, flags: tuple[str, ...], tilewright: Tilewright, models: str
) -> None:
    ended = tilewright("explain", f"{models}:{name}", "--inputs", inputs, "--on", "cpu", *flags)
    # Left in training mode it draws dropout's masks at inference, which is said.
    warned = "instance is in training mode" in ended.err
    assert ended.code == 0 and warned == (name == "instance" and "--inference" in flags) and (warned or not ended.err)
    assert ("\nbackward\n" in ended.out.replace(" \n", "\n")) == ("--training" in flags)
    assert "before fusion:" in ended.out


@pytest.fixture(scope="module")
def optimized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a home with one finished run, and how the command that made it ended."""
    folder = tmp_path_factory.mktemp("optimized")
    (folder / "models.py").write_text(MODELS)
    environment = {"TILEWRIGHT_HOME": str(folder / "home")}
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setenv("TILEWRIGHT_HOME", environment["TILEWRIGHT_HOME"])
        patch.delenv("COLUMNS", raising=False)
        patch.setattr(profiles, "local_profile", lambda **_: profiles.profile_for("cpu"))
        patch.setattr(sys, "argv", ["tilewright", "optimize", f"{folder}/models.py:small", "--seconds", "0.2"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return {**environment, "code": str(ended.value.code or 0), "out": out.getvalue(), "err": err.getvalue()}


@pytest.fixture
def with_run(optimized: dict[str, str], home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The finished run, in the home that commands of this test use."""
    monkeypatch.setenv("TILEWRIGHT_HOME", optimized["TILEWRIGHT_HOME"])
    return sorted(Path(optimized["TILEWRIGHT_HOME"]).rglob("*.duckdb"))[-1]


def test_optimize_proves_measures_and_says_where_it_put_that(optimized: dict[str, str], with_run: Path) -> None:
    assert (optimized["code"], optimized["err"]) == ("0", "")
    out = optimized["out"]
    assert "2 of 2 tensors within the numbers contract" in out
    for impl in ("eager", "inductor", "tilewright"):
        assert f" {impl} " in out
    last, page = out.splitlines()[-2:]
    assert last == f"run   {with_run}" and page == f"page  {with_run.with_suffix('.html')}"
    assert "small gelu" in Path(page.removeprefix("page  ")).read_text()
    assert with_run.stat().st_mode & 0o077 == 0
    assert not list(with_run.parent.glob(".run-*"))


def test_the_run_holds_all_that_was_learned(with_run: Path) -> None:
    program = read_program(with_run)
    assert query(with_run, 'SELECT "case", dims FROM run')[1] == [("small gelu", {"N": 64, "M": 32})]
    assert {op.stage for op in program.operators} == {"before", "after"}
    assert all(op.measured_us for op in program.operators if op.operator_class != "layout")
    assert all(region.measured_us and region.predicted_us for region in program.regions)
    tried = [row for row in program.decisions if row.verdict in ("taken", "tried and lost")]
    assert tried and all(row.measured_us and row.predicted_us for row in tried)
    assert {row.impl for row in read_rows(with_run, Measurement)} == {"eager", "inductor", "tilewright"}
    assert all(tensor.ok for tensor in read_rows(with_run, Verified)) and read_rows(with_run, Ceiling)


def test_sql_and_report_work_on_it(with_run: Path, tilewright: Tilewright, tmp_path: Path) -> None:
    ended = tilewright("sql", "SELECT graph, count(*) AS n FROM region GROUP BY graph ORDER BY graph", "--json")
    assert (ended.code, ended.err) == (0, "")
    assert json.loads(ended.out) == [{"graph": "backward", "n": 1}, {"graph": "forward", "n": 1}]
    table = tilewright("sql", "SELECT name FROM region WHERE graph = 'forward'")
    assert table.code == 0 and "forward0_mul_add_tanh" in table.out
    written = tilewright("report", "--out", str(tmp_path / "page.html"))
    assert (written.code, written.out) == (0, f"page  {tmp_path / 'page.html'}\n")
    assert (tmp_path / "page.html").stat().st_size > 10_000
    assert tilewright("report", "--run", str(with_run)).lines == [f"page  {with_run.with_suffix('.html')}"]


def test_an_interrupted_optimize_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(MODELS)
    compiler = tmp_path / "slow-compiler"
    compiler.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/compiler.pid\nexec sleep 300\n")
    compiler.chmod(0o755)
    environment = (
        os.environ
        | OWN_PATH
        | {"TILEWRIGHT_HOME": str(tmp_path / "home"), "TILEWRIGHT_CACHE": str(tmp_path / "cache"), "CXX": str(compiler)}
    )
    command = [sys.executable, "-c", WITHOUT_MEASURED_CEILINGS, "optimize", "models.py:small"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        until(lambda: (tmp_path / "compiler.pid").exists() and (tmp_path / "compiler.pid").read_text().strip() != "")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=HANG_S)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, "")
    assert err.strip() == "tilewright: interrupted; nothing was left half-written"
    assert [path for path in (tmp_path / "home").rglob("*") if path.is_file()] == []
    assert not list((tmp_path / "home").rglob("*.partial"))
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.name != ".lock"]
    assert not Path(f"/proc/{(tmp_path / 'compiler.pid').read_text().strip()}").exists()


def test_an_interrupt_while_measuring_leaves_nothing(
    tilewright: Tilewright, models: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        assert list(home.rglob("*.partial"))
        raise KeyboardInterrupt

    monkeypatch.setattr("tilewright.verbs.optimisation.measure", interrupted)
    ended = tilewright("optimize", f"{models}:small")
    assert (ended.code, ended.out) == (130, "")
    assert ended.err.strip() == "tilewright: interrupted; nothing was left half-written"
    assert [path for path in home.rglob("*") if path.is_file() or path.suffix == ".partial"] == []
