"""Generated Triton kernels: loaded from source, launched with block sizes that suit the nest.

On a GPU they are compiled for its architecture; with `TRITON_INTERPRET=1` set before Triton is first
imported they run on CPU tensors, one program after another, which is for tests.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

import torch

from tilewright.emit.triton_schedule import REGISTERS, TritonSchedule, power_of_two
from tilewright.loops.nest import Level, Nest
from tilewright.records import cache
from tilewright.records.errors import CompilerError, warn_once
from tilewright.runtime.executable import Slots, TensorSpec
from tilewright.runtime.launch import EXTENSION, WARP, Kernel, Run, bound

TILE = 1024
"""Elements of a block on a GPU: eight for each thread of four warps."""
INTERPRETED_TILE = 16384
"""The interpreter's time goes by programs and operations, hardly by elements."""
LONG_BLOCK = 2048
"""Columns that a program takes at once from a row too long to hold."""
WAVES = 2
"""Programs for each multiprocessor where each owns a strip of rows."""
MOST_AHEAD = 2
"""Tiles of a strip on their way while a program is at one, if shared memory holds them; one if registers are few."""
SHARED_BYTES = 100 * 1024
"""Of an H200's shared memory, a little less than half, so that a multiprocessor holds two programs."""
LEAST_SHARED_BYTES = 48 * 1024
"""What every program may have; PyTorch does not tell for AMD's."""
REDUCTION_BYTES = 32 * 1024
"""Of it, what a program's reductions and changes of layout may take beside its tiles."""
COLUMN_REGISTERS = 200
"""Of a thread, for what it keeps of its columns."""
ALIGNED = 16
"""Bytes; Triton compiles a kernel anew for pointers that are no multiples of it."""


@dataclass(frozen=True)
class _Compiled:
    """A kernel as Triton made it for one device, and what follows the pointers when it is launched."""

    kernel: Any
    programs: int
    constants: tuple[int, ...]

    def launch(self, pointers: Sequence[int], stream: int) -> None:
        """Without Triton's own look at every argument, which costs the host more than the launch.

        The kernel was compiled for pointers that are multiples of `ALIGNED`.
        """
        # `run` loads the kernel, and only then `function` is there.
        run = self.kernel.run
        known = (self.kernel.function, self.kernel.packed_metadata, None, None, None)
        run(self.programs, 1, 1, stream, *known, *pointers, *self.constants)

    def bare(self) -> Kernel | None:
        """The kernel without Triton around it; None where its launch takes more than pointers."""
        _ = self.kernel.run
        meta = self.kernel.metadata
        more = meta.global_scratch_size, meta.profile_scratch_size, meta.launch_cooperative_grid, meta.launch_pdl
        if any(more) or meta.num_ctas != 1:
            return None
        return Kernel(self.kernel.function, self.programs, WARP * meta.num_warps, meta.shared)


@dataclass(frozen=True)
class Launch:
    """How many programs run, over which blocks. Sizes are named as the kernel's parameters are."""

    programs: int
    sizes: dict[str, int]
    warps: int
    after_programs: int = 0
    after_sizes: dict[str, int] | None = None
    scratch: tuple[tuple[int, str], ...] = ()
    """Elements and dtype of each buffer between the first kernel and the second."""


def plan(nest: Nest, processors: int, tile: int = TILE, shared_bytes: int = SHARED_BYTES) -> Launch:
    """Block sizes for a device of so many multiprocessors; `tile` is the elements of a block.

    `shared_bytes`: what tiles on their way may take of a program's shared memory.
    """
    schedule = TritonSchedule(nest)
    rows, columns = nest.row_count, nest.col_count
    if schedule.kind == "flat":
        block = min(power_of_two(columns), tile)
        return Launch(-(-columns // block), {"BLOCK": block}, 4)
    if schedule.kind == "tiles":
        block_cols = min(power_of_two(columns), 64 if _transposes(nest) else tile)
        block_rows = min(power_of_two(rows), max(tile // block_cols, 1))
        programs = -(-rows // block_rows) * -(-columns // block_cols)
        return Launch(programs, {"BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols}, 4)
    if schedule.sums:
        return _in_strips(nest, schedule, processors, tile, shared_bytes)
    block_cols = power_of_two(columns) if schedule.whole_row else LONG_BLOCK
    block_rows = min(power_of_two(rows), max(tile // block_cols, 1))
    warps = min(max(block_rows * block_cols // 512, 4), 16)
    return Launch(-(-rows // block_rows), {"BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols}, warps)


def _in_strips(nest: Nest, schedule: TritonSchedule, processors: int, tile: int, shared_bytes: int) -> Launch:
    """Column sums: each program walks a strip of rows, the next tiles on their way while it is at one.

    H200, bf16, 16384 rows: the derivative of GELU and its sums, 8192 columns, 223 us (192 at the bandwidth of copies),
    by whole rows one at a time 361; that of layer norm, 2048 columns, 86 us (64), in tiles of one row 110, one at a
    time 151.
    """
    rows, columns = nest.row_count, nest.col_count
    wide = power_of_two(columns) if schedule.whole_row else LONG_BLOCK
    block_cols = min(wide, tile) if schedule.splits_columns else wide
    # Two rows share the barriers of one reduction.
    block_rows = min(power_of_two(rows), max(4 * tile // block_cols, 1 if block_cols > 4 * tile else 2))
    elements = block_rows * block_cols
    # 32 elements a thread, or as many columns as it has registers for.
    warps = max(
        elements // (32 * WARP),
        power_of_two(-(-block_cols * schedule.registers_per_column // (COLUMN_REGISTERS * WARP))),
        1,
    )
    across = -(-columns // block_cols) if schedule.splits_columns else 1
    tiles = -(-rows // block_rows)
    strip = -(-tiles // min(tiles, max(WAVES * processors // across, 1)))
    strips = -(-tiles // strip)
    loads = [nest.buffers[s.access.buffer] for s in nest.steps if s.access and s.level is Level.FULL]
    on_their_way = elements * sum(getattr(torch, b.dtype).itemsize for b in loads)
    most = MOST_AHEAD if wide * schedule.registers_per_column <= REGISTERS or schedule.splits_columns else 1
    ahead = 1 + min(most, shared_bytes // max(on_their_way, 1)) if schedule.whole_row else 1
    after = {
        "PARTS": strips,
        "BLOCK_PARTS": min(power_of_two(strips), 128),
        "BLOCK_COLS": min(power_of_two(columns), 16),
    }
    after_programs = -(-columns // after["BLOCK_COLS"]) if schedule.late_columns else 1
    sizes = {"BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols, "TILES": strip, "AHEAD": ahead}
    scratch = tuple(schedule.scratch_size(i, strips) for i in schedule.scratch)
    return Launch(strips * across, sizes, min(warps, 16), after_programs, after, scratch)


def _transposes(nest: Nest) -> bool:
    """Whether something that varies with rows and columns lies along the rows."""
    accesses = [s.access for s in nest.steps if s.access and s.level is Level.FULL] + [s.access for s in nest.stores]
    parts = [nest.split(access.strides) for access in accesses]
    return any(1 in rows and 1 not in cols for rows, cols in parts)


class TritonKernel:
    """One nest, ready to launch.

    Raises CompilerError where Triton is missing or rejects the source, CacheError where the source
    cannot be kept on disk (Triton reads it from there).
    """

    def __init__(self, nest: Nest, source: str) -> None:
        self.nest = nest
        self.source = source
        module = _module(source)
        self.main = getattr(module, nest.name)
        self.after = getattr(module, f"{nest.name}_after", None)
        self.allows_fma = TritonSchedule(nest).allows_fma
        self._plans: dict[torch.device, Launch] = {}
        self._compiled: dict[torch.device, list[_Compiled]] = {}

    def plan(self, device: torch.device) -> Launch:
        """How the kernel is launched on `device`."""
        if device not in self._plans:
            if device.type == "cuda":
                found = torch.cuda.get_device_properties(device)
                most = getattr(found, "shared_memory_per_block_optin", LEAST_SHARED_BYTES)
                shared_bytes = max(min(SHARED_BYTES, most - REDUCTION_BYTES), 0)
                self._plans[device] = plan(self.nest, found.multi_processor_count, TILE, shared_bytes)
            else:
                self._plans[device] = plan(self.nest, 2, INTERPRETED_TILE)
        return self._plans[device]

    def compile(self, device: torch.device) -> None:
        """Compile for `device` now rather than at the first launch; a failure raises CompilerError."""
        if interpreted() or device.type != "cuda":
            return
        chosen = self.plan(device)
        dtypes = [getattr(torch, b.dtype) for b in self.nest.buffers] + [getattr(torch, d) for _, d in chosen.scratch]
        try:
            with torch.cuda.device(device):
                self._compiled[device] = self._run(chosen, dtypes, lambda kernel, _: partial(kernel.warmup, grid=(1,)))
        except Exception as error:  # Triton, LLVM and ptxas each raise their own
            raise CompilerError(f"Triton failed on {self.nest.name}: {error}") from error

    def launch(self, tensors: Sequence[torch.Tensor], chosen: Launch | None = None) -> None:
        """Run over one tensor for each buffer of the nest, in order, all on one device."""
        device = tensors[-1].device
        if device.type != "cuda" and not interpreted():
            raise CompilerError("CPU tensors need TRITON_INTERPRET=1 set before Triton is first imported")
        compiled = self._compiled.get(device) if chosen is None else None
        chosen = chosen or self.plan(device)
        scratch = [torch.empty(n, dtype=getattr(torch, d), device=device) for n, d in chosen.scratch]
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._run(chosen, [*tensors, *scratch], lambda kernel, programs: kernel[(programs,)])
        elif compiled is None or not _launched(compiled, [t.data_ptr() for t in (*tensors, *scratch)], device.index):
            self._run(chosen, [*tensors, *scratch], lambda kernel, programs: kernel[(programs,)])

    def is_compiled(self, device: torch.device) -> bool:
        """Whether it was compiled ahead for `device`."""
        return device in self._compiled

    def bare(self, device: torch.device) -> list[Kernel] | None:
        """What was compiled ahead for `device`, for who launches it without Triton; None where Triton must."""
        with torch.cuda.device(device):
            made = [compiled.bare() for compiled in self._compiled[device]]
        return [kernel for kernel in made if kernel] if all(made) else None

    def _run(
        self, chosen: Launch, pointers: Sequence[object], on: Callable[[Any, int], Callable[..., object]]
    ) -> list[_Compiled]:
        """Hand each kernel its arguments through `on`; what comes back is the kernel that fits them."""
        calls = [(self.main, chosen.programs, chosen.sizes, chosen.warps)]
        if self.after is not None and chosen.after_sizes is not None:
            calls.append((self.after, chosen.after_programs, chosen.after_sizes, 4))
        done = []
        for kernel, programs, sizes, warps in calls:
            constants = {name: sizes[name] for name in kernel.arg_names[len(pointers) :]}
            fitting = on(kernel, programs)(*pointers, **constants, num_warps=warps, enable_fp_fusion=self.allows_fma)
            done.append(_Compiled(fitting, programs, tuple(constants.values())))
        return done


def _launched(kernels: Sequence[_Compiled], pointers: Sequence[int], device: int) -> bool:
    """Launch what was compiled ahead; False where it does not fit these pointers, or somebody watches launches."""
    if _watched() or any([pointer % ALIGNED for pointer in pointers]):
        return False
    stream = _triton()[1].active.get_current_stream(device)
    for kernel in kernels:
        kernel.launch(pointers, stream)
    return True


def _watched() -> bool:
    """Whether somebody asked Triton to be told of launches."""
    runtime, _ = _triton()
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@functools.cache
def _triton() -> tuple[Any, Any]:
    """Triton's settings and its driver: an import costs the host a microsecond, even of what is loaded."""
    from triton import knobs
    from triton.runtime import driver

    return knobs.runtime, driver


@dataclass
class TritonStep:
    """One Triton kernel among the steps of an executable."""

    generated: ClassVar[bool] = True
    name: str
    kernel: TritonKernel
    inputs: tuple[int, ...]
    outputs: tuple[tuple[int, TensorSpec, int | None], ...]
    """Slot, layout, and the slot whose storage it takes over (or None)."""
    device: torch.device
    elsewhere: tuple[int, ...] = ()
    """Inputs, by their place, that are on the CPU beside operands on a GPU, as a 0-d tensor may be."""
    frees: tuple[int, ...] = ()
    _native: Run | None = field(default=None, init=False, repr=False)
    _is_bound: bool = field(default=False, init=False, repr=False)

    def run(self, slots: Slots) -> None:
        if not self._is_bound:
            self._bind()
        if self._native is not None and not _watched() and self._native(slots):
            return
        tensors = [slots[i] for i in self.inputs]
        for place in self.elsewhere:
            tensors[place] = tensors[place].to(self.device)
        for slot, spec, over in self.outputs:
            slots[slot] = self._empty(spec) if over is None else spec.over(slots[over])
            tensors.append(slots[slot])
        self.kernel.launch(tensors)

    def _bind(self) -> None:
        """Go over to C++ once that is built, where the kernels were compiled ahead and take nothing else."""
        ahead = self.kernel.is_compiled(self.device) and not self.elsewhere
        module = EXTENSION.module() if ahead else None
        if module is not None and (kernels := self.kernel.bare(self.device)):
            scratch = [(n, getattr(torch, dtype)) for n, dtype in self.kernel.plan(self.device).scratch]
            try:
                self._native = bound(module, self.device, kernels, self.inputs, self.outputs, scratch)
            except CompilerError as error:
                warn_once(f"compiled models cost the host more in Python: {error}")
        self._is_bound = module is not None or not ahead

    def _empty(self, spec: TensorSpec) -> torch.Tensor:
        return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype, device=self.device)


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter in this process."""
    import triton

    return bool(triton.knobs.runtime.interpret)


@functools.cache
def _module(source: str) -> ModuleType:
    """The module of `source`, imported from a file in the cache. A damaged file is written again."""
    if importlib.util.find_spec("triton") is None:
        raise CompilerError("Triton is not installed")
    key = cache.key_of(source)
    path = cache.build(key, ".py", lambda out: out.write_text(source))
    if path.read_text() != source:
        cache.discard(path)
        path = cache.build(key, ".py", lambda out: out.write_text(source))
    spec = importlib.util.spec_from_file_location(f"tilewright_kernel_{key}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
