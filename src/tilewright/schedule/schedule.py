"""How a nest's rows and columns are divided among programs, threads, loops and registers, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Place = Literal["programs", "loop", "registers"]
Order = Literal["columns", "rows"]


@dataclass(frozen=True)
class Axis:
    """How the rows or the columns are divided: a program has `blocks` blocks of `tile` elements of them.

    It has one block, and other programs have the others (`programs`), or it walks its blocks (`loop`), or it holds all
    of them at once (`registers`).
    """

    tile: int
    place: Place = "programs"
    blocks: int = 1

    @property
    def owned(self) -> int:
        """Elements that a program has."""
        return self.tile * self.blocks

    def __str__(self) -> str:
        return f"{self.blocks}·{self.tile}" if self.place == "registers" and self.blocks > 1 else str(self.tile)


@dataclass(frozen=True)
class Combination:
    """The kernel that adds the programs' partial sums: each program adds all `parts` of `columns` columns."""

    programs: int
    parts: int
    block_parts: int
    columns: int
    scratch: tuple[tuple[int, str], ...]
    """Elements and dtype of each buffer that passes a sum."""
    warps: int = 4


@dataclass(frozen=True)
class Schedule:
    """How the kernel of one nest runs on one device.

    >>> print(Schedule(Axis(4), Axis(512), programs=96, order="rows"))
    tile 4 × 512, 4 warps, 96 programs along the rows
    """

    rows: Axis
    cols: Axis
    programs: int
    warps: int = 4
    """0 on a CPU, whose threads take programs in turn."""
    stages: int = 1
    """Tiles of a strip of rows that are loaded or computed at a time."""
    order: Order = "columns"
    """The axis along which programs that run together go."""
    cuts_columns: bool = False
    """Whether a block of columns ends with the innermost column axis."""
    masks_rows: bool = False
    """Whether programs have rows beyond the last."""
    combination: Combination | None = None
    is_shared: bool = True
    """Whether the threads of a CPU share the programs."""

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the main kernel by the names of its parameters."""
        blocks = {"BLOCK": self.cols.tile, "BLOCK_ROWS": self.rows.tile, "BLOCK_COLS": self.cols.tile}
        return blocks | {"MASKED_ROWS": int(self.masks_rows), "TILES": self.rows.blocks, "AHEAD": self.stages}

    @property
    def combining_sizes(self) -> dict[str, int]:
        """The sizes of the kernel that combines sums by the names of its parameters."""
        if self.combination is None:
            return {}
        sums = self.combination
        return {"PARTS": sums.parts, "BLOCK_PARTS": sums.block_parts, "BLOCK_COLS": sums.columns}

    @property
    def scratch(self) -> tuple[tuple[int, str], ...]:
        """Elements and dtype of each buffer between the kernels."""
        return self.combination.scratch if self.combination else ()

    def __str__(self) -> str:
        parts = [f"tile {self.rows} × {self.cols}"]
        parts += [f"{self.rows.blocks} tiles of rows in turn"] * (self.rows.place == "loop")
        parts += [f"{self.stages} at a time"] * (self.stages > 1)
        parts += ["columns in a loop"] * (self.cols.place == "loop")
        if self.warps:
            parts += [f"{self.warps} warp{'s' * (self.warps > 1)}"]
            along = f" along the {self.order}" if self.cols.place == "programs" else ""
            parts += [f"{self.programs} program{'s' * (self.programs > 1)}{along}"]
        else:
            parts += [f"{self.programs} for all threads" if self.is_shared else "one thread"]
        if self.combination:
            parts += [f"then {self.combination.programs} that add {self.combination.parts} parts"]
        return ", ".join(parts)
