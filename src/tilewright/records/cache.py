"""The disk cache: one file per key, the key being a hash of the file's inputs. Safe with many processes.

Its size has a limit (`eviction.py`).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tilewright.records import eviction
from tilewright.records.errors import CacheError
from tilewright.records.home import cache_dir

_DIGEST_BYTES = hashlib.sha256().digest_size


def key_of(*parts: str) -> str:
    """The key of an entry that `parts` determine: 32 hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    return digest.hexdigest()[:32]


def entry(key: str, suffix: str) -> Path:
    return cache_dir() / key[:2] / f"{key}{suffix}"


def build(key: str, suffix: str, make: Callable[[Path], object]) -> Path:
    """The entry of `key`. If it is absent, `make(path)` writes a temporary file, which is then renamed.

    One process builds, the others wait for it. An exception or a signal leaves no entry. Raises
    CacheError if the directory cannot be written, is full, or belongs to another user, or its limit is no size.
    """
    path = entry(key, suffix)
    _check_owner()
    if path.exists():
        eviction.touch(path)
        return path
    most = eviction.limit()
    with _locked(path):
        if not path.exists():
            _write(path, make)
            with _errors():
                eviction.trim(cache_dir(), most)
    return path


def build_with_digest(key: str, suffix: str, make: Callable[[Path], object]) -> Path:
    """`build`, with a digest appended to the content: a truncated or damaged entry is built again.

    For shared libraries: loading a truncated one kills the process. Raises CacheError like `build`, and if the
    entry cannot be read back.
    """

    def make_with_digest(path: Path) -> None:
        make(path)
        _append_digest(path, key)

    for _ in range(2):
        path = build(key, suffix, make_with_digest)
        if _digest_matches(path, key):
            return path
        discard(path)
    raise CacheError(f"the cache entry {path} does not hold what was written to it")


def content_with_digest(key: str, suffix: str) -> bytes | None:
    """The content that `build_with_digest` wrote for `key`; None if there is none. Removes a damaged entry.

    Raises CacheError if the directory belongs to another user.
    """
    path = entry(key, suffix)
    _check_owner()
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if not _ends_with_digest(content, key):
        discard(path)
        return None
    eviction.touch(path)
    return content[:-_DIGEST_BYTES]


def ensure_usable() -> None:
    """Raise CacheError if `build` could not write an entry, for example because the disk is full."""
    _check_owner()
    with _errors():
        _make_folder()
        with tempfile.NamedTemporaryFile(dir=cache_dir(), prefix=".probe-") as probe:
            probe.write(bytes(4096))
            probe.flush()
            os.fsync(probe.fileno())


def discard(path: Path) -> None:
    """Remove a damaged entry, so that the next `build` makes it again. An OSError is ignored."""
    with suppress(OSError):
        path.unlink()


def _append_digest(path: Path, key: str) -> None:
    with path.open("r+b") as file:
        digest = _digest(file.read(), key)
        file.write(digest)


def _digest_matches(path: Path, key: str) -> bool:
    """Whether the file ends with the digest of its content and `key`."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return _ends_with_digest(content, key)


def _ends_with_digest(content: bytes, key: str) -> bool:
    return content[-_DIGEST_BYTES:] == _digest(content[:-_DIGEST_BYTES], key)


def _digest(content: bytes, key: str) -> bytes:
    return hashlib.sha256(key.encode() + content).digest()


def _write(path: Path, make: Callable[[Path], object]) -> None:
    with _errors():
        # This process holds the lock, so these belong to processes that were killed.
        for abandoned in path.parent.glob(".building-*"):
            abandoned.unlink(missing_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".building-", suffix=path.suffix)
        os.close(handle)
        temporary = Path(name)
        try:
            make(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _check_owner() -> None:
    """Code is loaded from the cache, so it must belong to this user."""
    with _errors():
        folder = cache_dir()
        if folder.exists() and folder.stat().st_uid != os.geteuid():
            raise CacheError(f"the cache {folder} belongs to another user; set TILEWRIGHT_CACHE to a folder of yours")


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
