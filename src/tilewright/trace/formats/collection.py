"""Several traces at one path: a folder, or an archive (zip, tar, tar.gz), of which only trace files are unpacked."""

from __future__ import annotations

import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from tilewright.records.errors import TraceError
from tilewright.trace.formats.source import PIECE, is_gzip, too_large

_KINDS = (".json", ".json.gz", ".sqlite", ".pftrace", ".perfetto-trace", ".pickle")
_ZIP, _TAR, _TAR_AT = b"PK\x03\x04", b"ustar", 257


def traces_of(folder: Path) -> list[Path]:
    """The trace files in a folder and those below it, by name."""
    return sorted(path for path in folder.rglob("*") if path.name.endswith(_KINDS) and path.is_file())


@contextmanager
def files_at(path: Path) -> Iterator[list[tuple[Path, str]]]:
    """Each trace at `path` as a file and the name to show; of an archive the files last as long as the context.

    Raises:
        TraceError: the folder or archive has no traces, or is damaged, or unpacks to far more than traces would.
    """
    if path.is_dir():
        files = [(found, str(found)) for found in traces_of(path)]
        if not files:
            raise TraceError(f"no trace ({', '.join(_KINDS)}) in the folder {path}")
        yield files
        return
    kind = _archive(path)
    if not kind:
        yield [(path, str(path))]
        return
    with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
        try:
            files = list(_unpacked_to(Path(folder), path, kind))
        except (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error, NotImplementedError, RuntimeError) as error:
            raise TraceError(f"{path} is damaged or encrypted: {error}") from error
        if not files:
            raise TraceError(f"no trace ({', '.join(_KINDS)}) in the archive {path}")
        yield files


def _archive(path: Path) -> str:
    """`zip`, `tar`, or nothing where the file is none, or cannot be read."""
    try:
        with path.open("rb") as file:
            head = file.read(1 << 12)
        if is_gzip(path):
            head = zlib.decompressobj(wbits=31).decompress(head, _TAR_AT + len(_TAR))
    except (OSError, zlib.error):
        return ""
    if head.startswith(_ZIP):
        return "zip"
    return "tar" if head[_TAR_AT : _TAR_AT + len(_TAR)] == _TAR else ""


def _unpacked_to(folder: Path, path: Path, kind: str) -> Iterator[tuple[Path, str]]:
    """The names of the members are shown, and name no file."""
    size = 0
    for number, (name, member) in enumerate(_members(path, kind)):
        made = folder / f"{number}{next(kind for kind in _KINDS if name.endswith(kind))}"
        with member, made.open("wb") as into:
            while piece := member.read(PIECE):
                size += len(piece)
                if too_large(size, path.stat().st_size):
                    raise TraceError(f"{path} unpacks to far more than its size; no trace does, so it is not read")
                into.write(piece)
        yield made, f"{path}/{PurePosixPath(name)}"


def _members(path: Path, kind: str) -> Iterator[tuple[str, IO[bytes]]]:
    if kind == "zip":
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if entry.filename.endswith(_KINDS):
                    yield entry.filename, archive.open(entry)
        return
    with tarfile.open(path) as tar:
        for member in tar:
            if member.isfile() and member.name.endswith(_KINDS) and (content := tar.extractfile(member)) is not None:
                yield member.name, content
