"""A program that logs, warns or prints is captured as one graph, as if it did not."""

import functools
import logging
import warnings
from collections.abc import Callable

import pytest
from torch import Tensor

from tilewright.compile.capture import capture
from tilewright.records.case import Case, InputSpec

logger = logging.getLogger(__name__)


@functools.lru_cache(None)
def warning_once(self: logging.Logger, text: str) -> None:
    self.warning(text)


@pytest.mark.parametrize(
    "tell",
    [
        lambda x: logger.warning_once("once"),
        lambda x: logger.info("%s", x.mean()),
        lambda x: logger.isEnabledFor(logging.DEBUG) and logger.debug("detail"),
        lambda x: logging.warning("to the root logger"),
        lambda x: warnings.warn("deprecated", stacklevel=2),
        lambda x: print(x.shape, f"{x.sum():.2f}"),
    ],
    ids=["a library's own", "info", "debug if enabled", "root", "warn", "print"],
)
def test_it_is_one_graph(
    tell: Callable[[Tensor], object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(logging.Logger, "warning_once", warning_once, raising=False)
    logged: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.Logger, "callHandlers", lambda _, record: logged.append(record))

    def told(x: Tensor) -> Tensor:
        y = x.exp()
        tell(y)
        return y + 1

    captured = capture(Case("told", lambda: told, InputSpec.parse_many("fp32[N=4]"), training=False))
    targets = [str(node.target) for node in captured.graphs["forward"].nodes if node.op == "call_function"]
    assert (targets[0], targets[-1]) == ("aten.exp.default", "aten.add.Tensor")
    assert capsys.readouterr() == ("", "")
    # Nor does Dynamo, which cannot write down what is ignored (torch 2.11).
    assert [record.name for record in logged if record.levelno >= logging.ERROR] == []
