"""Dynamo, AOTAutograd and Inductor as the other rooms use them: to forget, to follow and to look at compilations."""

from __future__ import annotations

import contextlib
import linecache
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch


def forget_compiled() -> None:
    """Compile every function anew: past its recompile limit Dynamo runs a function eagerly without a message."""
    torch._dynamo.reset()


def is_compilers(error: Exception) -> bool:
    """Whether Dynamo or a backend raised this error, not the program."""
    return isinstance(error, torch._dynamo.exc.TorchDynamoException)


def region_switch() -> tuple[Any, str]:
    """Owner and name of the function that Dynamo calls as it enters and leaves a compiled region, with a callback or
    None; at that time it looks at no frame.
    """
    from torch._dynamo import eval_frame

    return eval_frame, "_maybe_set_eval_frame"


def frame_conversion() -> tuple[Any, str]:
    """Owner and name of what Dynamo calls for each frame that it has not seen; it enters and leaves regions within."""
    from torch._dynamo import convert_frame

    return convert_frame.CatchErrorsWrapper, "__call__"


def compilation_callbacks() -> tuple[Any, str]:
    """Owner and name of the context in which each compilation runs; its arguments are a trigger and an identifier."""
    from torch._dynamo.callback import callback_handler

    return callback_handler, "install_callbacks"


@contextlib.contextmanager
def without_importing_inductor() -> Iterator[None]:
    """Inside, PyTorch's profiler does not import Inductor, nor with it Dynamo, to read a setting that nobody made."""
    lazy: set[str] = getattr(torch, "_lazy_modules", set())
    left_out = "_inductor" in lazy and "torch._inductor" not in sys.modules
    if left_out:
        lazy.remove("_inductor")
    try:
        yield
    finally:
        if left_out:
            lazy.add("_inductor")


def recompile_reasons(since: float) -> Sequence[str]:
    """Why PyTorch compiled again, in its words, since a time of `time.time()`; none if Dynamo was not imported."""
    utils = sys.modules.get("torch._dynamo.utils")
    compiled = utils.get_compilation_metrics() if utils is not None else []
    found = [it.recompile_reason for it in compiled if it.recompile_reason and (it.start_time or 0) >= since]
    return [_CUT_PATH.sub(_whole_path, reason) for reason in found]


_CUT_PATH = re.compile(r"(?<=# )([^\s:]+)(?=:\d+ in )")


def _whole_path(cut: re.Match[str]) -> str:
    """The file whose path PyTorch cut.

    It leaves out what the path shares with its own folder, and one character more for a slash: of `/home/me/train.py`
    beside `/usr/lib/python3/torch`, where only `/` is shared, it leaves `ome/me/train.py`. The line's text was read
    from the file before, so `linecache` knows it.
    """
    known = [path for path in linecache.cache if path.endswith(cut[0])]
    return min(known, key=len, default=cut[0])


@contextlib.contextmanager
def buffers_kept() -> Iterator[None]:
    """Inside, a backward that is compiled keeps what its forward saved, so that it can run repeatedly on one graph."""
    from torch._functorch import config

    with config.patch(donated_buffer=False):
        yield


@contextlib.contextmanager
def keeping_code() -> Iterator[Mapping[str, Any]]:
    """Inside, Inductor compiles without its cache and keeps each kernel's PTX and machine code, which its static
    launcher discards.

    Yields the autotuners of the launched Triton kernels, by kernel name.
    """
    from torch._inductor import config
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    launched: dict[str, Any] = {}
    run: Any = CachingAutotuner.run

    def recorded_run(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched[self.fn.__name__] = self
        return run(self, *args, **kwargs)

    # The launcher's switch was renamed after PyTorch 2.11.
    switches = ("use_static_cuda_launcher", "use_static_triton_launcher")
    off = {name: False for name in switches if hasattr(config, name)}
    # Kernels compiled in another process have no source.
    with (
        config.patch({"force_disable_caches": True, "compile_threads": 1, **off}),
        mock.patch.object(CachingAutotuner, "run", recorded_run),
    ):
        yield launched
