"""Rows too long for registers: each stage loops over blocks of columns and recomputes what it needs of earlier stages.

Loops run forward and backward in turn, since the last-level cache still holds what the last one read at its end. A sum
of exponentials of differences from the row's maximum is computed in the loop that finds the maximum: each lane scales
its sum whenever its own maximum grows. Accumulators in double are as many as vectors, not as columns, of a block: more
would leave no registers for loads. H200, one program a row: normalising 7168 rows of 262,144 columns in bf16 takes
2,566 µs (18,068 with an accumulator a column, 2,724 forward only), log-softmax of 4096 rows of 393,216 columns in fp32
4,673 µs (6,054 with a loop of its own for the sum).
"""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.emit.triton_rows import Rows
from tilewright.emit.triton_step import combine, expression, identity, reduce, type_name
from tilewright.loops.nest import Level, Step, Store
from tilewright.schedule.facts import accumulator_dtype


class LongRows(Rows):
    """The loops over a long row."""

    timed: list[tuple[Store, int]]
    """Stores before the end of all rows, with their stages."""
    needed: list[int]
    """Positions of the steps that the kernel computes."""
    last_stages: list[int]
    """The last stage that computes each step."""
    stage: int | None = None
    """Of the loop that is being printed."""
    backward = False
    """The direction of the next loop."""

    def _stage(self, stage: int) -> None:
        steps = self.nest.steps
        for i in self.needed:
            step = steps[i]
            if step.stage == stage and step.level in (Level.ROW, Level.SCALAR):
                if i in self.scheduled.sums:
                    self._add_to_sum(i, step)
                elif step.name != "reduce_cols":
                    self.declare(i)
        for store, known in self.timed:
            if known == stage and not self.nest.covers_columns(store.access):
                self.store(store)
        self.stage = stage
        self._loop_over_columns(stage)
        self.stage = None

    def _loop_over_columns(self, stage: int) -> None:
        steps = self.nest.steps
        online = self.scheduled.online_sums
        ends = [i for i in self.needed if steps[i].name == "reduce_cols" and steps[i].stage == stage]
        ends = [i for i in ends if i not in online]
        beside = {peak: i for i, peak in online.items() if i in self.needed and peak in ends}
        sums = [i for i in self.scheduled.sums if steps[i].level is Level.COL and steps[i].stage == stage]
        stores = [s for s, known in self.timed if known == stage and self.nest.covers_columns(s.access)]
        roots = [steps[i].args[0] for i in ends + sums] + [s.value for s in stores]
        if not roots:
            return
        for i in (*ends, *beside.values()):
            self.put(f"acc{i} = {self._blank_lanes(i)}")
        # Row values are declared already.
        inside = self.nest.behind(roots, includes=lambda i: steps[i].level in (Level.FULL, Level.COL))
        scans = [i for i in self.scheduled.scans if i in inside]
        for i in scans:
            start = identity(steps[i].kind or "", steps[i].dtype)
            self.put(f"carry{i} = tl.full(({self._rows_of(i)}, 1), {start}, {type_name(steps[i].dtype)})")
        self._open_loop(backward=self.backward and not scans)
        self.backward = not self.backward or bool(scans)
        for i in self._in_order(inside):
            self.declare(i)
        for i in scans:
            kind, dtype = steps[i].kind or "", steps[i].dtype
            self.put(f"carry{i} = {combine(kind, dtype, f'carry{i}', reduce(kind, dtype, self._scanned(i), 1))}")
        for i in ends:
            if i in beside:
                self._add_online(beside[i], i)
            else:
                self.put(f"acc{i} = {combine(steps[i].kind or '', steps[i].dtype, f'acc{i}', self._lanes(i))}")
        for i in sums:
            self._add_to_sum(i, steps[i])
        for store in stores:
            self.store(store)
        self.close()
        for i in ends:
            self._finish(i, reduce(steps[i].kind or "", accumulator_dtype(steps[i]), f"acc{i}", 1))
            if i in beside:
                total, peak = beside[i], self.values[i]
                self.put(f"acc{total} = acc{total} * {self._exponential(total, f'acc{i} - {peak}')}")
                self._finish(total, reduce("sum", accumulator_dtype(steps[total]), f"acc{total}", 1))

    def _in_order(self, steps: Iterable[int], *, loads_first: bool = False) -> list[int]:
        """The order in which steps are declared."""
        raise NotImplementedError

    def _open_loop(self, *, backward: bool) -> None:
        """Begin a loop over the blocks of columns, from the last one on if `backward`."""
        if self.scheduled.cuts_columns:
            *_, inner = self.nest.cols
            blocks, across = self.scheduled.column_blocks_text, f"tl.cdiv({inner}, BLOCK_COLS)"
            self.open(f"for step in range({blocks}):")
            self.put(f"block = {blocks} - 1 - step" if backward else "block = step")
            self.put(f"outer = block // {across}" + (" + tl.zeros((1, 1), tl.int64)" * self.scheduled.wide_index))
            self._place_columns(f"(block % {across}) * BLOCK_COLS")
            return
        columns = self.nest.col_count
        self.open(f"for start in range(0, {columns}, BLOCK_COLS):")
        # A falling `range` would hide from the compiler that blocks begin at vectors.
        self._place_columns(f"(({columns} - 1) // BLOCK_COLS * BLOCK_COLS - start)" if backward else "start")

    # Accumulators

    def _rows_of(self, i: int) -> str:
        """How many rows the operand of step `i` has in a tile."""
        return "BLOCK_ROWS" if self.nest.steps[self.nest.steps[i].args[0]].level is Level.FULL else "1"

    def _is_of_lanes(self, i: int) -> bool:
        """Whether a reduction has an accumulator for each vector of a block, not for each column."""
        of_maximum = i in self.scheduled.online_sums or i in self.scheduled.online_sums.values()
        step = self.nest.steps[i]
        return of_maximum or (step.kind == "sum" and self.accumulator(step) == "float64")

    def _blank_lanes(self, i: int) -> str:
        step = self.nest.steps[i]
        if not self._is_of_lanes(i):
            return self.blank(step, self._rows_of(i))
        dtype = type_name(self.accumulator(step))
        return f"tl.full({self._lane_shape(i)}, {identity(step.kind or '', step.dtype)}, {dtype})"

    def _lane_shape(self, i: int) -> str:
        return f"({self._rows_of(i)}, BLOCK_COLS // {self.scheduled.vector})"

    def _by_lane(self, i: int, text: str) -> str:
        """A block's values [rows, lanes, elements of a lane], or with the last two exchanged (`_lane_axis`)."""
        rows, lanes, elements = self._rows_of(i), f"BLOCK_COLS // {self.scheduled.vector}", str(self.scheduled.vector)
        sizes = (lanes, elements) if self.scheduled.lanes_of_vectors else (elements, lanes)
        return f"tl.reshape({text}, ({', '.join((rows, *sizes))}))"

    @property
    def _lane_axis(self) -> int:
        """The axis of the elements of a lane."""
        return 2 if self.scheduled.lanes_of_vectors else 1

    def _beside_lanes(self, text: str) -> str:
        """A value of each lane, for all of its elements."""
        return f"{text}[:, :, None]" if self.scheduled.lanes_of_vectors else f"{text}[:, None, :]"

    def _lanes(self, i: int) -> str:
        """The operand of a reduction in the shape of its accumulator."""
        step = self.nest.steps[i]
        terms = self._widened(step, self._bounded(step, 1))
        return f"tl.sum({self._by_lane(i, terms)}, axis={self._lane_axis})" if self._is_of_lanes(i) else terms

    # A maximum, and the sum of exponentials of differences from it

    def _add_online(self, total: int, peak: int) -> None:
        axis = self._lane_axis
        self.put(f"terms{peak} = {self._by_lane(peak, self._bounded(self.nest.steps[peak], 1))}")
        self.put(f"next{peak} = tw.maximum(acc{peak}, tw.max_over(terms{peak}, axis={axis}, keep_dims=False))")
        # A lane that has found only -inf adds zeros.
        self.put(f'shift{peak} = tl.where(next{peak} == float("-inf"), 0.0, next{peak})')
        terms = self._exponential(total, f"terms{peak} - {self._beside_lanes(f'shift{peak}')}")
        scaled = f"acc{total} * {self._exponential(total, f'acc{peak} - shift{peak}')}"
        self.put(f"acc{total} = {scaled} + tl.sum({terms}, axis={axis})")
        self.put(f"acc{peak} = next{peak}")

    def _exponential(self, total: int, of: str) -> str:
        """The function that the terms of the sum `total` are, in the dtype of its accumulator."""
        step: Step = self.nest.steps[self.nest.steps[total].args[0]]
        return self._widened(self.nest.steps[total], expression(step, lambda *_: of, step.dtype))

    # Hints for the cache

    def eviction(self, i: int | None) -> str:
        """Whether a later loop reads the elements of load `i` again; none reads those of a store (None)."""
        if self.stage is None:
            return ""
        if i is not None:
            step = self.nest.steps[i]
            if step.level is not Level.FULL or step.access is None or not step.access.strides[-1]:
                return ""
        again = i is not None and self.last_stages[i] > self.stage
        return f', eviction_policy="evict_{"last" if again else "first"}"'
