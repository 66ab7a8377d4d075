"""Records compiled graphs as CUDA graphs and replays them: one launch instead of many.

    call 1   launch by launch: kernels are compiled and loaded, alternatives raced, tables sent to the device
    call 2   launch by launch, watched for operators that wait for the device, which a recording does not allow
    call 3   recorded (`capture/cuda_graph.py`) and replayed for the first time; later calls are replays

Calls are counted for each thread, each set of sizes, and each set of addresses of inputs that the graph writes to
(caches): these are written in place, not copied. A backward is recorded after its forward, whose saved tensors then
keep their addresses. A failed recording would leave PyTorch 2.11's allocator and generators unusable, so graphs that
cannot be recorded are found beforehand and run launch by launch.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from tilewright.capture.aot import Boxed, CallableGraph
from tilewright.capture.cuda_graph import end_forward, recorded, records_here, unrecordable, written_inputs
from tilewright.graph.specialise import is_symbolic, reads_offsets, size_key
from tilewright.pytorch.state import carries_tangents
from tilewright.records.errors import UsageError, strict, warn_once
from tilewright.runtime.by_size import MOST_SIZES
from tilewright.runtime.overlap import overlaps

ALIGNMENT = 16
"""Bytes. PyTorch copies an input whose address is not a multiple of this, so writes to it would be lost."""
WAITS = "called a synchronizing CUDA operation"
"""The warning of PyTorch's synchronisation debug mode about an operator that waits for the device."""

REPLAYING_MODES = ("reduce-overhead", "max-autotune")
"""Modes of `torch.compile` that ask for CUDA graphs, as they do of PyTorch's own backend."""
MODES = ("default", *REPLAYING_MODES, "max-autotune-no-cudagraphs")
OPTIONS = ("cuda_graphs", "hand_written")


def asks_for_replay(mode: str | None, options: Mapping[str, Any]) -> bool:
    """Whether compiled graphs become CUDA graphs. Unknown options and modes warn, or raise in strict mode."""
    lines = []
    if unknown := [name for name in options if name not in OPTIONS]:
        lines.append(f"the backend has the options {', '.join(OPTIONS)}, and none named {', '.join(unknown)}")
    if mode is not None and mode not in MODES:
        lines.append(f"the backend has the modes {', '.join(MODES)}, and none named {mode}")
    for line in lines:
        if strict():
            raise UsageError(line)
        warn_once(line)
    return mode in REPLAYING_MODES or bool(options.get("cuda_graphs"))


def obstacle(graph: CallableGraph) -> str | None:
    """Why `graph` cannot be recorded as a CUDA graph; None if it can."""
    devices: dict[torch.device, fx.Node] = {}
    for node in graph.module.graph.nodes:
        value = attrgetter(str(node.target))(graph.module) if node.op == "get_attr" else node.meta.get("val")
        if isinstance(value, torch.Tensor):
            devices.setdefault(value.device, node)
        elif node.op == "placeholder" and not isinstance(value, (int, torch.SymInt, type(None))):
            return f"its input {node.name} is a {type(value).__name__}, which a recording would keep as it was"
    for device, node in devices.items():
        if device.type != "cuda":
            return f"{node.name} is on the {device.type.upper()}"
    if len(devices) != 1:
        return f"it is on several devices: {', '.join(map(str, devices))}" if devices else "it has no tensors"
    node = unrecordable(graph.module)
    return None if node is None else f"{node.target} cannot be recorded"


def device_of(graph: CallableGraph) -> int:
    """The index of the CUDA device of a graph without obstacles."""
    values = (node.meta.get("val") for node in graph.module.graph.nodes)
    found = next(value.device.index for value in values if isinstance(value, torch.Tensor))
    return found or 0


class Replay:
    """A compiled graph as AOTAutograd calls it: launch by launch at first, then, unless `is_refused`, as a CUDA graph.

    `run` computes `graph`. `refuse` is called once, with the reason, if a call shows that the graph cannot be recorded.
    `forward` is the forward of a backward.
    """

    _boxed_call = True

    def __init__(
        self, run: Boxed, graph: CallableGraph, refuse: Callable[[str], None], forward: Replay | None = None, *,
        is_refused: bool = False,
    ) -> None:  # fmt: skip
        self.run = run
        self._written = sorted(written_inputs(graph.module) - set(graph.static))
        """Inputs that the graph writes to and whose addresses may change between calls."""
        self.graph = replace(graph, static=[*graph.static, *self._written])
        self.refuse = refuse
        self.forward = forward
        self.device: int = forward.device if forward else device_of(graph)
        self.is_recorded = False
        self.is_refused = is_refused
        self._symbolic = is_symbolic(graph.module)
        self._offsets = reads_offsets(graph.module.graph)
        self._here = threading.local()

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        known: dict[Hashable, int | Boxed] = self._here.__dict__.setdefault("known", {})
        sizes = size_key(args, offsets=self._offsets) if self._symbolic else None
        if self._written:
            sizes = (sizes, *(args[place].data_ptr() for place in self._written))
        so_far = known.get(sizes, 0)
        if torch.cuda.is_current_stream_capturing() or carries_tangents(args):
            # A larger recording is running, or forward-mode differentiation.
            return self._by_calls(args)
        if not isinstance(so_far, int):
            return so_far(args)
        # Graphs are recorded for as many sizes as are compiled.
        if self.is_refused or (len(known) >= MOST_SIZES and sizes not in known):
            return self._by_calls(args)
        known[sizes] = so_far + 1
        if so_far == 0:
            return self._by_calls(args)
        if so_far == 1:
            return self._watched(args)
        if self.forward is not None and not self.forward.is_recorded:
            return self._by_calls(args)
        if not records_here():
            known[sizes] = self._by_calls
            self.refuse("PyTorch records for the thread that began to and for autograd's, and this is another")
            return self._by_calls(args)
        known[sizes], results = recorded(self.run, self.graph, self.device, args)
        self.is_recorded = True
        return results

    def _by_calls(self, args: list[Any]) -> Sequence[Any]:
        if self.forward is not None and self.forward.is_recorded:
            end_forward(self.device)
        return self.run(args)

    def _watched(self, args: list[Any]) -> Sequence[Any]:
        why = self._unfit(args)
        for place, x in enumerate(args):
            # A recording copies inputs to aligned memory, so load the kernels for aligned inputs before it.
            if isinstance(x, torch.Tensor) and place not in self.graph.static and x.data_ptr() % ALIGNMENT:
                args[place] = x.clone()
        results, waits = watched(self._by_calls, args)
        if waits:
            why = "one of its operators waits for the device"
        if why is not None:
            self.is_refused = True
            self.refuse(why)
        return results

    def _unfit(self, args: Sequence[Any]) -> str | None:
        """Why a recording cannot copy these arguments, or write to them; None if it can."""
        inputs = self.graph.module.graph.find_nodes(op="placeholder")
        tensors = [(i, x) for i, x in enumerate(args) if isinstance(x, torch.Tensor)]
        for place in [i for i, x in tensors if i not in self.graph.static and overlaps(x)]:
            return f"elements of its input {inputs[place].name} share memory"
        written = written_inputs(self.graph.module)
        for place in [i for i, x in tensors if i in written and x.data_ptr() % ALIGNMENT]:
            return f"it writes to its input {inputs[place].name}, which begins at no multiple of {ALIGNMENT} bytes"
        return None


def watched(run: Boxed, args: list[Any]) -> tuple[Sequence[Any], bool]:
    """The results of `run`, and whether an operator in it waited for the device.

    PyTorch warns about every wait except those of collectives and sparse tensors; other warnings are passed on.
    """
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode(mode or "warn")
        try:
            results = run(args)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    own = [w for w in caught if WAITS in str(w.message)]
    for w in caught:
        if (w not in own or mode) and "Synchronization debug mode" not in str(w.message):
            warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
    return results, bool(own)
