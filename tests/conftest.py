"""Set up every test: strict mode, a home folder of its own, skips without a GPU, marks of slow tests."""

import functools
import gc
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import interpreter

SLOW = Path(__file__).with_name("slow.txt")
"""Test functions whose cases take more than `SLOW_S` seconds of processor time together; `make check` leaves them out.

`TILEWRIGHT_WRITE_SLOW=1 pytest FILES` measures those of some files, or all, and writes them down.
"""
SLOW_S = 0.5

_HOME = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Falling back is an error, and nothing is read from or left in the user's own files.

    Workers of pytest-xdist inherit the environment, so only the process that starts them sets it.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        interpreter.install()
    if os.environ.get("TILEWRIGHT_WRITE_SLOW") == "1":
        config.pluginmanager.register(Stopwatch())
    if hasattr(config, "workerinput"):
        return
    config.stash[_HOME] = tempfile.TemporaryDirectory(prefix="tilewright-tests-")
    os.environ["TILEWRIGHT_HOME"] = config.stash[_HOME].name
    os.environ["TILEWRIGHT_STRICT"] = "1"
    # What one test compiled, another may compile with a pass of its own; `test_kept_programs.py` turns it on.
    os.environ["TILEWRIGHT_KEEP_PROGRAMS"] = "0"
    # Idle threads of OpenMP sleep: two workers with two threads each otherwise wait for each other's turn on two cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # After each compilation Dynamo looks for garbage that collections find anyway, and seldom.
    os.environ["TORCH_DYNAMO_RUN_GC_AFTER_COMPILE"] = "0"
    # PyTorch's profiler reads this once a process; without it every later recording prints two lines.
    os.environ["KINETO_LOG_LEVEL"] = "6"


def pytest_unconfigure(config: pytest.Config) -> None:
    if _HOME in config.stash:
        config.stash[_HOME].cleanup()


@pytest.fixture(autouse=True)
def afresh() -> None:
    """Before a test nothing is compiled, and the generators are in the same state at every run."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
        leave_out_logs()
    if "torch" in sys.modules:
        seed_only_what_is_there()
        sys.modules["torch"].manual_seed(0)


@functools.cache
def leave_out_logs() -> None:
    """For lines of its log Dynamo times the guards of each compilation, with the processor's caches flushed, and writes
    out all settings.
    """
    guards, utils = sys.modules["torch._dynamo.guards"], sys.modules["torch._dynamo.utils"]
    guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[attr-defined]
    for name in ("_get_dynamo_config_for_logging", "_scrubbed_inductor_config_for_logging"):
        setattr(utils, name, lambda: None)


@functools.cache
def seed_only_what_is_there() -> None:
    """For each kind of device that is not there, seeding formats the whole stack, for the message of an error."""
    import torch

    for kind in (torch.cuda, torch.mtia, torch.xpu):
        if not kind.is_available():
            kind.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Runs and measured ceilings in an empty folder of the test's own."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("TILEWRIGHT_HOME", str(folder))
    return folder


@pytest.fixture
def short_races(monkeypatch: pytest.MonkeyPatch) -> None:
    """Races of milliseconds. The collection of garbage before each, most of a test's time, passes over what exists."""
    gc.freeze()
    monkeypatch.setattr("tilewright.measure.timing.benchmark.WARM_UP_SECONDS", 0.0)
    monkeypatch.setattr("tilewright.measure.racing.ceiling_probe._CPU_BYTES", 2**20)


@pytest.fixture
def in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs on a CPU are those of a GPU: their kernels are Triton's, interpreted."""
    monkeypatch.setenv("TILEWRIGHT_TARGET", "triton")


@pytest.fixture
def executor() -> None:
    """The executor in C++ is built and loaded, as it is once a process has run for a while."""
    from tilewright.launch.executor import EXTENSION

    EXTENSION.module()
    assert EXTENSION.wait(), "the C++ compiler's words stand above"


@pytest.fixture
def kept_programs(executor: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache that keeps programs, and its folder. The executor, 25 s of a compiler, is from the usual cache."""
    from tilewright.capture import program_cache

    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TILEWRIGHT_KEEP_PROGRAMS", "1")
    program_cache.counts.clear()
    yield tmp_path / "cache"
    program_cache.counts.clear()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Iterator[None]:
    """Examples in docstrings are those of `src`; to look for some in each file of tests takes a worker two seconds."""
    return [one for one in (yield) if type(one) is pytest.Module]


def function_of(item: pytest.Item) -> str:
    return item.nodeid.split("[")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = set(SLOW.read_text().splitlines())
    for item in items:
        if function_of(item) in slow:
            item.add_marker(pytest.mark.slow)
    # The longest begin first, so that no worker is left alone with them.
    items.sort(key=lambda item: "test_interpreted" not in item.nodeid)
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        reason = f"needs a CUDA device; torch {torch.__version__} finds none"
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Collections pass over what exists by now, pytest's and PyTorch's objects, and are rare.

    Compiling allocates so much that the usual threshold of 700 objects takes another tenth of a test's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


class Stopwatch:
    """Processor time of each test function and of the processes that it waits for.

    A fixture that several tests share counts as slow for each of them: whichever runs first pays for it.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.shared: dict[str, float] = defaultdict(float)
        self.users: dict[str, set[str]] = defaultdict(set)
        self.collected: set[str] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        self.collected = {function_of(item) for item in items}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        for fixture in getattr(item, "fixturenames", ()):
            self.users[fixture].add(function_of(item))
        before = sum(os.times()[:4])
        result = yield
        self.seconds[function_of(item)] += sum(os.times()[:4]) - before
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        before = sum(os.times()[:4])
        result = yield
        if fixturedef.scope != "function":
            spent = sum(os.times()[:4]) - before
            self.shared[fixturedef.argname] += spent
            self.seconds[function_of(request._pyfuncitem)] -= spent
        return result

    def pytest_sessionfinish(self) -> None:
        files = {name.split("::")[0] for name in self.collected}
        left_out = self.collected - self.seconds.keys()
        before = SLOW.read_text().splitlines()
        others = {name for name in before if name in left_out or name.split("::")[0] not in files}
        slow = {name for name, seconds in self.seconds.items() if seconds > SLOW_S}
        slow |= {name for fixture, seconds in self.shared.items() if seconds > SLOW_S for name in self.users[fixture]}
        SLOW.write_text("".join(f"{name}\n" for name in sorted(others | slow)))
