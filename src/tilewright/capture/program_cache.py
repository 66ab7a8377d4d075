"""The on-disk cache of compiled programs: a process that finds its program neither traces nor plans it.

    key     what the caller says (versions, device, options) and `fingerprint`: graph, inputs, modes, settings
    entry   AOTAutograd's wrappers (`aot_entry.py`), the planned graphs (`packed.py`), and the outcomes of the races
            that the plan follows; if one of these has changed, the program is planned anew

A program with symbolic sizes is kept as it was traced, with the conditions on its sizes (`size_guards.py`). The plan
for the sizes of a call is a separate entry; its key is the program's key and the sizes.

Keys contain neither the rank nor the index of the current device.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from tilewright.capture.fingerprint import fingerprint
from tilewright.records import cache, outcomes
from tilewright.records.errors import CacheError, CaptureError
from tilewright.records.outcomes import Outcome

SUFFIX = ".program"
counts: Counter[str] = Counter()
"""How many programs this process compiled, loaded, kept, and did not keep for which reason."""


@dataclass(frozen=True)
class KeptProgram:
    """The parts from which `capture/aot.py` makes a callable."""

    entry: bytes
    """AOTAutograd's part; empty in the plan for the sizes of a call."""
    planned: bytes
    """The packed plans."""
    backward: bytes | None
    """Packed: the backward graph with all its incoming gradients, as it was before it was planned."""
    looked_up: Mapping[str, Outcome | None] = field(default_factory=dict)
    guards: str | None = None
    """Conditions on symbolic sizes."""


def key_of(identity: Sequence[str], module: fx.GraphModule, inputs: Sequence[Any]) -> str | None:
    """The key of a captured module; None where it cannot be described exactly."""
    try:
        return cache.key_of("program", *identity, *fingerprint(module, inputs))
    except CaptureError as error:
        counts[f"not kept: {error}"] += 1
        return None


def key_for_sizes(program: str, graph: str, sizes: Hashable) -> str:
    """The key of the plan of a program's `graph` (forward, backward) for the sizes of a call (`size_key`)."""
    return cache.key_of("sizes", program, graph, repr(sizes))


def load(key: str) -> KeptProgram | None:
    """The program kept for `key`, if it is still valid. Removes a damaged entry."""
    try:
        content = cache.content_with_digest(key, SUFFIX)
        if content is None:
            return None
        program: KeptProgram = pickle.loads(content)
    # The file may be of another version in spite of its key, and then does not unpickle.
    except Exception:
        discard(key)
        return None
    if any(outcomes.lookup(race) != outcome for race, outcome in program.looked_up.items()):
        discard(key)
        return None
    return program


def load_plan(key: str) -> Any | None:
    """The plan that was kept for the sizes of a call. Raises what unpacking it raises."""
    from tilewright.capture.packed import unpack

    program = load(key)
    if program is None:
        counts["sizes planned"] += 1
        return None
    plan = unpack(program.planned)
    counts["sizes loaded"] += 1
    return plan


def keep_plan(key: str, plan: Any, graphs: Sequence[fx.Graph], looked_up: Mapping[str, Outcome | None]) -> None:
    """Write the plan for the sizes of a call, which refers to these graphs."""
    from tilewright.capture.packed import Unpackable, pack

    try:
        content = pack(plan, graphs)
    except Unpackable as error:
        counts[f"not kept: {error}"] += 1
        return
    keep(key, KeptProgram(b"", content, None, dict(looked_up)), "sizes kept")


def keep(key: str, program: KeptProgram, what: str = "kept") -> None:
    """Write a program, counted as `what`; where the cache cannot be used, the next process compiles it too."""
    content = pickle.dumps(program, protocol=5)
    try:
        cache.build_with_digest(key, SUFFIX, lambda path: path.write_bytes(content))
        counts[what] += 1
    except CacheError as error:
        counts[f"not kept: {error}"] += 1


def discard(key: str) -> None:
    """Remove what was kept for `key`."""
    cache.discard(cache.entry(key, SUFFIX))
