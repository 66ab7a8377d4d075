"""The Triton emitter: its text, and its machine code for an H200."""

import json
from pathlib import Path

import pytest
import torch

from tests import processes
from tests.emit.triton_programs import golden, nests_of
from tests.golden import check
from tilewright.emit.triton import emit_triton
from tilewright.runtime.blocking import plan

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", golden())
def test_source_is_as_written_down(name: str) -> None:
    function, inputs = golden()[name]
    sources = [emit_triton(lowered.nest) for lowered in nests_of(function, *inputs)]
    check(HERE / "golden" / f"{name}.txt", "\n\n".join(sources))


def test_positions_beyond_32_bits_are_counted_in_64() -> None:
    wide, narrow = (
        emit_triton(nests_of(lambda x: x.sum(-1), torch.empty(n, 1000, device="meta"))[0].nest) for n in (2**22, 2**20)
    )
    assert "row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS" in wide
    assert "col = tl.arange(0, BLOCK_COLS)[None, :].to(tl.int64)" in wide
    assert "int64" not in narrow


def test_as_many_tiles_are_on_their_way_as_shared_memory_holds() -> None:
    function, inputs = golden(4096, 2048)["layer_norm_backward"]
    (lowered,) = nests_of(function, *inputs)
    # Two operands of bf16, in tiles of two rows.
    tile_bytes = 2 * 2 * 2 * 2048
    for budget in (0, tile_bytes - 1, tile_bytes, 2 * tile_bytes - 1, 2 * tile_bytes, 100 * tile_bytes):
        ahead = plan(lowered.nest, 132, shared_bytes=budget).sizes["AHEAD"]
        assert ahead >= 1 and (ahead - 1) * tile_bytes <= budget
        assert ahead > 1 or budget < tile_bytes


def test_every_operators_kernels_compile(tmp_path: Path) -> None:
    """The interpreter takes kernels that the compiler does not: a loop whose values change their shape."""
    pytest.importorskip("triton")
    variables = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    printed, _ = processes.run(["-m", "tests.emit.machine_code", "operators"], env=variables)
    errors = [json.loads(line) for line in printed.splitlines()]
    assert len(errors) > 500 and [error for error in errors if error] == []


def test_no_kernel_spills_on_an_h200(tmp_path: Path) -> None:
    """Six nests over rows that fit a program, and rows that some do not hold."""
    pytest.importorskip("triton")
    variables = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    printed, _ = processes.run(["-m", "tests.emit.machine_code", "1000", "16384"], env=variables)
    kernels = [(name, taken) for line in printed.splitlines() for name, taken in json.loads(line).items()]
    assert len(kernels) >= 2 * 7
    assert [kernel for kernel in kernels if kernel[1]["spilled"]] == []
