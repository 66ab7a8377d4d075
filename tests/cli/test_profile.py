"""`tilewright profile` end to end: a case, a program, all ranks of a job, a block; and how each can fail."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewright as package
from tests.cli.commands import OWN_PATH, WITHOUT_MEASURED_CEILINGS, Tilewright, documented_keys
from tilewright.measure.recording.plan import Recording, RecordingPlan
from tilewright.profiling import saved
from tilewright.profiling.program import started_under_recorder
from tilewright.records.errors import TraceError, UsageError
from tilewright.records.measurement import Ceiling
from tilewright.store.query import query
from tilewright.store.run_paths import latest_run

WITHOUT_COMPILER = """
# An optimizer asks for PyTorch's compiler, which takes as long to import as PyTorch; nothing here is compiled.
import sys, types
sys.modules["torch._dynamo"] = types.SimpleNamespace(disable=lambda f, *_, **__: f, graph_break=lambda: None)
"""
TRAIN = """
import os, sys, torch
from torch import nn

if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
if "RANK" in os.environ:
    model = nn.parallel.DistributedDataParallel(model)
rule = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    rule.zero_grad()
    model(torch.randn(4, 8)).mean().backward()
    rule.step()
    print("step", step, flush=True)
if "RANK" in os.environ:
    torch.distributed.destroy_process_group()
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PYTHONPATH", OWN_PATH["PYTHONPATH"])
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return str(path)


def test_a_case(tilewright: Tilewright, models: str) -> None:
    ended = tilewright("profile", f"{models}:small", "--active", "7", "--timed", "0.3", "--json")
    assert ended.code == 0, ended.err
    document = json.loads(ended.out)
    assert document.keys() == documented_keys("profile")
    for name in ("host", "causes"):
        assert all(row.keys() == documented_keys(f"a row of `{name}`") for row in document[name])
    (recording,) = document["recordings"]
    assert recording["steps_kept"] == 7
    operators = {row["name"]: row for row in document["operators"]}
    assert operators["aten::tanh"]["calls"] == 7
    assert operators["phase forward"]["calls"] == operators["phase backward"]["calls"] == 7
    assert document["losses"] == []
    # Costs are in the same run, so that one query has both.
    run = Path(document["run"])
    assert query(run, "SELECT count(*) FROM operator WHERE target LIKE '%tanh%' AND floor_us > 0")[1][0][0] > 0
    assert run.with_suffix(".html").exists()
    # The steps after those, without the profiler: 20, and as many as fit into the time.
    assert query(run, "SELECT len(timed_us) >= 20 AND list_sum(timed_us) >= 0.3e6 FROM recording")[1] == [(True,)]


def test_a_module_with_its_optimizer(tilewright: Tilewright, models: str) -> None:
    target = (f"{models}:Normed", "--inputs", "fp32[B=4,D=8]")
    ended = tilewright("profile", *target, "--optimizer", "sgd", "--wait", "1", "--active", "2", "--timed", "0")
    assert ended.code == 0, ended.err
    shown = [line.split()[:2] for line in ended.lines]
    assert ["phase", "optimizer"] in shown and ["layer", "norm"] in shown and ["layer", "dropout"] in shown
    assert "recorded 2 steps" in ended.out


def test_a_program_that_stops_once_recorded(tilewright: Tilewright, train: str) -> None:
    Path(train).write_text(WITHOUT_COMPILER + TRAIN)
    plan = ("--wait", "0", "--active", "2", "--timed", "0", "--stop")
    ended = tilewright("profile", *plan, "--", sys.executable, train, "1000000", "0")
    assert ended.code == 0, ended.err
    assert "step 0\n" in ended.out and "recorded 2 steps" in ended.out and "step 100\n" not in ended.out
    found = query(latest_run(), "SELECT DISTINCT name FROM slice WHERE category = 'user_annotation'")[1]
    assert {"phase forward", "phase backward", "phase optimizer", "layer 2"} <= {name for (name,) in found}


def test_the_page_of_a_compiled_program_is_there_while_it_runs_on(tilewright: Tilewright, train: str) -> None:
    """And has the cost of its kernels."""
    compiled = "from tilewright.backend import backend\nmodel = torch.compile(model, backend=backend)\nrule = "
    waits = """
import glob, time
for _ in range(6000):
    if pages := glob.glob(os.environ["TILEWRIGHT_HOME"] + "/runs/*.html"):
        break
    time.sleep(0.1)
print("pages", len(pages), flush=True)
sys.exit("""
    text = TRAIN.replace("rule = ", compiled, 1).replace("nn.ReLU()", "nn.GELU()")
    Path(train).write_text(text.replace("\nsys.exit(", waits, 1))
    ended = tilewright("profile", "--timed", "0", "--", sys.executable, train, "60", "3")
    assert ended.code == 3 and "pages 1" in ended.out and "ended with exit code 3" in ended.err
    assert "the program runs on (--stop" in ended.err and ended.out.count("recorded 3 steps") == 1
    assert query(latest_run(), "SELECT steps_kept FROM recording")[1] == [(3,)]
    priced = "SELECT calls, provenance FROM operator_distance WHERE operator IN (SELECT name FROM region)"
    found = query(latest_run(), priced)[1]
    assert found and set(found) == {(3, "formula")}


def test_every_rank_of_a_job(tilewright: Tilewright, train: str) -> None:
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    ended = tilewright("profile", "--wait", "2", "--", *launch, train, "8", "0")
    assert ended.code == 0, ended.err
    ranks = query(latest_run(), "SELECT rank, world_size FROM trace_file ORDER BY id")[1]
    assert ranks == [(0, 2), (1, 2)]
    steps = "SELECT file_id, count(*) FROM step GROUP BY file_id ORDER BY file_id"
    assert query(latest_run(), steps)[1] == [(0, 3), (1, 3)]


def test_a_program_that_is_killed_or_cannot_be_started(tilewright: Tilewright, train: str) -> None:
    """The exit code of one that a signal ends is a shell's."""
    Path(train).write_text(TRAIN.replace("sys.exit(", "os.kill(os.getpid(), 9)  # ("))
    killed = tilewright("profile", "--", sys.executable, train, "2", "0")
    assert killed.code == 128 + 9 and "exit code 137 before anything was recorded" in killed.err
    missing = tilewright("profile", "--", "/nowhere/python", train)
    assert missing.code == 3 and "cannot be started" in missing.err


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({}, "called no model twice that no optimizer updates, and no compiled function; --whole"),
        ({"steps_seen": 1}, "made 1 step, and recording begins with step"),
        ({"gave_way": True}, "the program started a profiler of its own before the recording began"),
    ],
)
def test_why_nothing_was_recorded(found: dict[str, Any], said: str) -> None:
    with pytest.raises(TraceError, match=said) as failed:
        saved.save([Recording(RecordingPlan(), **found)], name="a", command="c", target="t")
    assert failed.value.exit_code == 10


def test_shapes_that_do_not_fit(tilewright: Tilewright, tmp_path: Path) -> None:
    (tmp_path / "product.py").write_text("def f(x, w):\n    return x @ w\n")
    ended = tilewright("profile", f"{tmp_path / 'product.py'}:f", "--inputs", "f32[4,8], f32[9,2]")
    assert ended.code == 4 and "product.py:2: return x @ w" in ended.err and "cannot be multiplied" in ended.err


@pytest.mark.parametrize(
    ("words", "started"),
    [
        ("python train.py --lr 3", "python -m tilewright.profiling.start train.py --lr 3"),
        ("python3 -u -X dev -m pkg.train a", "python3 -u -X dev -m tilewright.profiling.start -m pkg.train a"),
        ("torchrun --nnodes 1 t.py -x", "torchrun --nnodes 1 -m tilewright.profiling.start t.py -x"),
        ("torchrun -m pkg.train", "torchrun -m tilewright.profiling.start -m pkg.train"),
        (
            "python -m torch.distributed.run --nproc-per-node=2 t.py",
            "python -m torch.distributed.run --nproc-per-node=2 -m tilewright.profiling.start t.py",
        ),
    ],
)
def test_where_the_recorder_is_put(words: str, started: str) -> None:
    assert " ".join(started_under_recorder(words.split())) == started


@pytest.mark.parametrize("words", ["bash train.sh", "python -c pass", "python", "torchrun --no-python ./train"])
def test_what_is_no_python_program(words: str) -> None:
    with pytest.raises(UsageError):
        started_under_recorder(words.split())


@pytest.fixture
def kept_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings that an earlier command measured."""
    rates = {"copy": 10.0, "read": 10.0, "write": 10.0, "vector": 1.0, "launch": 1.0}
    kept = [Ceiling("Some CPU", kind, "", rate, "GB/s", "measured") for kind, rate in rates.items()]
    monkeypatch.setattr(saved, "kept_ceilings", lambda name: kept)


@pytest.mark.usefixtures("kept_rates")
def test_a_block(home: Path) -> None:
    with package.profile("block") as run:
        for _ in range(4):
            torch.ones(3).exp()
            run.step()
    assert run.path.parent == home / "runs" and run.recording.steps_kept == 4
    assert "aten::exp" in str(run) and "recorded all of it: 4 steps" in str(run)
    assert "for which is known: the operator 100.0 %, the source line " in str(run)
    html = run._repr_html_()
    assert "aten::exp</td>" in html and run.path.with_suffix(".html").as_uri() in html


@pytest.mark.usefixtures("kept_rates")
def test_floors_are_from_the_ceilings_that_were_kept(home: Path) -> None:
    x = torch.ones(1 << 20)
    with package.profile() as run:
        x.exp()
    ((floor, source),) = query(run.path, "SELECT floor_us, source FROM distance WHERE operator = 'aten::exp'")[1]
    assert isinstance(floor, float) and floor >= 8 * (1 << 20) / 10e3
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text == "        x.exp()")
    assert str(source).endswith(f"{Path(__file__).name}:{line}")


def test_a_python_without_pytorch(tilewright: Tilewright, train: str) -> None:
    # Without the module `site` it finds no installed package.
    ended = tilewright("profile", "--", sys.executable, "-I", "-S", train)
    assert ended.code == 3
    assert f"{sys.executable} cannot import torch" in ended.err and ended.err.count("\n") == 1


def test_a_program_that_is_not_there_or_raises(tilewright: Tilewright, tmp_path: Path, train: str) -> None:
    """As Python says it, without a word of the recorder's; one without steps is recorded whole, however it ends."""
    script = tmp_path / "raises.py"
    script.write_text("import torch\ndef f():\n    raise KeyError('a')\nfor _ in range(9): torch.ones(3).exp()\nf()\n")
    raised = tilewright("profile", "--whole", "--", sys.executable, str(script))
    assert raised.code == 1 and "recorded all of it" in raised.out
    assert query(latest_run(), "SELECT count(*) FROM slice WHERE name = 'aten::exp'")[1] == [(9,)]
    frames = [line.strip() for line in raised.err.splitlines() if line.strip().startswith("File ")]
    assert len(frames) == 2 and all("raises.py" in frame for frame in frames)
    missing = tilewright("profile", "--", sys.executable, str(tmp_path / "missing.py"))
    assert missing.code == 2 and "can't open file" in missing.err and "Traceback" not in missing.err
    module = tilewright("profile", "--", sys.executable, "-m", "no.such.module")
    assert module.code == 1 and "No module named no.such.module" in module.err and "Traceback" not in module.err


INTERRUPTED = """
import os, signal, sys, torch
layer = torch.nn.Linear(8, 8)
rule = torch.optim.SGD(layer.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    rule.zero_grad()
    layer(torch.randn(4, 8)).mean().backward()
    rule.step()
# As a terminal does at Ctrl-C: to every process of the group.
os.killpg(0, signal.SIGINT)
signal.pause()
"""


def test_an_interrupted_program_keeps_what_was_recorded(tmp_path: Path, home: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(WITHOUT_COMPILER + INTERRUPTED)
    words = ["-c", WITHOUT_MEASURED_CEILINGS, "profile", "--", sys.executable, str(script), "12"]
    ended = subprocess.run(
        [sys.executable, *words], env=os.environ | OWN_PATH, capture_output=True, text=True, start_new_session=True
    )
    assert ended.returncode == 130 and "recorded 3 steps" in ended.stdout


def test_a_block_that_raises_keeps_what_was_recorded(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), package.profile() as run:
        torch.ones(3).exp()
        raise KeyError("a")
    assert query(run.path, "SELECT count(*) FROM slice WHERE name = 'aten::exp'")[1] == [(1,)]
    assert f"what was recorded before KeyError('a') is in {run.path}" in capfd.readouterr().err


def test_a_block_that_raises_before_anything_is_recorded(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), package.profile(wait=5, active=1) as run:
        raise KeyError("a")
    with pytest.raises(RuntimeError, match="nothing was recorded"):
        _ = run.path
    assert "nothing was recorded" in capfd.readouterr().err


OTHERS = {
    "PyTorch's": ("torch.profiler.profile()", "other.key_averages().table()"),
    "PyTorch's older one": ("torch.autograd.profiler.profile()", "other.table()"),
    "another of tilewright's": ("tilewright.profile()", "other"),
}
AROUND = """
import torch, tilewright
from tilewright.records import errors
x = torch.ones(3)
"""
ONE_AROUND = """
errors._warned.clear()
with tilewright.profile() as run:
    x.tanh()
    with {} as other:
        x.exp()
    print({})
print("until the program started a profiler of its own" in str(run))
print("kept", run.recording.gave_way, run.path)
"""


def test_a_block_gives_way_to_another_profiler(home: Path, tmp_path: Path) -> None:
    """PyTorch has one at a time, and crashes where a second one starts; so in a process of its own."""
    script = tmp_path / "around.py"
    script.write_text(AROUND + "".join(ONE_AROUND.format(*other) for other in OTHERS.values()))
    ended = subprocess.run([sys.executable, script], env=os.environ | OWN_PATH, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("gives way to it and ends here") == len(OTHERS)
    *tables, rest = ended.stdout.split("kept True ")
    assert len(tables) == len(OTHERS) and all(table.endswith("True\n") for table in tables)
    for kind, table, after in zip(OTHERS, tables, [*tables[1:], rest], strict=True):
        assert "aten::exp" in table, kind
        names = query(Path(after.split()[0]), "SELECT DISTINCT name FROM slice WHERE name LIKE 'aten::%'")[1]
        assert ("aten::tanh",) in names and ("aten::exp",) not in names, kind


def test_a_block_within_pytorchs_profiler_records_nothing(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with torch.profiler.profile() as other, package.profile() as run:
        torch.ones(3).exp()
        run.step()
    assert "aten::exp" in other.key_averages().table()
    assert "no profile: a profiler of PyTorch's runs already" in capfd.readouterr().err
    with pytest.raises(RuntimeError, match="a profiler of PyTorch's runs already"):
        _ = run.path
    with package.profile() as run:
        torch.ones(3).exp()
    assert run.path.exists()
