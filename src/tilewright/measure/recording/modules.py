"""Names of modules, and the calls of modules that PyTorch's profiler records with stacks: hooks would cost more."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import ref

if TYPE_CHECKING:
    from torch import nn

FORWARD, LAYER = "phase forward", "layer "
# By identity, since a module that defines equality has no hash; weakly, since the program may drop a model.
LayerNames: TypeAlias = "dict[int, tuple[ref[nn.Module], str]]"
_WRAPPERS = ("_orig_mod.", "module.")


def layer_names(model: nn.Module) -> LayerNames:
    """The name of each layer's range, by the identity of its module; "" for the model."""
    named: LayerNames = {}
    for name, layer in model.named_modules():
        for wrapper in _WRAPPERS:
            name = name.removeprefix(wrapper)
        named[id(layer)] = ref(layer), LAYER + name if name else ""
    return named


def module_ranges(results: Any, *, layers: bool) -> Iterator[tuple[str, int, int, int]]:
    """Name, begin and end in nanoseconds since 1970, and number of the thread, for each call of a module that is alive.

    `results` are the profiler's, as Kineto gives them. A module that no module called is a model. Threads that began
    after the profiler are not in it.
    """
    threads = {event.start_thread_id(): event.device_resource_id() for event in results.events()}
    modules = _modules_alive()
    known: dict[int, LayerNames] = {}
    to_visit: list[tuple[Any, LayerNames | None]] = [(event, None) for event in results.experimental_event_tree()]
    while to_visit:
        event, names = to_visit.pop()
        called = getattr(event.extra_fields, "module", None)
        if called is not None and (module := modules.get(called.self_ptr)) is not None:
            name = FORWARD if names is None else names.get(called.self_ptr, (None, ""))[1]
            if names is None:
                names = known[called.self_ptr] = known.get(called.self_ptr) or (layer_names(module) if layers else {})
            if name and event.start_tid in threads:
                yield name, event.start_time_ns, event.end_time_ns, threads[event.start_tid]
        to_visit += [(child, names) for child in event.children]


def outermost_modules() -> Sequence[nn.Module]:
    """Those alive that are in no other."""
    import torch

    modules = _modules_alive()
    inner = {id(child) for module in modules.values() for child in vars(module).get("_modules", {}).values()}
    # A scripted or traced one holds its parameters in C++; another without them is not made yet.
    return [
        it
        for number, it in modules.items()
        if number not in inner and ("_parameters" in vars(it) or issubclass(type(it), torch.jit.ScriptModule))
    ]


def _modules_alive() -> Mapping[int, nn.Module]:
    from torch import nn

    # By type: `isinstance` asks an object's `__class__`, which may run code.
    return {id(found): found for found in gc.get_objects() if issubclass(type(found), nn.Module)}
