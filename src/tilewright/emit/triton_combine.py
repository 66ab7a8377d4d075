"""The second kernel of a nest with column sums."""

from __future__ import annotations

from tilewright.emit.triton_printer import Printer
from tilewright.emit.triton_step import combine, identity, reduce, type_name
from tilewright.loops.nest import Level
from tilewright.schedule.facts import accumulator_dtype


class Combine(Printer):
    """The kernel that combines the programs' column sums and computes the steps that depend on them."""

    has_tiles = False

    def text(self) -> str:
        late = self.nest.late_stores
        sizes = ["PARTS", "BLOCK_PARTS"]
        if self.scheduled.late_columns:
            sizes.append("BLOCK_COLS")
            self.put(f"col = {self.program()} * BLOCK_COLS + tl.arange(0, BLOCK_COLS)[None, :]")
            self.put(f"col_ok = col < {self.nest.col_count}")
            self.unravel("col", self.col_axes, self.nest.cols)
            self.put_groups(f"{self.program()} * BLOCK_COLS", "BLOCK_COLS", "[None, :]")
        needed = self.nest.behind((s.value for s in late), passes=lambda i: i not in self.scheduled.scratch)
        loads = [i for i in needed if self.nest.steps[i].name == "load" and not self.nest.steps[i].args]
        others = [i for i in needed if i not in loads]
        at_once = all(self.nest.steps[i].name != "load" for i in others)
        for i in loads + others:
            if i in self.scheduled.sums:
                self._combine(i)
            elif i in self.scheduled.late_scalars:
                self.put(f"{self.values[i]} = tl.load(part{i}_ptr + origin)")
            else:
                self.declare(i)
            # Store after all loads, since a result may overwrite an operand, but before other values: Triton 3.6 fails
            # ("operand does not dominate this use") where several values of double sums are stored at the end.
            for store in late if at_once else []:
                if store.value == i:
                    self.store(store)
        for store in [] if at_once else late:
            self.store(store)
        return self.define(f"{self.nest.name}_after", sizes)

    def _combine(self, i: int) -> None:
        step = self.nest.steps[i]
        kind, accumulated = step.kind or "", accumulator_dtype(step)
        wide = step.level is Level.COL
        start = identity(kind, step.dtype)
        self.put(f"total{i} = {self.blank(step, 'BLOCK_PARTS')}")
        self.open("for start in range(0, PARTS, BLOCK_PARTS):")
        self.put("part = start + tl.arange(0, BLOCK_PARTS)[:, None]")
        self.put("part_ok = part < PARTS")
        place = f"part.to(tl.int64) * {self.nest.col_count} + col" if wide else "part"
        mask = "part_ok & col_ok" if wide else "part_ok"
        self.put(f"found = tl.load(part{i}_ptr + {place}, mask={mask}, other={start})")
        self.put(f"total{i} = {combine(kind, step.dtype, f'total{i}', 'found')}")
        self.close()
        convert = f".to({type_name(step.dtype)})" if accumulated != step.dtype else ""
        gathered = reduce(kind, accumulated, f"total{i}", 0)
        self.put(f"{self.values[i]} = {f'({gathered}){convert}' if convert else gathered}")
