"""Kernels taken apart on a GPU: occupancy against the driver's own answer, times, and kernels that are not ours."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.anatomy import kernels
from tilewright.anatomy.capture import capturing, launch_record
from tilewright.anatomy.kernel_views import Request, kernel_views
from tilewright.hardware.architectures import architecture
from tilewright.hardware.occupancy import occupancy

pytestmark = pytest.mark.gpu
KERNELS = str(Path(kernels.__file__))
TILES = [(16, 16, 16, 1, 1), (32, 32, 32, 2, 2), (64, 64, 32, 4, 3), (128, 128, 32, 4, 3), (128, 256, 64, 8, 3)]


@pytest.fixture(scope="module")
def driver() -> Any:
    return pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings to ask the driver")


@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_the_driver_agrees_on_occupancy(tiles: tuple[int, ...], driver: Any) -> None:
    m, n, k, warps, stages = tiles
    a = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    with capturing(run=True) as found:
        kernels.product[8, 8](a, a, torch.empty_like(a), 1024, 1024, 1024, m, n, k, num_warps=warps, num_stages=stages)
    (captured,) = found
    launch = launch_record(captured)
    assert launch.registers == captured.compiled.n_regs
    major, minor = torch.cuda.get_device_capability()
    ours = occupancy(architecture(f"{major}.{minor}"), launch.threads, launch.registers, launch.shared_bytes)
    function = driver.CUfunction(captured.compiled.function)
    status, blocks = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, launch.threads, launch.shared_bytes)
    assert (status.value, ours.blocks) == (0, blocks)


def test_a_kernel_is_run_and_timed() -> None:
    ((_, (view,)),) = kernel_views(Request(f"{KERNELS}:weighted"))
    assert view.device == torch.cuda.get_device_name() and view.launch.grid == (63, 1, 1)
    assert view.launch.measured_us is not None and 0.5 < view.launch.measured_us < 100
    timed = [other.launch.measured_us for other in view.alternatives if other.launch]
    assert len(timed) == 6 and all(us is not None and 0.5 < us < 100 for us in timed)


def test_compiled_ahead_it_is_the_same_code() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("h200 is the profile that this device would have to be")
    ((_, (here,)),) = kernel_views(Request(f"{KERNELS}:weighted", code_only=True))
    ((_, (ahead,)),) = kernel_views(Request(f"{KERNELS}:weighted", on="h200", code_only=True))
    assert ahead.launch.sass == here.launch.sass
    assert ahead.launch.grid == here.launch.grid and ahead.launch.operands == here.launch.operands


def test_the_library_s_choice_is_named() -> None:
    found = kernel_views(Request("matmul", ("4096x4096x4096", "16x4096x4096"), impl="cublas"))
    assert [subject for subject, _ in found] == [
        "matmul 4096x4096x4096 bfloat16 cublas",
        "matmul 16x4096x4096 bfloat16 cublas",
    ]
    for _, views in found:
        assert views and all(view.launch.language == "library" and view.launch.registers > 0 for view in views)
        assert not any("normal_kernel" in view.launch.name for view in views)
    assert found[0][1][0].launch.name != found[1][1][0].launch.name


def test_what_inductor_generated_is_read() -> None:
    ((_, views),) = kernel_views(Request("examples/manual_gelu.py:case", impl="inductor"))
    generated = [view for view in views if view.launch.language == "triton"]
    assert generated
    for view in generated:
        assert "tl.load" in view.launch.source and ".target" in view.launch.ptx
        assert view.instructions is not None and view.instructions.widths("global", "load")
        assert view.launch.measured_us is not None and view.launch.measured_us > 0
