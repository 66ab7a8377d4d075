"""Emits a nest as C++ with OpenMP.

Threads share the rows; each stage loops over the columns in a `simd` loop. A stage recomputes cheap values of
an earlier stage and reads expensive ones (the exponentials of a softmax) from a row-sized scratch array. Sums
accumulate in double, because their terms may cancel; sums of nonnegative terms accumulate up to a block in
fp32, then in double. Column sums go to doubles after `ROW_BLOCK` rows, per thread, and are combined in thread
order, so results are reproducible for a given number of threads. Random numbers are drawn before each innermost
loop. A kernel that checks indices reads element 0 in place of one that is out of bounds, and then returns 1.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tilewright.emit.cpp_printer import Printer
from tilewright.emit.cpp_text import (
    COMPUTED,
    STORED,
    combine,
    identity,
    prelude,
    wide,
)
from tilewright.emit.scheduled_loops import ScheduledLoops
from tilewright.loops.nest import Level, Nest, Step, Store
from tilewright.loops.sizes import Size, may_exceed
from tilewright.schedule.cpu import SERIAL, cpu_schedule
from tilewright.schedule.schedule import Schedule

ROW_BLOCK = 32
"""Rows summed in fp32, column by column, before the partial sums are added to doubles."""
CALLED = re.compile(r"\btw_lanes_(\w+)\(")
OF_TWO = frozenset({"pow", "atan2"})
"""Those of `LANES` with two operands."""


def translation_unit(kernels: list[str]) -> str:
    """One source for all kernels of a model, with the random-number and vector functions that they call."""
    draws = any("tw_stream" in kernel for kernel in kernels)
    called = sorted({name for kernel in kernels for name in CALLED.findall(kernel)})
    lanes = [f"TW_LANES{'2' * (name in OF_TWO)}({name})" for name in called]
    headers = ["prelude.h", *["random.h"] * draws, *["libmvec.h"] * bool(called)]
    return "\n".join([*map(prelude, headers), *lanes, *kernels])


def emit_cpp(nest: Nest, schedule: Schedule | None = None) -> str:
    """`extern "C" int NAME(void** buffers, int threads)`; buffers in the nest's order, then the integers that are
    arguments (`loops/sizes.py`); of the chosen schedule unless another is given."""
    return _Kernel(ScheduledLoops(nest, schedule or cpu_schedule(nest))).text()


class _Kernel(Printer):
    def __init__(self, scheduled: ScheduledLoops) -> None:
        super().__init__(scheduled)
        nest = self.nest
        self.column_sums = list(nest.reductions("reduce_rows"))
        self.draws = [i for i, step in enumerate(nest.steps) if step.name == "draw"]
        timed = zip(nest.stores, nest.store_stages(), strict=True)
        self.stores = [(store, stage) for store, stage in timed if not nest.steps[store.value].is_late]
        """The stores inside the loop over rows, each with its stage."""

    def text(self) -> str:
        nest = self.nest
        for number, (buffer, name) in enumerate(zip(nest.buffers, self.pointers, strict=True)):
            const = "const " if number < len(nest.inputs) else ""
            self.put(
                f"{const}{STORED[buffer.dtype]}* const {name} = ({const}{STORED[buffer.dtype]}*)buffers[{number}];"
            )
        if self.hides_zero:
            self.put("const int64_t zero = threads >> 31;")
        if nest.argument_dtypes:
            self.put(f"const int64_t* const sizes = (const int64_t*)buffers[{len(nest.buffers)}];")
            names = (f"n{number} = sizes[{number}]" for number in range(len(nest.argument_dtypes)))
            self.put(f"const int64_t {', '.join(names)};")
        count = nest.row_count * nest.col_count
        if isinstance(count, Size):
            self.put(f"if ({count} < {SERIAL}) threads = 1;")
        if not self.scheduled.schedule.is_shared:
            self.put("threads = 1;")
        if nest.checks:
            self.put("int failed = 0;")
        if self.scheduled.elementwise:
            self._flat()
        else:
            self._rows()
        self.put("return failed;" if nest.checks else "return 0;")
        body = "\n".join(self.lines)
        return f'extern "C" int {nest.name}(void** buffers, int threads) {{\n{body}\n}}\n'

    # Elementwise nests: no stages, no sums; threads share blocks of columns.

    def _flat(self) -> None:
        extent = self.nest.cols[0] if self.nest.cols else 1
        tiled, size = self.scheduled.tiled, self.scheduled.schedule.cols.tile
        is_cut = may_exceed(extent, size)
        loops = len(self.nest.rows) + is_cut
        team = "num_threads(threads) if(threads > 1)"
        if self.draws:
            self.open(f"\n  #pragma omp parallel {team}\n  " if loops else "")
            self._open_streams(size if is_cut else extent)
            if loops:
                self.put(f"#pragma omp for collapse({loops}) schedule(static)")
        elif loops:
            self.put(f"#pragma omp parallel for collapse({loops}) {team} schedule(static)")
        self._open_block(tiled, extent, size if is_cut else None)
        self.begin_checks()
        roots = [store.value for store in self.nest.stores]
        outside = [i for i in self.scheduled.closure(roots, stage=None) if self.scheduled.varies_by_row_only(i)]
        for i in outside:
            self.declare(i)
        self.begin = "block"
        self._draw(self.draws, "end - block")
        inside = [i for i in self.scheduled.closure(roots, stage=None) if i not in outside]
        self.put("#pragma omp simd" + self.checked_in(inside))
        self.open("for (int64_t c0 = block; c0 < end; ++c0)")
        for i in inside:
            self.declare(i)
        for store in self.nest.stores:
            self.store(store.value, store.access)
        self.close()
        self.end_checks()
        if tiled:
            self.close()
        self.close()
        if self.draws:
            self._close_streams()
            self.close()

    def _open_block(self, tiled: bool, extent: int, size: int | None) -> None:
        """Loops over the rows, and over blocks of `size` columns, whose bounds are `block` and `end`."""
        height = self.scheduled.schedule.rows.tile
        for axis, count in enumerate(self.nest.rows[: len(self.nest.rows) - tiled]):
            self.put(f"for (int64_t r{axis} = 0; r{axis} < {count}; ++r{axis})")
        if tiled:
            self.put(f"for (int64_t tile = 0; tile < {self.nest.rows[-1]}; tile += {height})")
        if size is None:
            self.open("")
            self.put(f"const int64_t block = 0, end = {extent};")
        else:
            self.open(f"for (int64_t block = 0; block < {extent}; block += {size})")
            self.put(f"const int64_t end = block + {size} < {extent} ? block + {size} : {extent};")
        if tiled:
            row, count = f"r{len(self.nest.rows) - 1}", self.nest.rows[-1]
            self.put(f"const int64_t tile_end = tile + {height} < {count} ? tile + {height} : {count};")
            self.open(f"for (int64_t {row} = tile; {row} < tile_end; ++{row})")

    # Nests with reductions.

    def _rows(self) -> None:
        nest = self.nest
        width = nest.col_count
        in_parts = [i for i, step in self.column_sums if self.scheduled.sums_in_row_blocks(step)]
        self._open_sums(in_parts)
        for i in sorted(self.scheduled.kept):
            kind = COMPUTED[nest.steps[i].dtype]
            self.put(f"{kind}* const kept{i} = ({kind}*)__builtin_malloc(sizeof({kind}) * {width});")
        self._open_streams(nest.cols[-1])
        if in_parts:
            self.put("int64_t rows_in_part = 0;")
        if nest.rows:
            # The static schedule gives each thread consecutive rows, so column sums are reproducible.
            self.put(f"#pragma omp for collapse({len(nest.rows)}) schedule(static)")
            for axis, size in enumerate(nest.rows):
                self.put(f"for (int64_t r{axis} = 0; r{axis} < {size}; ++r{axis})")
        self.open("")
        self.begin_checks()
        for stage in range(nest.stages + 1):
            self._stage(stage)
        self.end_checks()
        self._flush_parts(in_parts, last=False)
        self.close()
        self._flush_parts(in_parts, last=True)
        for name in (*(f"kept{i}" for i in sorted(self.scheduled.kept)), *(f"part{i}" for i in in_parts)):
            self.put(f"__builtin_free({name});")
        self._close_streams()
        self.close()
        self._after()
        for i, _ in self.column_sums:
            self.put(f"__builtin_free(all{i});")

    def _open_sums(self, in_parts: Sequence[int]) -> None:
        """Open the threads, each with a total of every column sum, and with a part of those `in_parts`."""
        width = self.nest.col_count
        sums = [(i, step, width if step.level is Level.COL else 1) for i, step in self.column_sums]
        for i, step, count in sums:
            kind = self.scheduled.sum_type(step)
            self.put(f"{kind}* const all{i} = ({kind}*)__builtin_malloc(sizeof({kind}) * {count} * threads);")
            start = identity(step.kind or "", step.dtype)
            self.put(f"for (int64_t i = 0; i < {wide(count)} * threads; ++i) all{i}[i] = {start};")
        self.open("\n  #pragma omp parallel num_threads(threads) if(threads > 1)\n  ")
        self.put("const int thread = threads > 1 ? omp_get_thread_num() : 0;")
        for i, step, count in sums:
            self.put(f"{self.scheduled.sum_type(step)}* const total{i} = all{i} + {wide(count)} * thread;")
            if i in in_parts:
                self.put(f"float* const part{i} = (float*)__builtin_malloc(sizeof(float) * {width});")
                self.put(f"for (int64_t c = 0; c < {width}; ++c) part{i}[c] = 0;")

    def _flush_parts(self, parts: Sequence[int], last: bool) -> None:
        if not parts:
            return
        if not last:
            self.open(f"if (++rows_in_part == {ROW_BLOCK})")
            self.put("rows_in_part = 0;")
        for i in parts:
            self.put("#pragma omp simd")
            self.put(
                f"for (int64_t c = 0; c < {self.nest.col_count}; ++c) {{ total{i}[c] += part{i}[c]; part{i}[c] = 0; }}"
            )
        if not last:
            self.close()

    def _stage(self, stage: int) -> None:
        """Compute the row values available at this stage, then loop over the columns."""
        nest = self.nest
        for i, step in enumerate(nest.steps):
            if step.where == "body" and step.stage == stage and step.level in (Level.ROW, Level.SCALAR):
                if step.name == "reduce_rows":
                    self.put(f"total{i}[0] = {combine(step.kind or '', f'total{i}[0]', f'v{step.args[0]}')};")
                elif step.name != "reduce_cols":
                    self.declare(i)
        for store, known in self.stores:
            if known == stage and not self.nest.covers_columns(store.access):
                self.store(store.value, store.access)
        self._loop_over_columns(stage)

    def _loop_over_columns(self, stage: int) -> None:
        nest = self.nest
        col_reductions = [(i, s) for i, s in nest.reductions("reduce_cols") if s.stage == stage]
        row_reductions = [(i, s) for i, s in self.column_sums if s.stage == stage and s.level is Level.COL]
        stores = [s for s, known in self.stores if known == stage and self.nest.covers_columns(s.access)]
        keep = [i for i in sorted(self.scheduled.kept) if nest.steps[i].stage == stage]
        roots = [s.args[0] for _, s in col_reductions + row_reductions] + [s.value for s in stores] + keep
        if not roots:
            return
        for i, step in col_reductions:
            self.put(f"{self.scheduled.sum_type(step)} total{i} = {identity(step.kind or '', step.dtype)};")
        for axis, size in enumerate(nest.cols[:-1]):
            self.open(f"for (int64_t c{axis} = 0; c{axis} < {size}; ++c{axis})")
        last, extent = len(nest.cols) - 1, nest.cols[-1]
        size = self.scheduled.schedule.cols.tile
        blocked = may_exceed(extent, size) and any(
            s.kind == "sum" and self.scheduled.accumulator_type(s) == "float" for _, s in col_reductions
        )
        if blocked:
            self.open(f"for (int64_t block = 0; block < {extent}; block += {size})")
            self.put(f"const int64_t end = block + {size} < {extent} ? block + {size} : {extent};")
        self._inner(last, "block" if blocked else "0", "end" if blocked else str(extent), roots, stage,
                    col_reductions, row_reductions, stores, keep)  # fmt: skip
        if blocked:
            self.close()
        for _ in nest.cols[:-1]:
            self.close()
        for i, step in col_reductions:
            self.put(f"const {COMPUTED[step.dtype]} v{i} = ({COMPUTED[step.dtype]})total{i};")

    def _inner(
        self, axis: int, begin: str, end: str, roots: list[int], stage: int, col_reductions: list[tuple[int, Step]],
        row_reductions: list[tuple[int, Step]], stores: list[Store], keep: list[int],
    ) -> None:  # fmt: skip
        clauses = []
        for i, step in col_reductions:
            clauses += self._accumulator(i, step)
        needed = self.scheduled.closure(roots, stage=stage)
        self.begin = begin
        self._draw(
            [i for i in self.draws if i in needed and not self.scheduled.kept_before(i, stage)], f"{end} - {begin}"
        )
        self.put("#pragma omp simd" + "".join(f" reduction({c})" for c in clauses) + self.checked_in(needed))
        self.open(f"for (int64_t c{axis} = {begin}; c{axis} < {end}; ++c{axis})")
        for i in needed:
            self.declare(i, kept=self.scheduled.kept_before(i, stage))
        for i in keep:
            self.put(f"kept{i}[{self.column()}] = v{i};")
        for i, step in col_reductions:
            self._accumulate(i, step)
        for i, step in row_reductions:
            target = f"{'part' if self.scheduled.sums_in_row_blocks(step) else 'total'}{i}[{self.column()}]"
            self.put(f"{target} = {combine(step.kind or '', target, f'v{step.args[0]}')};")
        for store in stores:
            self.store(store.value, store.access)
        self.close()
        for i, step in col_reductions:
            dirty = f"nan{i} ? {'TW_NAN'} : acc{i}" if self.scheduled.tracks_nan(step) else f"acc{i}"
            self.put(
                f"total{i} = {combine(step.kind or '', f'total{i}', f'({self.scheduled.sum_type(step)})({dirty})')};"
            )

    # Random numbers: `random.h` positions a thread's stream at its first element and reads on from there.

    def _open_streams(self, room: int) -> None:
        """A copy of the stream for each thread, and a buffer for the draws of one innermost loop (`room` elements)."""
        for i in self.draws:
            self.put(f"tw_stream stream{i};")
            self.put(f"stream{i}.block = -1;")
            self.put(f"uint8_t* const drawn{i} = (uint8_t*)__builtin_malloc({room});")

    def _close_streams(self) -> None:
        for i in self.draws:
            self.put(f"__builtin_free(drawn{i});")

    def _draw(self, steps: list[int], count: str) -> None:
        """Draw for the next innermost loop."""
        for i in steps:
            step = self.nest.steps[i]
            assert step.access and step.strides
            first = self.index(step.strides, innermost=self.begin)
            saved = self.pointers[step.access.buffer]
            self.put(f"tw_draw(&stream{i}, {saved}, {first}, {count}, {step.constant}L, drawn{i});")

    def _accumulator(self, i: int, step: Step) -> list[str]:
        kind = "int32_t" if step.dtype == "bool" else self.scheduled.accumulator_type(step)
        self.put(f"{kind} acc{i} = {identity(step.kind or '', step.dtype)};")
        symbol = dict(sum="+", prod="*", max="max", min="min", any="|", all="&")[step.kind or ""]
        if not self.scheduled.tracks_nan(step):
            return [f"{symbol}:acc{i}"]
        self.put(f"{'int64_t' if step.dtype == 'float64' else 'int32_t'} nan{i} = 0;")
        return [f"{symbol}:acc{i}", f"|:nan{i}"]

    def _accumulate(self, i: int, step: Step) -> None:
        value = f"v{step.args[0]}"
        if step.kind in ("max", "min"):
            self.put(f"acc{i} = {value} {'>' if step.kind == 'max' else '<'} acc{i} ? {value} : acc{i};")
            if self.scheduled.tracks_nan(step):
                self.put(f"nan{i} |= {value} != {value};")
        else:
            self.put(f"acc{i} = {combine(step.kind or '', f'acc{i}', value)};")

    def _after(self) -> None:
        """Combine the threads' column sums and compute the steps that depend on them."""
        nest = self.nest
        late = nest.late_stores
        if not late:
            return
        covers_columns = any(self.nest.covers_columns(s.access) for s in late)
        for axis, size in enumerate(nest.cols):
            self.open(f"for (int64_t c{axis} = 0; c{axis} < {size if covers_columns else 1}; ++c{axis})")
        self.begin_checks()
        for i in self.scheduled.closure([s.value for s in late], stage=None):
            step = nest.steps[i]
            if step.name != "reduce_rows":
                self.declare(i)
                continue
            count, at = (nest.col_count, self.column()) if step.level is Level.COL else (1, "0")
            self.put(f"{self.scheduled.sum_type(step)} w{i} = all{i}[{at}];")
            gathered = combine(step.kind or "", f"w{i}", f"all{i}[{wide(count)} * t + {at}]")
            self.put(f"for (int t = 1; t < threads; ++t) w{i} = {gathered};")
            self.put(f"const {COMPUTED[step.dtype]} v{i} = ({COMPUTED[step.dtype]})w{i};")
        for store in late:
            self.store(store.value, store.access)
        self.end_checks()
        for _ in nest.cols:
            self.close()
