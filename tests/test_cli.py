"""The command line end to end: what it prints, what it leaves behind, and how it fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tilewright import cli
from tilewright.hardware import profiles
from tilewright.records.errors import StoreError
from tilewright.store.run import SavedRun

EXAMPLES = Path(__file__).parents[1] / "examples"
MODELS = """
import torch
from torch import nn
from tilewright.records.case import Case, InputSpec

number = 3

def gelu(x):
    return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x * x * x)))

small = Case("small gelu", lambda: gelu, [InputSpec.parse("fp32[N=64,M=32]")])

def product(x, y):
    return x.relu() @ y

def breaks(x):
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos()

def selects(x):
    return x[x > 0].sin()

def two(x, i):
    return {"rows": x[i].exp(), "sum": x.sum()}

def writes(x):
    x.add_(1)
    return x * 2

class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x):
        return self.dropout(self.norm(x)).relu()

instance = Normed()
"""


@dataclass
class Ended:
    """How one command ended."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.out.splitlines()]


Tilewright = Callable[..., Ended]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and a cache of the test's own, and ceilings that need no measuring."""
    monkeypatch.setenv("TILEWRIGHT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(profiles, "local_profile", lambda **_: profiles.profile_for("cpu"))
    return tmp_path / "home"


@pytest.fixture
def models(tmp_path: Path) -> str:
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    return str(path)


@pytest.fixture
def tilewright(home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Tilewright:
    """Run one command in this process, through the very entry point that the shell calls."""

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["tilewright", *arguments])
        capfd.readouterr()
        code: object = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code or 0
        out, err = capfd.readouterr()
        assert isinstance(code, int)
        return Ended(code, out, err)

    return run


def between(lines: list[str], first: str, last: str = "") -> list[str]:
    """The lines from the one that starts with `first` to the next empty one, or one that is `last`."""
    start = next(i for i, line in enumerate(lines) if line.startswith(first))
    stop = next((i for i, line in enumerate(lines) if i > start and line == last), len(lines))
    return lines[start:stop]


# explain


@pytest.mark.parametrize("flags", [(), ("--inference",)])
def test_the_naive_softmax_reads_and_writes_what_the_definitions_say(
    flags: tuple[str, ...], tilewright: Tilewright
) -> None:
    ended = tilewright("explain", f"{EXAMPLES}/naive_softmax.py:softmax", "--on", "cpu", *flags)
    assert (ended.code, ended.err) == (0, "")
    before, after = between(ended.lines, "before fusion:"), between(ended.lines, "after fusion:")
    assert before[0].startswith("before fusion: 5 launches, 640 MB moved")
    assert before[1:] == [
        "  reads 5·N·M + 2·N  writes 3·N·M + 2·N",
        "  unused N (indices of max)",
        "  FLOPs 4·N·M",
    ]
    assert after[0].startswith("after fusion: 1 launch, 160 MB moved")
    assert after[1:] == ["  reads N·M  writes N·M", "  FLOPs 4·N·M"]
    assert between(ended.lines, "vanished:") == ["vanished: 480 MB", "  reads 4·N·M + 2·N  writes 2·N·M + 2·N"]


@pytest.mark.parametrize("name", ["attention", "square"])
def test_attention_names_the_products_and_the_squares_that_vanish(name: str, tilewright: Tilewright) -> None:
    ended = tilewright("explain", f"{EXAMPLES}/attention.py:{name}", "--on", "cpu", "--inference")
    assert (ended.code, ended.err) == (0, "")
    for total in ("before fusion:", "after fusion:"):
        assert "  matmul FLOPs 4·B·N²·d" in between(ended.lines, total)
    assert "  reads 3·B·N² + 3·B·N·d  writes 3·B·N² + B·N·d" in between(ended.lines, "before fusion:")
    assert "N²" not in between(ended.lines, "after fusion:")[1]
    reads, writes = between(ended.lines, "vanished:")[1].split("  writes ")
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


def test_floors_of_a_device_that_is_not_here(tilewright: Tilewright) -> None:
    floors = {}
    for device in ("h200", "a100", "cpu"):
        ended = tilewright("explain", f"{EXAMPLES}/naive_softmax.py:softmax", "--on", device, "--json")
        document = json.loads(ended.out)
        assert {row["device"] for row in document["ceilings"]} == {device}
        (floors[device],) = [op["floor_us"] for op in document["operators"] if op["stage"] == "after"]
    # 160 MB at the 4255 GB/s that were measured on an H200.
    assert floors["h200"] == pytest.approx(160e6 / 4255e3, rel=0.01)
    assert floors["h200"] < floors["a100"] < floors["cpu"]


def test_json_is_json_and_all_of_it(tilewright: Tilewright, models: str) -> None:
    ended = tilewright("explain", f"{models}:small", "--json", "--on", "cpu")
    assert (ended.code, ended.err) == (0, "")
    document = json.loads(ended.out)
    assert {op["graph"] for op in document["operators"]} == {"forward", "backward"}
    assert document["decisions"] and document["regions"] and document["memory"] and document["ceilings"]


def test_quiet_prints_results_only(tilewright: Tilewright, models: str) -> None:
    loud, quiet = (tilewright("explain", f"{models}:small", "--on", "cpu", *flags) for flags in ((), ("-q",)))
    assert (quiet.code, quiet.err) == (0, "") and quiet.out == loud.out


@pytest.mark.parametrize(
    ("name", "inputs", "flags"),
    [
        ("Normed", "fp32[B=4,8]", ()),
        ("instance", "fp32[B=4,8]", ("--training",)),
        ("instance", "fp32[B=4,8]", ("--inference",)),
        ("two", "fp32[N=9,M=8],i64[K=3]", ()),
        ("product", "fp32[N=4,K=6];fp32[K=6,M=3]", ()),
        ("writes", "fp32[N=4]", ("--inference",)),
        ("gelu", "bf16[N=4]", ()),
    ],
)
def test_modules_classes_and_functions(
    name: str, inputs: str, flags: tuple[str, ...], tilewright: Tilewright, models: str
) -> None:
    ended = tilewright("explain", f"{models}:{name}", "--inputs", inputs, "--on", "cpu", *flags)
    assert (ended.code, ended.err) == (0, "")
    assert ("\nbackward\n" in ended.out.replace(" \n", "\n")) == ("--inference" not in flags)
    assert "before fusion:" in ended.out


def at(text: str) -> str:
    """Where the line `text` of the models stands: `models.py:12: text`."""
    (number,) = [number for number, line in enumerate(MODELS.splitlines(), 1) if line.strip() == text]
    return f"models.py:{number}: {text}"


# Failures: one message on stderr, nothing on stdout, the documented code.

FAILURES = {
    "no file": (["explain", "missing.py:x"], 3, "no file 'missing.py'"),
    "no name": (["explain", "MODELS:smal"], 3, "has no 'smal'; did you mean small?"),
    "no case": (["explain", "MODELS:number"], 3, "is of type int, not a Case, an nn.Module or a function"),
    "no colon": (["explain", "models"], 2, "is not of the form file.py:NAME"),
    "no inputs": (["explain", "MODELS:gelu"], 2, "is no case, so it needs --inputs"),
    "bad inputs": (["explain", "MODELS:gelu", "--inputs", "fp33[N=4]"], 2, "input 'fp33[N=4]' is not of the form"),
    "bad size": (["explain", "MODELS:gelu", "--inputs", "fp32[N=x]"], 2, "axis 'N=x' has no size"),
    "too many inputs": (["explain", "MODELS:gelu", "--inputs", "fp32[4],fp32[4]"], 4, "not the 2 inputs"),
    "no such device": (
        ["explain", "MODELS:small", "--on", "h300"],
        2,
        "no profile of a device named 'h300'; known: h200",
    ),
    "no target": (["explain"], 2, "Missing argument"),
    "no option": (["explain", "MODELS:small", "--fast"], 2, "No such option"),
    "no command": (["explian"], 2, "No such command 'explian'"),
    "tree as json": (["explain", "MODELS:small", "--tree", "--json"], 2, "--tree is for reading"),
    "no implementation": (["bench", "MODELS:small", "--impl", "jax"], 2, "no implementation jax; known: eager"),
    "wrong shapes": (
        ["explain", "MODELS:product", "--inputs", "fp32[N=4,K=6],fp32[N=4,K=6]", "--on", "cpu"],
        4,
        f"{at('return x.relu() @ y')}\n  matmul of [4, 6], [4, 6]: ",
    ),
    "graph break": (
        ["explain", "MODELS:breaks", "--inputs", "fp32[N=4]", "--on", "cpu"],
        5,
        f"it breaks at {at('torch._dynamo.graph_break()')}\n",
    ),
    "data-dependent shape": (
        ["explain", "MODELS:selects", "--inputs", "fp32[N=4]", "--on", "cpu"],
        5,
        f"at {at('return x[x > 0].sin()')}\n",
    ),
    "wrong shapes of optimize": (
        ["optimize", "MODELS:product", "--inputs", "fp32[N=4,K=6],fp32[N=4,K=6]"],
        4,
        "matmul of [4, 6], [4, 6]: ",
    ),
    "graph break of optimize": (["optimize", "MODELS:breaks", "--inputs", "fp32[N=4]"], 5, "it breaks at models.py:"),
    "no run to query": (["sql", "SELECT 1"], 9, "no run in "),
    "no run to report": (["report"], 9, "`tilewright optimize TARGET` makes one"),
    "no such run": (["sql", "SELECT 1", "--run", "missing.duckdb"], 9, "no run at missing.duckdb"),
    "no such run to report": (["report", "--run", "missing.duckdb"], 9, "no run at missing.duckdb"),
}


AS_JSON = ("no file", "no such device", "wrong shapes", "graph break of optimize", "no run to query")
"""Failures of each kind, asked for as JSON, too: there is no half of a document."""


@pytest.mark.parametrize(
    ("name", "flags"), [(name, ()) for name in FAILURES] + [(name, ("--json",)) for name in AS_JSON]
)
def test_a_failure_has_one_message_and_its_code(
    name: str, flags: tuple[str, ...], tilewright: Tilewright, models: str, home: Path
) -> None:
    arguments, code, message = FAILURES[name]
    ended = tilewright(*(argument.replace("MODELS", models) for argument in arguments), *flags)
    assert (ended.code, ended.out) == (code, ""), ended.err
    assert ended.err.startswith("tilewright: ") and message in ended.err
    assert len(ended.err.splitlines()) <= 2 and "Traceback" not in ended.err
    assert not list(home.rglob("*.duckdb")) and not list(home.rglob("*.partial"))


def test_without_a_command_there_is_help(tilewright: Tilewright) -> None:
    ended = tilewright()
    assert (ended.code, ended.err) == (2, "")
    assert all(verb in ended.out for verb in ("doctor", "explain", "optimize", "bench", "sql", "report"))
    assert tilewright("explain", "--help").code == 0


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        ("no-such-compiler", "no C++ compiler: 'no-such-compiler' is not on PATH; install g++ or set CXX"),
        ("broken", "broken failed with exit code 3: error: out of registers"),
    ],
)
def test_optimize_needs_a_compiler(
    compiler: str, message: str, tilewright: Tilewright, models: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = home.parent / "broken"
    script.write_text("#!/bin/sh\necho 'error: out of registers' >&2\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script) if compiler == "broken" else compiler)
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(home.parent / "cache"))
    ended = tilewright("optimize", f"{models}:small")
    assert (ended.code, ended.out) == (6, "") and message in ended.err
    assert not list(home.rglob("*.duckdb")) and not list(home.rglob("*.partial"))
    assert tilewright("explain", f"{models}:small", "--on", "cpu").code == 0


def test_a_home_that_cannot_be_written_is_said_before_the_work(
    tilewright: Tilewright, models: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWRIGHT_HOME", str(tmp_path / "file" / "home"))
    began = time.perf_counter()
    ended = tilewright("optimize", f"{models}:small")
    assert (ended.code, ended.out) == (9, "")
    assert "cannot write a run in" in ended.err and "set TILEWRIGHT_HOME to a folder that you can write" in ended.err
    assert time.perf_counter() - began < 5
    assert tilewright("explain", f"{models}:small", "--on", "cpu").code == 0


def test_a_cache_that_cannot_be_written_costs_a_line(
    tilewright: Tilewright, models: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "file" / "cache"))
    ended = tilewright("bench", f"{models}:small", "--impl", "eager,tilewright", "--seconds", "0.1", "--json")
    assert ended.code == 0
    assert "kernels are compiled for this process alone" in ended.err and "TILEWRIGHT_CACHE" in ended.err
    assert [json.loads(line)["impl"] for line in ended.lines] == ["eager", "tilewright"]


# optimize, and what works on its run


@pytest.fixture(scope="module")
def optimized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a home with one finished run, and how the command that made it ended."""
    folder = tmp_path_factory.mktemp("optimized")
    (folder / "models.py").write_text(MODELS)
    environment = {"TILEWRIGHT_HOME": str(folder / "home"), "TILEWRIGHT_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEASURED_CEILINGS, "optimize", "models.py:small", "--seconds", "0.2"],
        cwd=folder,
        env=os.environ | OWN_PATH | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return {**environment, "code": str(done.returncode), "out": done.stdout, "err": done.stderr}


OWN_PATH = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
WITHOUT_MEASURED_CEILINGS = """
from tilewright.hardware import profiles
profiles.local_profile = lambda **_: profiles.profile_for("cpu")
from tilewright.cli import main
main()
"""


@pytest.fixture
def with_run(optimized: dict[str, str], home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The finished run, in the home that commands of this test use."""
    for name in ("TILEWRIGHT_HOME", "TILEWRIGHT_CACHE"):
        monkeypatch.setenv(name, optimized[name])
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
    run = SavedRun(with_run)
    program = run.program()
    assert run.info.case == "small gelu" and run.info.dims == {"N": 64, "M": 32}
    assert {op.stage for op in program.operators} == {"before", "after"}
    assert all(op.measured_us for op in program.operators if op.operator_class != "layout")
    assert all(region.measured_us and region.predicted_us for region in program.regions)
    tried = [row for row in program.decisions if row.verdict in ("taken", "tried and lost")]
    assert tried and all(row.measured_us and row.predicted_us for row in tried)
    assert {row.impl for row in run.measurements()} == {"eager", "inductor", "tilewright"}
    assert all(tensor.ok for tensor in run.verified()) and run.ceilings()


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


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("SELEC 1", "syntax error"),
        ("SELECT * FROM no_such_table", "no_such_table"),
        ("DROP TABLE run", "read-only"),
        ("UPDATE run SET command = ''", "read-only"),
        ("CREATE TABLE mine (x INT)", "read-only"),
        ("COPY run TO 'stolen.csv'", "disabled"),
        ("SELECT * FROM read_csv('/etc/passwd')", "disabled"),
    ],
)
def test_a_query_may_only_read(query: str, message: str, with_run: Path, tilewright: Tilewright) -> None:
    before = with_run.read_bytes()
    ended = tilewright("sql", query)
    assert (ended.code, ended.out) == (9, "")
    assert message in ended.err and "Traceback" not in ended.err
    assert with_run.read_bytes() == before and not Path("stolen.csv").exists()


def test_a_page_that_cannot_be_written(with_run: Path, tilewright: Tilewright, tmp_path: Path) -> None:
    ended = tilewright("report", "--out", str(tmp_path / "no" / "page.html"))
    assert ended.code == StoreError.exit_code and "cannot write the page" in ended.err


def test_queries_and_pages_need_no_torch(with_run: Path) -> None:
    script = (
        "import sys\n"
        "from tilewright.cli import main\n"
        "for arguments in (['sql', 'SELECT 1'], ['report']):\n"
        "    sys.argv = ['tilewright', *arguments]\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as ended:\n"
        "        assert not ended.code, ended.code\n"
        "assert 'torch' not in sys.modules and 'sympy' not in sys.modules\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=os.environ | OWN_PATH, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# Ctrl-C


def test_an_interrupted_optimize_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(MODELS)
    compiler = tmp_path / "slow-compiler"
    compiler.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/compiler.pid\nexec sleep 300\n")
    compiler.chmod(0o755)
    environment = (
        os.environ
        | OWN_PATH
        | {
            "TILEWRIGHT_HOME": str(tmp_path / "home"),
            "TILEWRIGHT_CACHE": str(tmp_path / "cache"),
            "CXX": str(compiler),
        }
    )
    command = [sys.executable, "-c", WITHOUT_MEASURED_CEILINGS, "optimize", "models.py:small"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        _wait_for(
            lambda: (tmp_path / "compiler.pid").exists() and (tmp_path / "compiler.pid").read_text().strip() != ""
        )
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, "")
    assert err.strip() == "tilewright: interrupted; nothing was left half-written"
    assert [path for path in (tmp_path / "home").rglob("*") if path.is_file()] == []
    assert not list((tmp_path / "home").rglob("*.partial"))
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.name != ".lock"]
    assert not Path(f"/proc/{(tmp_path / 'compiler.pid').read_text().strip()}").exists()


def _wait_for(condition: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


def test_an_interrupt_while_measuring_leaves_nothing(
    tilewright: Tilewright, models: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        assert list(home.rglob("*.partial"))
        raise KeyboardInterrupt

    monkeypatch.setattr("tilewright.verbs.measure", interrupted)
    ended = tilewright("optimize", f"{models}:small")
    assert (ended.code, ended.out) == (130, "")
    assert ended.err.strip() == "tilewright: interrupted; nothing was left half-written"
    assert [path for path in home.rglob("*") if path.is_file() or path.suffix == ".partial"] == []
