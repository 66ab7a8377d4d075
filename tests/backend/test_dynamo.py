"""`torch.compile(model, backend="tilewright")` finds the backend by the name that the package declares."""

import json
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.backend.compiling import assert_same, compiled
from tests.processes import ROOT, run
from tilewright.backend import recording

PROGRAM = """
import sys, torch
assert "tilewright" not in sys.modules
x = torch.randn(20, 30)
y = torch.compile(lambda x: torch.softmax(x, -1) * 2, backend="tilewright")(x)
torch.testing.assert_close(y, torch.softmax(x, -1) * 2)
assert "tilewright.backend" in sys.modules
"""


def test_the_installed_package_declares_the_backend(tmp_path: Path) -> None:
    """Metadata as pip writes them from pyproject.toml; the package is imported by PyTorch alone."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = tmp_path / "tilewright-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tilewright\nVersion: 0\n")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in names.items())
        for group, names in project["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(groups))
    run(["-c", PROGRAM], path=[tmp_path])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x)[0].relu() * 2  # type: ignore[no-any-return]


def prints_in_a_loop(x: Tensor) -> Tensor:
    for i in range(2):
        print(i)
        x = x.sin() * 2
    return x


@pytest.mark.usefixtures("lenient")
def test_a_model_around_a_module_that_is_not_traced(told: Callable[[], list[str]]) -> None:
    model, x = Recurrent(), torch.randn(3, 2, 8)
    with recording() as record:
        fast = compiled(model)
        for _ in range(3):
            assert_same(fast(x), model(x))
    (line,) = told()
    assert line.startswith("tilewright: the function forward at test_dynamo.py:")
    assert line.endswith(
        "Dynamo traces recurrent layers only if the model's file sets torch._dynamo.config.allow_rnn = True"
    )
    assert not record.graphs and [found.what for found in record.fallbacks] == ["the function forward"]


@pytest.mark.usefixtures("lenient")
def test_such_a_module_alone_is_named_by_the_line_that_calls_it(told: Callable[[], list[str]]) -> None:
    model, x = nn.GRU(8, 8), torch.randn(3, 2, 8)
    fast = compiled(model)
    fast(x)
    (line,) = told()
    assert line.startswith("tilewright: the call at test_dynamo.py:") and ": fast(x) runs as PyTorch runs it" in line


@pytest.mark.usefixtures("lenient")
def test_a_break_in_a_loop(told: Callable[[], list[str]]) -> None:
    x = torch.randn(8)
    assert_same(compiled(prints_in_a_loop)(x), prints_in_a_loop(x))
    (line,) = told()
    assert "the function prints_in_a_loop at test_dynamo.py:" in line and ": print(i) runs as PyTorch runs it" in line


def test_it_is_an_error_where_falling_back_is_forbidden() -> None:
    for _ in range(2):
        with pytest.raises(Exception, match=r"the function prints_in_a_loop at test_dynamo.py:\d+: print\(i\): Failed"):
            compiled(prints_in_a_loop)(torch.randn(8))
    # PyTorch's own count of compilations stands where it stood: later ones are heard.
    with pytest.raises(Exception, match=r"the function forward at .*: Dynamo traces recurrent layers only if"):
        compiled(Recurrent())(torch.randn(3, 2, 8))


@pytest.mark.usefixtures("lenient")
def test_what_is_compiled_by_others_is_theirs_to_tell(told: Callable[[], list[str]]) -> None:
    torch.compile(prints_in_a_loop, backend="eager")(torch.randn(8))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        # All of it, or an error: PyTorch's own.
        compiled(Recurrent(), fullgraph=True)(torch.randn(3, 2, 8))
    assert told() == []


@pytest.mark.usefixtures("lenient")
def test_in_another_thread_and_mode(told: Callable[[], list[str]]) -> None:
    fast = compiled(prints_in_a_loop, mode="reduce-overhead")
    thread = threading.Thread(target=fast, args=(torch.randn(8),))
    thread.start()
    thread.join()
    assert len(told()) == 1


def branching(x: torch.Tensor) -> torch.Tensor:
    x = torch.nn.functional.gelu(x)
    if x.sum() > 0:
        return x * 2
    return x - 1


def stepping(x: torch.Tensor) -> torch.Tensor:
    x = torch.nn.functional.gelu(x)
    x = x + x.sum()
    torch._dynamo.step_unsupported()
    return x * 2


@pytest.mark.parametrize(
    ("function", "reason"),
    [(branching, "which branch is taken depends on a tensor's value"), (stepping, "TORCH_LOGS=graph_breaks says why")],
)
def test_a_break_is_told_in_the_users_words(
    function: Callable[[torch.Tensor], torch.Tensor], reason: str, lenient: None, told: Callable[[], list[str]]
) -> None:
    x = torch.randn(8)
    assert_same(compiled(function)(x), function(x))
    (line,) = told()
    assert line.endswith(reason), line


def begins_with_a_break(x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    return x * 2 if torch.equal(x, x) else x


def test_a_break_before_any_operator_is_told_once(lenient: None, told: Callable[[], list[str]]) -> None:
    x = torch.randn(8)
    with recording() as record:
        assert_same(compiled(begins_with_a_break)(x), x * 2)
        compiled(lambda x: x * 2)(x)
    (line,) = told()
    assert ": return x * 2 if torch.equal(x, x) else x runs as PyTorch runs it: Data dependent operator" in line
    assert [found.what for found in record.fallbacks] == ["the call that breaks the graph"]


def test_it_is_an_error_where_that_is_wished() -> None:
    with pytest.raises(
        Exception, match=r"the call that breaks the graph at test_dynamo.py:\d+: return x \* 2 if torch"
    ):
        compiled(begins_with_a_break)(torch.randn(8))
    # Breaks of what others compile are not reported with the next graph.
    torch.compile(begins_with_a_break, backend="eager")(torch.randn(8))
    assert_same(compiled(lambda x: x * 2)(torch.ones(8)), torch.full((8,), 2.0))


PROCESS = """
import json, sys
import torch
from torch.nn import functional as F
from tilewright.backend import backend
from tilewright.capture import program_cache

class Net(torch.nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.activation = activation

    def forward(self, x):
        return self.activation(x) * 2

assert torch._dynamo.config.caching_precompile
x = torch.linspace(-2, 2, 5)
for name in sys.argv[1:]:
    torch.compiler.reset()
    program_cache.counts.clear()
    activation = getattr(F, name)
    result = torch.compile(Net(activation), backend=backend)(x)
    torch.compiler.save_cache_artifacts()
    print(json.dumps([result.tolist(), (activation(x) * 2).tolist(), dict(program_cache.counts)]))
"""


def test_a_changed_activation_is_compiled_as_what_it_is(tmp_path: Path) -> None:
    script = tmp_path / "net.py"
    script.write_text(PROCESS)
    env = {
        "TORCH_CACHING_PRECOMPILE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch"),
        "TILEWRIGHT_CACHE": str(tmp_path / "tilewright"),
        "TILEWRIGHT_KEEP_PROGRAMS": "1",
    }
    outputs = [run([str(script), *activations], env=env)[0] for activations in (["gelu"], ["relu", "gelu"])]
    compiled, loaded = {"compiled": 1, "kept": 1}, {"loaded": 1}
    for line, counts in zip("".join(outputs).splitlines(), (compiled, compiled, loaded), strict=True):
        result, expected, found = json.loads(line)
        assert result == pytest.approx(expected, rel=1e-6, abs=1e-6)
        assert found == counts
