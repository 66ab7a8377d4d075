"""The cache of compiled kernels: unwritable, full, damaged, foreign, and shared by many processes at once."""

import ctypes
import errno
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from examples.transformer_block import Block
from tests.backend.compiling import assert_same, compiled
from tests.processes import start
from tests.waiting import HANG_S
from tilewright.records import cache
from tilewright.records.errors import CacheError
from tilewright.runtime import compiler


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, in a process that has loaded nothing."""
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_loaded", {})
    yield tmp_path / "cache"


def new_source() -> tuple[str, int]:
    """A source whose `answer()` is a number of its own."""
    number = random.randrange(1 << 30)
    return f'extern "C" int answer() {{ return {number}; }}', number


def answer(source: str) -> int:
    function = compiler.load(source).answer
    function.restype = ctypes.c_int
    return int(function())


def entries(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")


def test_one_entry_readable_by_its_owner_only(folder: Path) -> None:
    source, number = new_source()
    assert answer(source) == number
    assert [p.suffix for p in entries(folder)] == [".so"]
    assert folder.stat().st_mode & 0o077 == 0


def test_an_unwritable_cache_is_said_once_and_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Callable[[], list[str]]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    number = random.random()
    x = torch.randn(20, 30)
    assert_same(compiled(lambda x: torch.softmax(x * number, -1))(x), torch.softmax(x * number, -1))
    assert_same(compiled(lambda x: torch.tanh(x) - number)(x), torch.tanh(x) - number)
    (line,) = told()
    assert line.startswith("tilewright: kernels are compiled for this process alone: cannot use the cache")
    assert line.endswith("Not a directory; set TILEWRIGHT_CACHE to a writable folder")
    assert [p.name for p in tmp_path.iterdir()] == ["file"], "the temporary library is removed"


def test_a_full_disk_at_the_end(monkeypatch: pytest.MonkeyPatch, told: Callable[[], list[str]], folder: Path) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    source, number = new_source()
    assert answer(source) == number
    assert "No space left on device" in told()[0]
    assert entries(folder) == []


def test_a_disk_that_is_full_for_the_compiler(
    compiler: Callable[[str], str], told: Callable[[], list[str]], folder: Path
) -> None:
    compiler(
        f"out=; for a; do out=$a; done\ncase $out in {folder}/*) cat > /dev/null; echo half > $out; "
        'echo "ld: final link failed: No space left on device"; exit 1;; esac\nexec g++ "$@"'
    )
    source, number = new_source()
    assert answer(source) == number
    assert "no space left for" in told()[0]
    assert entries(folder) == []


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty", "another library", "one bit"])
def test_a_damaged_entry_is_built_again(
    damage: str, folder: Path, monkeypatch: pytest.MonkeyPatch, told: Callable[[], list[str]]
) -> None:
    other, _ = new_source()
    compiler.load(other)
    (other_entry,) = entries(folder)
    source, number = new_source()
    compiler.load(source)
    (entry,) = set(entries(folder)) - {other_entry}
    content = entry.read_bytes()
    # A new file: this process still has the old one mapped.
    entry.unlink()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    entry.write_bytes(
        {
            "truncated": content[: len(content) // 2],
            "garbage": random.randbytes(len(content)),
            "empty": b"",
            "another library": other_entry.read_bytes(),
            "one bit": bytes(flipped),
        }[damage]
    )
    monkeypatch.setattr(compiler, "_loaded", {})
    assert answer(source) == number
    assert entry.read_bytes()[-32:] == content[-32:] and not told()


def test_what_a_killed_process_left_is_swept(folder: Path) -> None:
    source, number = new_source()
    compiler.load(source)
    (entry,) = entries(folder)
    left = entry.parent / ".building-left.so"
    left.write_text("half")
    cache.discard(entry)
    compiler._loaded.clear()
    assert answer(source) == number
    assert entries(folder) == [entry]


def test_a_cache_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(CacheError, match="belongs to another user"):
        cache.build("key", ".so", lambda path: None)


def test_a_library_is_loaded_once_a_process(folder: Path) -> None:
    source, _ = new_source()
    library = compiler.load(source)
    shutil.rmtree(folder)
    assert compiler.load(source) is library


COMPILE = """
import ctypes, sys
from tilewright.runtime.compiler import load
sys.stdin.readline()
print(load(sys.argv[1]).answer(), flush=True)
"""


def test_four_processes_and_one_compiler(compilations: Path, folder: Path) -> None:
    source, number = new_source()
    processes = [start(["-c", COMPILE, source], stdin=True) for _ in range(4)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outcomes = [process.communicate(timeout=HANG_S) for process in processes]
    assert [output.strip() for output, _ in outcomes] == [str(number)] * 4, outcomes
    assert compilations.read_text() == "x\n"
    assert len(entries(folder)) == 1


def train() -> None:
    torch._dynamo.reset()
    compiled(Block(32, 4, 0.1))(torch.randn(2, 16, 32)).sum().backward()


def test_one_compilation_for_each_graph_of_a_block_and_none_with_a_warm_cache(
    compilations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train()
    assert compilations.read_text() == "x\n" * 2, "the forward and the backward graph"
    train()
    monkeypatch.setattr(compiler, "_loaded", {})
    train()
    assert compilations.read_text() == "x\n" * 2
