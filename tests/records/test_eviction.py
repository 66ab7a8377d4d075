"""The size limit of the disk cache: what goes, what stays, and what a limit may be."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tilewright.records import cache, eviction, outcomes
from tilewright.records.errors import CacheError
from tilewright.records.outcomes import Outcome

KIB = 2**10


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache of at most 100 KiB."""
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setenv(eviction.VARIABLE, "100K")
    yield tmp_path


def keep(name: str, size: int = 20 * KIB, *, age_s: float = 0) -> Path:
    """An entry that was used some seconds ago, written by a process that has written nothing yet."""
    eviction._trimmed.clear()
    path = cache.build(cache.key_of(name), ".test", lambda path: path.write_bytes(bytes(size)))
    os.utime(path, (time.time() - age_s,) * 2)
    return path


def test_the_least_recently_used_entries_go_until_the_rest_is_below_the_low_water_mark() -> None:
    first, second, third = (keep(f"old {n}", age_s=1000 - n) for n in range(3))
    assert keep("old 0") == first  # used again
    keep("new 1")
    keep("new 2")
    assert first.exists() and second.exists() and third.exists()
    keep("new 3")  # 120 KiB
    assert first.exists() and not second.exists() and not third.exists()
    assert sum(path.stat().st_size for path in eviction_candidates()) <= eviction.LOW_WATER * 100 * KIB


def eviction_candidates() -> list[Path]:
    return list(cache.cache_dir().glob("??/*.test"))


def test_reading_an_entry_counts_as_use() -> None:
    paths = [
        cache.build_with_digest(cache.key_of(name), ".test", lambda path: path.write_bytes(bytes(40 * KIB)))
        for name in ("read", "not read")
    ]
    for path in paths:
        os.utime(path, (1, 1))
    assert cache.content_with_digest(cache.key_of("read"), ".test") == bytes(40 * KIB)
    keep("new", 40 * KIB)
    assert paths[0].exists() and not paths[1].exists()


def test_outcomes_of_races_go_like_others_and_looking_one_up_counts_as_use() -> None:
    for name in ("forgotten", "followed"):
        outcomes.keep(cache.key_of(name), Outcome({"fused": 1.0}))
    for path in cache.cache_dir().glob("??/*.race.json"):
        os.utime(path, (1, 1))
    assert outcomes.lookup(cache.key_of("followed"))
    recent = [keep(f"recent {n}", 50 * KIB) for n in range(4)]
    assert outcomes.lookup(cache.key_of("followed")) == Outcome({"fused": 1.0})
    assert outcomes.lookup(cache.key_of("forgotten")) is None
    assert all(path.exists() for path in recent)


def test_a_smaller_limit_holds_from_the_next_process_that_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(eviction.VARIABLE, "0")
    many = [keep(f"unlimited {n}", age_s=1000 - n) for n in range(12)]
    assert all(path.exists() for path in many)
    monkeypatch.setenv(eviction.VARIABLE, "102400")
    keep("new", 1)
    assert [path.exists() for path in many] == [False] * 8 + [True] * 4


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", None), ("12345", 12345), ("3k", 3 * KIB), (" 2M ", 2 * 2**20), ("4G", 4 * 2**30), ("1T", 2**40)],
)
def test_limits(monkeypatch: pytest.MonkeyPatch, text: str, size: int | None) -> None:
    monkeypatch.setenv(eviction.VARIABLE, text)
    assert eviction.limit() == size


def test_no_limit_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(eviction.VARIABLE)
    assert eviction.limit() == 4 * 2**30


@pytest.mark.parametrize("text", ["", "-1", "1.5G", "4GB", "many"])
def test_a_limit_that_is_no_size_is_said_and_nothing_is_written(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(eviction.VARIABLE, text)
    with pytest.raises(CacheError, match=r"TILEWRIGHT_CACHE_LIMIT is .* give bytes, or a number with K, M, G or T"):
        keep("entry")
    assert not eviction_candidates()
