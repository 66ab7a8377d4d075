"""The kernels that a GPU's rates are measured with: what they compute, and that the compiler leaves them whole."""

import re

import pytest


def innermost_loop(ptx: str) -> str:
    """From the label that the first backward branch jumps to, to that branch: what is run again and again."""
    for branch in re.finditer(r"bra(?:\.uni)?\s+(\$L\S+?);", ptx):
        label = ptx.find(f"\n{branch[1]}:")
        if 0 <= label < branch.start():
            return ptx[label : branch.start()]
    raise AssertionError("no loop")


@pytest.mark.parametrize("way", ["copy", "read", "write"])
def test_the_compiler_neither_drops_nor_keeps_what_a_walk_moves(way: str) -> None:
    """All that a thread moves in a step stands in the loop, 16 bytes a request, past the multiprocessor's cache."""
    pytest.importorskip("triton")
    from tests.kernels.machine_code import compiled, spilled
    from tilewright.hardware.probes import DIRECTIONS, SHAPES, walk

    reads, writes = DIRECTIONS[way]
    types = {"source": "*fp32", "target": "*fp32", "elements": "i32", "walks": "i32"}
    for shape in SHAPES:
        constants = {"READS": reads, "WRITES": writes, "BLOCK": shape.block}
        code = compiled(walk, types, constants, aligned=["elements"], warps=shape.warps)
        loop = innermost_loop(code.asm["ptx"])
        requests = shape.values // 4
        assert len(re.findall(r"ld\.global\.cg\.v4\.b32", loop)) == requests * reads
        assert len(re.findall(r"ld\.global", loop)) == requests * reads
        assert len(re.findall(r"st\.global\.v4\.b32", loop)) == requests * writes
        assert spilled(code) == 0


def test_the_compiler_leaves_every_multiply_add() -> None:
    pytest.importorskip("triton")
    from tests.kernels.machine_code import compiled, spilled
    from tilewright.hardware.probes import CHAINS, STEPS, WARPS, chains

    types = {"out": "*fp32", "factor": "fp32", "term": "fp32", "turns": "i32"}
    code = compiled(chains, types, {"BLOCK": 32 * WARPS * CHAINS, "STEPS": STEPS}, warps=WARPS)
    assert len(re.findall(r"fma\.rn\.f32", innermost_loop(code.asm["ptx"]))) == CHAINS * STEPS
    assert spilled(code) == 0
