"""A kernel taken apart without a GPU, against what its source says it does."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilewright.anatomy.capture import NothingCaptured, TritonLaunch, capturing
from tilewright.anatomy.kernel_views import Request, kernel_views
from tilewright.anatomy.simulated import CUDA, simulated
from tilewright.anatomy.tiles import grid_rule, rule_text
from tilewright.hardware.geometry import KernelView, tiles_of
from tilewright.hardware.profiles import profile_for
from tilewright.pytorch.compiler import keeping_code
from tilewright.records.errors import TargetError, UsageError
from tilewright.records.launch_record import Access

KERNELS = str(Path(__file__).with_name("kernels.py"))
H200 = "h200"


def view(kernel: str, **asked: object) -> KernelView:
    ((_, (found,)),) = kernel_views(Request(f"{KERNELS}:{kernel}", on=asked.pop("on", H200), **asked))  # type: ignore[arg-type]
    return found


@pytest.fixture(scope="module")
def weighted() -> KernelView:
    return view("weighted")


@pytest.fixture(scope="module")
def product() -> KernelView:
    return view("product", launch="launch_product")


def test_the_weighted_sum_has_63_programs_of_8_tiles(weighted: KernelView) -> None:
    assert (weighted.launch.grid, weighted.grid_rule) == ((63, 1, 1), "⌈1,000 / ROWS 16⌉")
    assert [walk.program[0] for walk in weighted.walks] == [0, 1, 61, 62]
    for walk in weighted.walks:
        first = 16 * walk.program[0]
        last = min(first + 15, 999)
        expected = []
        for column in range(0, 512, 64):
            tile = ((first, last), (column, column + 63))
            expected.append(Access("x", "read", tile, (last - first + 1) * 64, 16 * 64, (16, 64)))
            expected.append(Access("w", "read", ((column, column + 63),), 64, 64, (64,)))
        expected.append(Access("out", "write", ((first, last),), last - first + 1, 16, (16,)))
        assert list(walk.accesses) == expected
        assert tiles_of(walk) == 8
        # Row r of x begins at element 512·r; the loads and the store stand in lines 8, 9 and 11 of the kernel.
        tiles = [((512 * first + column, 512 * last + column + 63), 8) for column in range(0, 512, 64)]
        weights = [((column, column + 63), 9) for column in range(0, 512, 64)]
        placed = [each for pair in zip(tiles, weights, strict=True) for each in pair] + [((first, last), 11)]
        assert [(access.offsets, access.line) for access in walk.accesses] == placed


def test_the_machine_code_is_read(weighted: KernelView) -> None:
    launch, instructions = weighted.launch, weighted.instructions
    assert (launch.language, launch.threads, launch.capability) == ("triton", 128, "9.0")
    assert launch.place.startswith(f"{Path(KERNELS).relative_to(Path.cwd())}:")
    assert launch.source.startswith("@triton.jit\ndef weighted(")
    assert ".target sm_90a" in launch.ptx and "LDG.E.128" in launch.sass
    assert instructions is not None and instructions.spills == launch.stack_bytes == 0
    # 16 tiles of 64 fp32 over 128 threads are 32 bytes a thread; the sum of a row leaves one value each.
    assert instructions.widths("global", "load") == {16: 3}
    assert instructions.widths("global", "store") == {4: 1}
    assert weighted.occupancy is not None and weighted.waves is not None
    assert weighted.waves.slots == 132 * weighted.occupancy.blocks
    assert weighted.launch.measured_us is None


def test_other_tiles_are_laid_out(weighted: KernelView) -> None:
    rows = {tuple(other.change.items()): other for other in weighted.alternatives}
    found = {change: (other.launch.programs, other.tiles) for change, other in rows.items() if other.launch}
    assert found == {
        (("ROWS", 32),): (32, 8),
        (("ROWS", 8),): (125, 8),
        (("COLUMNS", 128),): (63, 4),
        (("COLUMNS", 32),): (63, 16),
        (("num_warps", 8),): (63, 8),
        (("num_warps", 2),): (63, 8),
    }
    wider = rows[(("num_warps", 8),)]
    assert wider.launch is not None and wider.launch.threads == 256


def test_a_product_is_walked_along_k_and_owns_a_tile_of_c(product: KernelView) -> None:
    assert product.launch.grid == (8, 32, 1)
    assert product.grid_rule == "⌈1,000 / BLOCK_M 128⌉, ⌈4,096 / BLOCK_N 128⌉"
    walks = {walk.program: walk for walk in product.walks}
    assert set(walks) == {(0, 0, 0), (1, 0, 0), (0, 1, 0), (6, 31, 0), (7, 31, 0)}
    for (down, across, _), walk in walks.items():
        rows = (128 * down, min(128 * down + 127, 999))
        columns = (128 * across, 128 * across + 127)
        reads = [access.ranges for access in walk.accesses if access.operand == "a"]
        assert reads == [(rows, (k, k + 63)) for k in range(0, 256, 64)]
        (written,) = [access.ranges for access in walk.accesses if access.direction == "write"]
        assert written == (rows, columns)


def test_matrix_instructions_follow_the_architecture(product: KernelView) -> None:
    assert product.instructions is not None
    assert product.instructions.matrix and all(name.startswith("HGMMA") for name in product.instructions.matrix)
    ampere = view("product", launch="launch_product", on="a100", code_only=True)
    assert ampere.instructions is not None and ampere.launch.capability == "8.0"
    assert ampere.instructions.matrix.keys() == {"HMMA.16816.F32.BF16"}
    assert ampere.waves is not None and ampere.waves.sms == 108


def test_a_tile_that_leaves_work_undone_is_refused() -> None:
    """Indices are those of zeros, so the gather reads one element; its stores still show what is owned."""
    found = view("gathered", launch="launch_gathered")
    (walk,) = found.walks
    assert [access.ranges for access in walk.accesses] == [((0, 4095),), ((0, 0),), ((0, 4095),)]
    by_change = {other.change.get("BLOCK"): other.refused for other in found.alternatives}
    assert by_change[2048] == "with these tiles the same grid covers only 50% of the work"
    assert by_change[8192] == ""


def test_a_kernel_that_leaves_its_tensors_is_not_drawn() -> None:
    found = view("past_the_end", launch="launch_past_the_end")
    assert found.walks == ()
    assert found.notes[0] == "its programs are not drawn: a program accesses memory outside the launch's tensors"


def test_gluon_is_read_and_not_drawn() -> None:
    found = view("read_shared", launch="launch_read_shared")
    assert found.launch.language == "gluon" and found.walks == ()
    assert found.notes[0] == "its programs are not drawn: a Gluon kernel cannot be interpreted"
    # Eight tiles of 16 bytes a thread, four programs of 256 threads and 32 KiB on a multiprocessor.
    assert found.instructions is not None and found.instructions.widths("shared", "load") == {16: 8}
    assert found.launch.shared_bytes == 32 * 1024


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc, which is not on PATH")
def test_a_cuda_kernel_of_the_user() -> None:
    path = str(Path(KERNELS).with_name("scale.cu"))
    ((name, (found,)),) = kernel_views(Request(f"{path}:scale", on=H200, grid="1000", threads=256))
    assert (name, found.launch.language, found.launch.programs) == ("scale", "cuda", 1000)
    assert found.launch.place.endswith("scale.cu:2")
    assert found.launch.shared_bytes == 4 * 256
    assert found.instructions is not None
    assert found.instructions.widths("global", "load") == {16: 1}
    assert found.instructions.widths("global", "store") == {16: 1, 4: 1}
    assert ".target sm_90" in found.launch.ptx
    # 2048 threads of a multiprocessor are eight blocks of 256, and registers do not stand in their way.
    assert found.occupancy is not None and found.occupancy.blocks == 8
    with pytest.raises(TargetError, match="has 0 kernels named 'scales'; its kernels: _Z5scale"):
        kernel_views(Request(f"{path}:scales", on=H200, grid="1", threads=32))
    with pytest.raises(UsageError, match="--grid and --threads"):
        kernel_views(Request(f"{path}:scale", on=H200))
    with pytest.raises(UsageError, match="grid '1,1,1,1' is not"):
        kernel_views(Request(f"{path}:scale", on=H200, grid="1,1,1,1", threads=32))


def test_an_operator_of_the_catalogue() -> None:
    asked = Request("weighted_sum", ("1000x512",), impl="tilewright-16x64", on=H200, code_only=True)
    ((subject, (found,)),) = kernel_views(asked)
    assert subject == "weighted_sum 1000x512 bf16 fwd tilewright-16x64"
    assert found.launch.programs == 63 and {"16", "64"} <= set(found.launch.constants.values())
    assert [operand.shape for operand in found.launch.operands] == [(1000, 512), (512,), (1000,)]


def test_backward_alone_is_shown() -> None:
    ((_, views),) = kernel_views(Request("weighted_sum", ("64x512",), direction="bwd", on=H200, code_only=True))
    assert "forward" not in {found.launch.name for found in views} and views


@pytest.mark.parametrize(
    ("asked", "error", "told"),
    [
        ({"target": f"{KERNELS}:weighted", "on": "h300"}, UsageError, "no profile of a device named 'h300'"),
        ({"target": f"{KERNELS}:weighted", "on": "cpu"}, UsageError, "for NVIDIA's GPUs, which cpu is not"),
        ({"target": f"{KERNELS}:weighted", "launch": "start"}, TargetError, "--launch NAME, default launch"),
        ({"target": f"{KERNELS}:weighted", "launch": "launch_badly"}, TargetError, "ValueError: no such size"),
        ({"target": f"{KERNELS}:weighted", "launch": "launch_nothing"}, NothingCaptured, "launches no Triton"),
        ({"target": f"{KERNELS}:weighted", "sizes": ("3x4",)}, UsageError, "sizes are for operators"),
        ({"target": "weighted_sum", "sizes": ("3x4x5",)}, UsageError, "'3x4x5' is not of the form NxN"),
        ({"target": "weighted_sum", "impl": "mine"}, UsageError, "no implementation 'mine' of weighted_sum"),
        ({"target": "weighted_sum", "dtype": "f99"}, UsageError, "no dtype 'f99'"),
        ({"target": "weighted_sum", "direction": "up"}, UsageError, "no direction 'up'"),
        ({"target": "weighted_sum", "impl": "torch", "on": "h200"}, UsageError, "can be recorded only on a GPU"),
        ({"target": "matmul", "impl": "cublas", "on": "h200"}, UsageError, "can be recorded only on a GPU"),
        ({"target": "examples/manual_gelu.py:case", "impl": "cublas"}, UsageError, "no implementation 'cublas'"),
    ],
)
def test_failures_say_what_to_do(asked: dict[str, object], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        kernel_views(Request(**({"on": H200} | asked)))  # type: ignore[arg-type]


def test_the_device_is_simulated_only_inside() -> None:
    before = torch.cuda.is_available()
    with simulated(profile_for("a100"), "8.0"):
        x = torch.randn(3, 4, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        assert (x.device, x.is_cuda, x.is_cpu, x.get_device()) == (CUDA, True, False, 0)
        assert x.t().contiguous().stride() == (3, 1) and not x.any()
        assert torch.empty_like(x, device=CUDA).cuda().to("cuda:0").device == CUDA
        (x * 2).sum().backward()
        assert x.grad is not None and x.grad.device == CUDA
        assert torch.cuda.get_device_properties(x.device).multi_processor_count == 108
        assert torch.cuda.get_device_capability() == (8, 0)
    assert x.device.type == "cpu" and torch.cuda.is_available() == before


def test_the_interpreter_s_switch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    with pytest.raises(UsageError, match="TRITON_INTERPRET=1 keeps Triton from compiling"), capturing(run=False):
        pass


MATRICES = {"a": (1024, 512), "b": (512, 1024), "c": (1024, 1024)}


def captured(
    shapes: Mapping[str, tuple[int, ...]], grid: tuple[int, int, int], numbers: Mapping[str, int], **tiles: Any
) -> TritonLaunch:
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    arguments = {**tensors, **numbers, **tiles}
    params = [SimpleNamespace(name=name, is_constexpr=name in tiles) for name in arguments]
    return TritonLaunch(SimpleNamespace(params=params), arguments, {}, grid, None, None)


@pytest.mark.parametrize(
    ("shapes", "grid", "numbers", "tiles", "rule"),
    [
        ({"x": (1000, 512)}, (63, 1, 1), {}, {"ROWS": 16, "COLUMNS": 64}, "⌈1,000 / ROWS 16⌉"),
        ({"x": (100, 5000)}, (100, 1, 1), {}, {"LOG": True, "ROWS": 1, "COLUMNS": 8192}, "⌈100 / ROWS 1⌉"),
        ({"x": (64, 4096)}, (128, 1, 1), {}, {"BLOCK": 2048}, "⌈262,144 / BLOCK 2048⌉"),
        # All in one axis, and an accident of the inner size that fits as well: the result's axes are taken.
        (
            MATRICES,
            (32, 1, 1),
            {},
            {"ROWS": 128, "COLUMNS": 256, "DEPTH": 64},
            "⌈1,024 / ROWS 128⌉ · ⌈1,024 / COLUMNS 256⌉",
        ),
        (MATRICES, (8, 8, 1), {}, {"M": 128, "N": 128, "K": 64}, "⌈1,024 / M 128⌉, ⌈1,024 / N 128⌉"),
        ({"q": (8, 12, 500, 64)}, (96, 4, 1), {}, {"BLOCK": 128}, "8 · 12, ⌈500 / BLOCK 128⌉"),
        ({"x": (7,)}, (6, 1, 1), {"n": 333}, {"BLOCK": 64}, "⌈333 / BLOCK 64⌉"),
        ({"x": (7,)}, (1, 1, 1), {}, {}, ""),
    ],
)
def test_a_rule_is_found(
    shapes: dict[str, tuple[int, ...]],
    grid: tuple[int, int, int],
    numbers: dict[str, int],
    tiles: dict[str, Any],
    rule: str,
) -> None:
    found = grid_rule(captured(shapes, grid, numbers, **tiles))
    assert found is not None and rule_text(found) == rule


def test_no_rule_is_none() -> None:
    assert grid_rule(captured({"x": (1000, 512)}, (17, 1, 1), {}, ROWS=16)) is None
    assert rule_text(None) == ""


def test_inductor_s_switches_are_set_back() -> None:
    from torch._inductor import config

    before = config.force_disable_caches
    with keeping_code():
        assert config.force_disable_caches is True
    assert config.force_disable_caches == before
