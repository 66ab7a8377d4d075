"""No compiler, one that fails, one that hangs, one that is interrupted: PyTorch runs, with one line that says why."""

import os
import random
import re
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.backend.compiling import agrees, compiled, with_grad
from tests.processes import start
from tests.waiting import HANG_S, until
from tilewright.compile.stages import rewrite
from tilewright.hardware.profiles import profile_for
from tilewright.hardware.target import Target
from tilewright.records.cxx import compile_to
from tilewright.runtime import until_built
from tilewright.runtime.until_built import once_built


def new_function() -> Callable[[torch.Tensor], torch.Tensor]:
    """A function whose kernels nobody has compiled before."""
    number = random.random()
    return lambda x: torch.softmax(x * number, -1) + number


@pytest.fixture
def why(lenient: None, told: Callable[[], list[str]]) -> Callable[[], str]:
    """Forward and backward run as eager runs them; gives the reason in the line that was said."""

    def fall_back() -> str:
        agrees(new_function(), [with_grad(40, 20)], backward=True, runs=False)
        (line,) = told()
        start, _, reason = line.partition(" runs as PyTorch runs it: ")
        assert start.startswith("tilewright: the forward and backward graph at test_compiler_faults.py:")
        return reason

    return fall_back


Why = Callable[[], str]
Compiler = Callable[[str], str]


def test_no_compiler_on_the_path(why: Why, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert why() == "no C++ compiler: 'g++' is not on PATH; install g++ or set CXX"


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("CXX", "missing-c++", "no C++ compiler: 'missing-c++' is not on PATH; install g++ or set CXX"),
        ("TILEWRIGHT_COMPILE_LIMIT", "soon", "TILEWRIGHT_COMPILE_LIMIT=soon is no number of seconds"),
    ],
)
def test_a_setting_that_names_nothing(
    why: Why, variable: str, value: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert why() == reason


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (
            "cat > /dev/null; echo 'kernel.cpp:7: error: no such thing'; exit 3",
            "failed with exit code 3: kernel.cpp:7: error: no such thing",
        ),
        ("exit 1", "failed with exit code 1"),
        ("cat > /dev/null", "the compiled library does not load"),
    ],
    ids=["fails", "reads nothing and says nothing", "makes no library"],
)
def test_a_compiler_that_does_not_compile(why: Why, script: str, reason: str, compiler: Compiler) -> None:
    compiler(script)
    assert reason in why()


def test_a_compiler_that_is_no_program(why: Why, compiler: Compiler) -> None:
    Path(compiler("")).write_bytes(b"\x7fELF nonsense")
    assert "does not start: Exec format error" in why()


def test_a_compiler_that_hangs(why: Why, compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = compiler(f"sleep 300 & echo $! > {tmp_path}/child; wait")
    monkeypatch.setenv("TILEWRIGHT_COMPILE_LIMIT", "2")
    assert why() == f"{path} did not finish in 2 s and was stopped; TILEWRIGHT_COMPILE_LIMIT gives it more"
    assert_gone(int((tmp_path / "child").read_text()))


def test_a_fault_of_our_own(why: Why, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("nobody thought of this")

    monkeypatch.setattr("tilewright.backend.assemble", broken)
    assert why() == "KeyError: 'nobody thought of this'"


@pytest.mark.parametrize("name", ["channels_last", "contract", "split_norms"])
def test_a_rewrite_that_fails_halfway(
    name: str, lenient: None, monkeypatch: pytest.MonkeyPatch, told: Callable[[], list[str]]
) -> None:
    def broken(graph: torch.fx.Graph, *_: object, **__: object) -> None:
        for node in graph.nodes:
            node.args = ()
        raise ValueError("halfway")

    monkeypatch.setattr(rewrite(name), "run", broken)
    agrees(new_function(), [with_grad(4, 5)], backward=True)
    (line,) = told()
    where = re.fullmatch(
        rf"tilewright: the rewrite {name} is left out at test_compiler_faults\.py:\d+: .*: it failed with "
        r"ValueError: halfway \(test_compiler_faults\.py:\d+\); please report it\n?", line,
    )  # fmt: skip
    assert where, line


@pytest.mark.parametrize("name", ["values_to_save", "compute_in_each_reader"])
def test_an_optional_step_of_planning_that_fails(
    name: str, lenient: None, monkeypatch: pytest.MonkeyPatch, told: Callable[[], list[str]]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("halfway")

    monkeypatch.setattr(f"tilewright.compile.planner.{name}", broken)
    agrees(new_function(), [with_grad(4, 5)], backward=True)
    (line,) = told()
    assert line.startswith(f"tilewright: the rewrite {name} is left out at test_compiler_faults.py:")


def test_strict_makes_it_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "missing-c++")
    with pytest.raises(Exception, match=r"^the forward graph at .*: no C\+\+ compiler: 'missing-c\+\+' is not on PATH"):
        compiled(new_function())(torch.randn(4, 5))


def test_an_interrupt_while_the_compiler_starts_stops_it(
    tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler("exec sleep 300")
    started: list[subprocess.Popen[str]] = []
    start = subprocess.Popen

    def interrupted(*command: Any, **options: Any) -> subprocess.Popen[str]:
        started.append(start(*command, **options))
        signal.raise_signal(signal.SIGINT)
        return started[0]

    monkeypatch.setattr("tilewright.records.cxx.subprocess.Popen", interrupted)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            compile_to(tmp_path / "out.so", "int x;", ())
    finally:
        signal.signal(signal.SIGINT, handler)
    assert started[0].returncode == -signal.SIGKILL


# A shell starts background jobs with SIGINT ignored, and their children inherit that.
INTERRUPTED = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from tilewright.runtime.compiler import load
print("compiling", flush=True)
load("int x;" + sys.argv[1])
"""


def test_an_interrupt_leaves_no_entry_and_no_compiler(tmp_path: Path, compiler: Compiler) -> None:
    child = tmp_path / "child"
    compiler(f"out=; for a; do out=$a; done; echo half > $out; sleep 300 & echo $! > {child}; wait")
    cache = tmp_path / "cache"
    process = start(["-c", INTERRUPTED, "// 1"], env={"TILEWRIGHT_CACHE": str(cache)})
    until(lambda: child.exists() and bool(child.read_text().strip()))
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=HANG_S)
    assert "KeyboardInterrupt" in errors and process.returncode != 0
    assert [p.name for p in cache.rglob("*") if p.is_file()] == [".lock"]
    assert_gone(int(child.read_text()))


def assert_gone(pid: int) -> None:
    """The process has ended, or is a zombie that only waits for whoever started it."""

    def gone() -> bool:
        try:
            os.kill(pid, 0)
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except (ProcessLookupError, FileNotFoundError):
            return True

    until(gone)


GPU = profile_for("h200")


def built_later(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An executor whose build ends when somebody waits for it, or when `is_building` is set."""
    build = SimpleNamespace(module=lambda: None, is_building=True)
    build.wait = lambda: setattr(build, "is_building", False)
    monkeypatch.setattr(until_built, "EXTENSION", build)
    return build


def test_eagers_graph_runs_on_a_gpu_until_the_executor_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWRIGHT_STRICT", raising=False)
    build = built_later(monkeypatch)
    call = once_built(lambda x: f"compiled {x}", lambda: lambda x: f"eager {x}", Target(GPU), is_recorded=False)  # type: ignore[arg-type, return-value]
    assert call(1) == "eager 1"
    build.is_building = False
    assert call(2) == "compiled 2"


def test_the_strict_mode_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_STRICT", "1")
    built_later(monkeypatch)
    assert once_built(str, lambda: pytest.fail("eager"), Target(GPU), is_recorded=False) is str


@pytest.mark.parametrize("target", [Target(GPU), Target(profile_for("cpu"))])
def test_what_is_recorded_is_the_compiled_program(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """`optimize` verifies and measures it: eager must not stand in for it."""
    monkeypatch.delenv("TILEWRIGHT_STRICT", raising=False)
    built_later(monkeypatch)
    assert once_built(str, lambda: pytest.fail("eager"), target, is_recorded=True) is str


def test_for_an_absent_gpu_nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    built_later(monkeypatch).module = lambda: pytest.fail("built")
    target = Target(GPU, is_present=False)
    assert once_built(str, lambda: pytest.fail("eager"), target, is_recorded=False) is str


@pytest.mark.parametrize(("compiled_s", "eager_s"), [(1.06e-3, 0.81e-3), (20e-3, 50e-3)])
def test_on_a_cpu_no_call_is_slower_than_eagers_while_the_executor_is_built(
    compiled_s: float, eager_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the calls that find out which is faster; by a clock that only the calls move."""
    monkeypatch.delenv("TILEWRIGHT_STRICT", raising=False)
    build = built_later(monkeypatch)
    build.found, build.is_building, now, ran = None, False, [0.0], list[str]()

    def taking(name: str, seconds: float) -> Callable[[int], str]:
        def run(x: int) -> str:
            # The first call of each takes longer.
            now[0] += seconds if name in ran else 1.0
            ran.append(name)
            return f"{name} {x}"

        return run

    functions = taking("compiled", compiled_s), taking("eager", eager_s)
    monkeypatch.setattr(
        until_built, "faster_until_built", partial(until_built.faster_until_built, clock=lambda: now[0])
    )
    call = once_built(functions[0], lambda: functions[1], Target(profile_for("cpu")), is_recorded=False)  # type: ignore[arg-type, return-value]
    assert [call(n) for n in range(3)] == ["compiled 0", "compiled 1", "compiled 2"], "nothing is built yet"
    build.is_building = True
    faster = "eager" if eager_s < compiled_s else "compiled"
    assert [call(n).split()[0] for n in range(10)] == ["eager"] * 2 + [faster] * 8
    build.is_building, build.found = False, object()
    assert [call(n) for n in range(2)] == ["compiled 0", "compiled 1"]


def test_a_model_that_is_called_while_the_executor_is_built_gives_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TILEWRIGHT_STRICT", raising=False)
    build = built_later(monkeypatch)
    build.found, build.is_building = None, True
    x = torch.randn(5, 7, requires_grad=True)

    def model(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 2).sum(-1)

    torch._dynamo.reset()
    call, ran = torch.compile(model, backend="tilewright"), []
    for _ in range(6):
        y = call(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        ran.append(type(y.grad_fn).__name__)
        torch.testing.assert_close(y, model(x))
        torch.testing.assert_close(gradient, 2 * x.cos())
    assert ran[:2] == ["CompiledFunctionBackward"] * 2 and ran[2:4] == ["SumBackward1"] * 2


STRICT_PROGRAM = """\
import torch

def model(x):
    y = x * 2
    print(y.sum())
    return y.sin()

torch.compile(model, backend="tilewright")(torch.ones(3))
"""


def test_a_strict_error_is_one_message_with_the_users_line(tmp_path: Path) -> None:
    """As a script ends: the user's call and the message, no frame of tilewright's, and no hints of Dynamo."""
    program, shown = tmp_path / "program.py", {}
    program.write_text(STRICT_PROGRAM)
    for wanted in ("", "1"):
        ended = start([str(program)], env={"TILEWRIGHT_STRICT": "1", "TILEWRIGHT_TRACEBACK": wanted})
        shown[wanted] = ended.communicate(timeout=HANG_S)[1]
        assert ended.returncode == 1
    message = shown[""].splitlines()[-2:]
    assert message[0].startswith(
        "tilewright.capture.errors.StrictError: the call that breaks the graph at program.py:5:"
    )
    assert "without it PyTorch runs this part" in message[1]
    frames = re.findall(r'File "(.*?)", line (\d+)', shown[""])
    assert frames[0] == (str(program), "8") and len(frames) == 2
    assert "TORCHDYNAMO_VERBOSE=1 for the internal" not in shown[""]
    assert len(re.findall('File "', shown["1"])) > 5
