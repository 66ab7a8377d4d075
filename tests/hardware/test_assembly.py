"""Reading machine code: a kernel compiled here for an H200 and an A100, and lines of every kind."""

from pathlib import Path

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from tests.kernels.machine_code import compiled
from tilewright.hardware import assembly
from tilewright.hardware.assembly import disassemble, read_sass, resources
from tilewright.records.errors import CompilerError

LINES = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128 R8, desc[UR4][R4.64] ;
        /*0020*/               @P0 LDG.E.U16.CONSTANT R8, desc[UR4][R4.64] ;
        /*0030*/                   LDGSTS.E.BYPASS.128 [R3], desc[UR4][R4.64] ;
        /*0040*/                   STG.E.64 desc[UR4][R2.64], R8 ;
        /*0050*/                   STG.E desc[UR4][R2.64], R8 ;
        /*0060*/                   LDS.128 R4, [R5] ;
        /*0070*/                   LDSM.16.MT88.4 R4, [R5] ;
        /*0080*/                   STL.64 [R1], R4 ;
        /*0090*/                   LDL R4, [R1] ;
        /*00a0*/                   HFMA2.MMA.BF16_V2 R8, R8, 1, 1, R8 ;
        /*00b0*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*00c0*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*00d0*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*00e0*/             @UPT  UTMALDG.2D [UR8], [UR4] ;
        /*00f0*/                   RED.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR4][R2.64], R5 ;
        /*0100*/                   EXIT ;
        /*0110*/                   NOP;
"""


def test_every_kind_of_instruction_is_told_apart() -> None:
    found = read_sass(LINES)
    assert found.total == 17
    assert found.widths("global", "load") == {16: 2, 2: 1}
    assert found.widths("global", "store") == {8: 1, 4: 1}
    assert found.widths("shared", "load") == {16: 2}
    assert found.widths("shared", "store") == {}
    assert found.widths("atomic", "store") == {4: 1}
    assert found.spills == 2
    # HFMA2.MMA is a vector instruction that borrows the matrix unit's datapath.
    assert found.matrix == {"HGMMA.64x128x16.F32.BF16": 2, "HMMA.16816.F32.BF16": 1}
    assert found.bulk == {"UTMALDG.2D": 1}
    assert found.names["LDG.E.128"] == 1 and found.names["LDGSTS.E.BYPASS.128"] == 1


@triton.jit
def copy(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


@pytest.mark.parametrize("architecture", [80, 90])
def test_a_kernel_compiled_here(architecture: int) -> None:
    types, target = {"x": "*bf16", "y": "*bf16", "n": "i32"}, GPUTarget("cuda", architecture, 32)
    cubin = compiled(copy, types, {"BLOCK": 1024}, aligned=["n"], target=target).asm["cubin"]
    (sass,) = disassemble(cubin).values()
    found = read_sass(sass)
    # 1024 bf16 over 128 threads are 16 bytes a thread.
    assert found.widths("global", "load") == {16: 1}
    assert found.widths("global", "store") == {16: 1}
    assert found.matrix == {} and found.spills == 0
    (taken,) = resources(cubin).values()
    assert 8 <= taken.registers <= 32 and taken.stack_bytes == 0
    assert list(disassemble(cubin)) == list(resources(cubin)) == ["copy"]


def test_what_is_no_machine_code_is_refused() -> None:
    with pytest.raises(CompilerError, match="nvdisasm cannot read the machine code: "):
        disassemble(b"not a cubin")


def test_a_missing_disassembler_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(assembly.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(assembly.Path, "is_file", lambda _: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CompilerError, match="no nvdisasm in Triton's package"):
        disassemble(b"")
