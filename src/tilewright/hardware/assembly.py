"""Machine code of NVIDIA GPUs read back: registers, spills, widths of loads and stores, matrix instructions.

The disassembler is NVIDIA's: the one that Triton brings, else one on PATH or under /usr/local/cuda. The
names of instructions are those of "CUDA Binary Utilities", tables of instruction sets.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tilewright.hardware.architectures import architecture
from tilewright.records.errors import CompilerError

Memory = Literal["global", "shared", "local", "atomic"]

_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
_WORD = 4
_RESERVED = 1024
_MOVES: Mapping[str, tuple[Memory, Literal["load", "store"]]] = {
    "LDG": ("global", "load"),
    "LD": ("global", "load"),
    "LDGSTS": ("global", "load"),
    "STG": ("global", "store"),
    "ST": ("global", "store"),
    "LDS": ("shared", "load"),
    "LDSM": ("shared", "load"),
    "STS": ("shared", "store"),
    "STSM": ("shared", "store"),
    "LDL": ("local", "load"),
    "STL": ("local", "store"),
    "ATOM": ("atomic", "store"),
    "ATOMG": ("atomic", "store"),
    "RED": ("atomic", "store"),
    "REDG": ("atomic", "store"),
}
_BULK = ("UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "UBLKRED")
_MATRIX = ("HMMA", "HGMMA", "IMMA", "IGMMA", "DMMA", "QMMA", "QGMMA", "BMMA", "BGMMA")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)


@dataclass(frozen=True)
class Resources:
    """Registers and stack of a thread, and static shared memory of a block, in bytes."""

    registers: int
    stack_bytes: int
    """Local memory: spilled registers, and arrays indexed at run time."""
    shared_bytes: int
    """As the machine code states it, the system's part included."""

    def own_shared_bytes(self, capability: str) -> int:
        """The part that the kernel declared: from 9.0 on the machine code includes the system's KiB.

        >>> Resources(32, 0, 2048).own_shared_bytes("9.0"), Resources(32, 0, 2048).own_shared_bytes("8.0")
        (1024, 2048)
        """
        return max(0, self.shared_bytes - _RESERVED) if architecture(capability).number >= 90 else self.shared_bytes


@dataclass(frozen=True)
class Instructions:
    """Instructions of one kernel as they stand in its code, each counted once however often it runs."""

    total: int
    moves: Mapping[tuple[Memory, Literal["load", "store"], int], int]
    """By memory, direction and bytes a thread moves at once; `LDG.E.128` is (global, load, 16)."""
    names: Mapping[str, int]
    """The instructions behind `moves`, in full: `LDG.E.128`, `STG.E.64`, ..."""
    bulk: Mapping[str, int]
    """Copies of whole tiles by the copy engine (TMA)."""
    matrix: Mapping[str, int]
    """`HMMA.16816.F32.BF16`, `HGMMA.64x128x16.F32.BF16`, ..."""

    def widths(self, memory: Memory, direction: Literal["load", "store"]) -> dict[int, int]:
        """Bytes at once → instructions, widest first."""
        found = {width: n for (where, way, width), n in self.moves.items() if (where, way) == (memory, direction)}
        return dict(sorted(found.items(), reverse=True))

    @property
    def spills(self) -> int:
        """Loads and stores of local memory."""
        return sum(n for (memory, _, _), n in self.moves.items() if memory == "local")


def disassemble(cubin: bytes) -> dict[str, str]:
    """SASS of each function of a cubin, by name. CompilerError where there is no disassembler or it refuses."""
    text = _run("nvdisasm", "-c", cubin=cubin)
    pieces = re.split(r"^//-+ \.text\.(\S+) +-+$", text, flags=re.MULTILINE)[1:]
    return {
        name: body.split("\n//------", 1)[0].strip("\n") for name, body in zip(pieces[::2], pieces[1::2], strict=True)
    }


def resources(cubin: bytes) -> dict[str, Resources]:
    """Registers, stack and shared memory of each function of a cubin, by name. CompilerError as `disassemble`."""
    text = _run("cuobjdump", "-res-usage", cubin=cubin)
    found = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    return {name: Resources(int(registers), int(stack), int(shared)) for name, registers, stack, shared in found}


def read_sass(text: str) -> Instructions:
    """Count the instructions of one function as `nvdisasm` or `cuobjdump -sass` prints it.

    >>> found = read_sass("        /*00e0*/  @!P0 LDG.E.128 R8, desc[UR4][R4.64] ;")
    >>> found.widths("global", "load"), found.matrix
    ({16: 1}, {})
    """
    opcodes = Counter(_INSTRUCTION.findall(text))
    moves: Counter[tuple[Memory, Literal["load", "store"], int]] = Counter()
    kinds: dict[str, Counter[str]] = {"names": Counter(), "bulk": Counter(), "matrix": Counter()}
    for opcode, n in opcodes.items():
        root, *modifiers = opcode.split(".")
        if root in _MOVES:
            moves[(*_MOVES[root], _width(root, modifiers))] += n
            kinds["names"][opcode] += n
        elif root in _BULK:
            kinds["bulk"][opcode] += n
        elif root in _MATRIX:
            kinds["matrix"][opcode] += n
    # The endless branch and the padding behind the code are never reached.
    total = sum(n for opcode, n in opcodes.items() if opcode != "NOP")
    return Instructions(total, dict(moves), **{kind: dict(sorted(found.items())) for kind, found in kinds.items()})


def _width(root: str, modifiers: list[str]) -> int:
    if root in ("LDSM", "STSM"):
        # A matrix of 8×8 16-bit values is one word of each thread.
        return _WORD * next((int(modifier) for modifier in modifiers if modifier in ("2", "4")), 1)
    return next((_WIDTHS[modifier] for modifier in modifiers if modifier in _WIDTHS), _WORD)


def _run(tool: str, option: str, *, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([_find(tool), option, file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompilerError(f"{tool} cannot read the machine code: {(done.stderr or done.stdout).strip()[:500]}")
    return done.stdout


def _find(tool: str) -> str:
    spec = importlib.util.find_spec("triton")
    packages = spec.submodule_search_locations if spec else None
    places = [Path(place) / "backends/nvidia/bin" / tool for place in packages or ()]
    places.append(Path("/usr/local/cuda/bin") / tool)
    found = next((str(place) for place in places if place.is_file()), None) or shutil.which(tool)
    if found is None:
        raise CompilerError(f"no {tool} in Triton's package, on PATH or under /usr/local/cuda; Triton brings one")
    return found
