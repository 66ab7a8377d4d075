"""The disk cache: files named by the hash of what made them, safe with many processes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tilewright.records.errors import CacheError
from tilewright.records.home import cache_dir


def key_of(*parts: str) -> str:
    """A name for whatever `parts` determine."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    return digest.hexdigest()[:32]


def entry(key: str, suffix: str) -> Path:
    return cache_dir() / key[:2] / f"{key}{suffix}"


def build(key: str, suffix: str, make: Callable[[Path], object]) -> Path:
    """The entry of `key`; if absent, `make(path)` writes it under another name and it is moved into place.

    One process builds, the others wait for it. An exception or a signal leaves no entry. Raises
    CacheError where the directory cannot be written, is full, or belongs to another user.
    """
    path = entry(key, suffix)
    _refuse_foreign()
    if path.exists():
        return path
    with _locked(path):
        if not path.exists():
            _write(path, make)
    return path


def build_sealed(key: str, suffix: str, make: Callable[[Path], object]) -> Path:
    """`build`, with a digest behind the content: an entry that is not whole is made again.

    Code is loaded from these, and loading half a library kills a process. Raises CacheError like `build`, and where
    what was written cannot be read back.
    """

    def make_sealed(path: Path) -> None:
        make(path)
        _seal(path, key)

    for _ in range(2):
        path = build(key, suffix, make_sealed)
        if _intact(path, key):
            return path
        discard(path)
    raise CacheError(f"the cache entry {path} does not hold what was written to it")


def ensure_usable() -> None:
    """Raise CacheError where `build` could not keep an entry: nothing can be written, or no space is left."""
    _refuse_foreign()
    with _errors():
        _make_folder()
        with tempfile.NamedTemporaryFile(dir=cache_dir(), prefix=".probe-") as probe:
            probe.write(bytes(4096))
            probe.flush()
            os.fsync(probe.fileno())


def discard(path: Path) -> None:
    """Remove a damaged entry, so that the next `build` makes it again. What cannot be removed stays."""
    with suppress(OSError):
        path.unlink()


def _seal(path: Path, key: str) -> None:
    with path.open("r+b") as file:
        digest = _digest(file.read(), key)
        file.write(digest)


def _intact(path: Path, key: str) -> bool:
    """Whether the entry is whole and is the one of `key`."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    size = hashlib.sha256().digest_size
    return content[-size:] == _digest(content[:-size], key)


def _digest(content: bytes, key: str) -> bytes:
    return hashlib.sha256(key.encode() + content).digest()


def _write(path: Path, make: Callable[[Path], object]) -> None:
    with _errors():
        # The lock is ours: whoever left these was killed.
        for left in path.parent.glob(".building-*"):
            left.unlink(missing_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".building-", suffix=path.suffix)
        os.close(handle)
        temporary = Path(name)
        try:
            make(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _refuse_foreign() -> None:
    """Code is loaded from the cache, so nobody else may own it."""
    with _errors():
        folder = cache_dir()
        if folder.exists() and folder.stat().st_uid != os.geteuid():
            raise CacheError(f"the cache {folder} is another user's; set TILEWRIGHT_CACHE to a folder of your own")


def _make_folder() -> None:
    cache_dir().mkdir(parents=True, exist_ok=True, mode=0o700)
    os.chmod(cache_dir(), 0o700)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with _errors():
        _make_folder()
        path.parent.mkdir(exist_ok=True, mode=0o700)
        handle = os.open(path.parent / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        with _errors():
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CacheError(
            f"cannot use the cache {cache_dir()}: {error.strerror or error}; set TILEWRIGHT_CACHE to a writable folder"
        ) from error
