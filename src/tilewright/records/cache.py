"""The disk cache: files named by the hash of what made them, safe with many processes."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def build(key: str, suffix: str, make: Callable[[Path], None]) -> Path:
    """The entry of `key`; if absent, `make(path)` writes it under another name and it is moved into place.

    One process builds, the others wait for it. An exception or a signal leaves no entry. Raises
    CacheError where the directory cannot be written.
    """
    path = entry(key, suffix)
    if path.exists():
        return path
    with _locked(path):
        if not path.exists():
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=".building-", suffix=suffix)
            os.close(handle)
            temporary = Path(name)
            try:
                make(temporary)
                os.replace(temporary, path)
            except OSError as error:
                raise CacheError(f"cannot write to the cache {cache_dir()}: {error.strerror or error}") from error
            finally:
                temporary.unlink(missing_ok=True)
    return path


def discard(path: Path) -> None:
    """Remove a damaged entry, so that the next `build` makes it again."""
    path.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chmod(cache_dir(), 0o700)
        handle = os.open(path.parent / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        raise CacheError(
            f"cannot use the cache {cache_dir()}: {error.strerror or error}; set TILEWRIGHT_CACHE to a writable folder"
        ) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
