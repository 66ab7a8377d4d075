"""Every attention kernel on one small shape under compute-sanitizer: no bad access, no race in shared memory.

The tool comes with CUDA, or as the package nvidia-cuda-sanitizer-api. Before 2026.3 racecheck takes bytes that a bulk
copy has written, and the barrier that counts them, for a race (its release notes), and knows no warpgroups.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu.kernels.attention import hopper_calls
from tests.waiting import HANG_S
from tilewright.hardware.architectures import limits_of
from tilewright.kernels.attention.hopper import backward as hopper_backward
from tilewright.kernels.attention.registered import attend, request_of

pytestmark = pytest.mark.gpu
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
OLDEST = 2026, 3
"""The first release of the tool that follows barriers which count bytes."""
ENDED = "every kernel has run"
NOTHING = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors"}
"""The output of each of the tool's checks that finds nothing."""
ROOT = Path(__file__).parents[4]
SHAPES = {
    # Queries, keys, head size, causal: each is another build of the backward kernels.
    "hopper": [(150, 300, 64, True), (600, 200, 64, False), (150, 300, 128, True), (100, 200, 256, True)],
    "triton": [(130, 130, 64, True), (130, 200, 128, False)],
    "decode": [(1, 700, 128, False)],
}


def call_every_kernel() -> None:
    """Forward and backward, where a way of computing has its own, of every shape."""
    for impl, shapes in SHAPES.items():
        if impl == "hopper" and not HOPPER:
            continue
        for queries, keys, size, causal in shapes:
            lies = (4, queries), (2, keys), (2, keys)
            q, k, v = (torch.randn(2, heads, n, size, device="cuda").bfloat16() for heads, n in lies)
            trained = impl != "decode"
            right = 0 if causal else None
            given = [x.requires_grad_(trained) for x in (q, k, v)]
            out, *_ = attend(*given, *[None] * 4, size**-0.5, None, right, 0.0, 0.0, 0, 0, False, impl)
            if trained:
                torch.autograd.grad(out, given, torch.randn_like(out))
    if HOPPER:
        call_spare_warps()
    torch.cuda.synchronize()
    print(ENDED)


def call_spare_warps() -> None:
    """The backward in which they zero and round sums of dQ, which short sequences do without."""
    for size in (64, 128):
        q, k, v, dout = (torch.randn(2, 4, 300, size, device="cuda").bfloat16() for _ in range(4))
        options = *[None] * 4, size**-0.5, None, None, 0.0, 0.0, 0, 0, False
        out, lse, *_ = attend(q, k, v, *options, "hopper")
        request = request_of(q, k, v, *options)
        plan = hopper_backward.planned(request, limits_of(q.device), hopper_backward.SHAPES[size], dq_warps=True)
        hopper_calls.backward(request, (q, k, v, dout), out, lse, plan)


def tool() -> str | None:
    """Where compute-sanitizer is: the package's before CUDA's."""
    found = importlib.util.find_spec("nvidia")
    places = [Path(root) for root in found.submodule_search_locations or ()] if found else []
    packaged = [path for place in places for path in place.glob("cu*/bin/compute-sanitizer")]
    return str(packaged[0]) if packaged else shutil.which("compute-sanitizer")


def start(*command: str) -> subprocess.Popen[str]:
    """`call_every_kernel` under a command that watches it, each tensor in an allocation of its own."""
    return subprocess.Popen(
        [*command, sys.executable, "-m", "tests.gpu.kernels.attention.test_sanitized"],
        cwd=ROOT, env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def said_by(started: subprocess.Popen[str]) -> str:
    said, _ = started.communicate(timeout=HANG_S)
    assert started.returncode == 0 and ENDED in said, said[-4000:]
    return said


@pytest.fixture(scope="module")
def reports() -> dict[str, str]:
    """The tool's reports. The kernels are compiled before, since the tool would slow that down."""
    path = tool()
    if path is None:
        pytest.skip("compute-sanitizer is not installed: pip install nvidia-cuda-sanitizer-api")
    version = re.search(r"Version (\d+)\.(\d+)", subprocess.check_output([path, "--version"], text=True))
    assert version, path
    if tuple(map(int, version.groups())) < OLDEST:
        pytest.skip(f"compute-sanitizer {version[0]}: before {OLDEST} it takes ordered copies for races")
    said_by(start())
    # Calls to the driver that fail as they may, PyTorch's probes, are not the kernels' errors.
    options = "--report-api-errors", "no", "--print-limit", "20"
    started = {check: start(path, "--tool", check, *options) for check in NOTHING}
    return {check: said_by(one) for check, one in started.items()}


@pytest.mark.parametrize("check", NOTHING)
def test_the_sanitizer_finds_nothing(reports: dict[str, str], check: str) -> None:
    assert NOTHING[check] in reports[check], reports[check][-8000:]


if __name__ == "__main__":
    call_every_kernel()
