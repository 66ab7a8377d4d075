"""Files that are damaged, enormous or meant to harm: a clear error or a correct load, in bounded memory."""

import gzip
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.counting import calls_made
from tests.trace.loading import accounted, complete, loaded, loaded_events, rows, written
from tests.waiting import HANG_S
from tilewright.records.errors import TraceError
from tilewright.trace.formats import source

GOOD = json.dumps({"traceEvents": [complete("a", 1, 2), complete("b", 4, 2)]}).encode()
DEEP = 10**6


def nested(opening: bytes, closing: bytes) -> bytes:
    event = b'{"ph":"X","name":"deep","pid":1,"tid":1,"ts":1,"dur":1,"args":{"a":%s}}'
    return b'{"traceEvents":[' + event % (opening * DEEP + b"1" + closing * DEEP) + b"]}"


UNREADABLE = {
    "nothing": b"",
    "blanks": b" \n\t " * 1000,
    "zeros": bytes(100_000),
    "words": b"this is no trace",
    "number": b"42",
    "string": b'"traceEvents"',
    "no events": b'{"displayTimeUnit": "ms"}',
    "events are no list": b'{"traceEvents": {"ph": "X"}}',
    "cut before the events": GOOD[:8],
    "a word within": GOOD.replace(b"}, {", b"}, oops, {"),
    "single quotes": GOOD.replace(b'"', b"'"),
    "deep lists": nested(b"[", b"]"),
    "deep objects": nested(b'{"a":', b"}"),
    "deep from the start": b"[" * DEEP,
    "not really packed": b"\x1f\x8b" + GOOD,
    "packed and damaged": gzip.compress(GOOD)[:20] + b"\xff" * 30,
    "picture": b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 50,
}


@pytest.mark.parametrize("content", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_what_cannot_be_read(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"bad\.json") as failed:
        loaded(path)
    assert failed.value.exit_code == 10
    assert len(str(failed.value)) < 300


@pytest.mark.parametrize("name", [b'a "quoted" name', b"a backslash\\", b"\\q", b'{ "ph": "X" },'], ids=repr)
def test_an_event_of_kinetos_that_is_no_json(tmp_path: Path, name: bytes) -> None:
    """As Kineto writes names that it does not escape: the other events are kept, and one is rejected."""
    event = b'  {\n    "ph": "X", "cat": "cpu_op", "name": "%s", "pid": 1, "tid": 1,\n    "ts": %d, "dur": 1\n  }'
    names = [b"before", name, b"after", b"last"]
    events = [event % (name, at * 10) for at, name in enumerate(names)]
    path = tmp_path / "kineto.json"
    path.write_bytes(b'{\n  "traceEvents": [\n' + b",\n".join(events) + b'\n  ], "after": 1\n}')
    connection, (file,) = loaded(path)
    assert (file.slices, file.rejects) == (3, 1)
    assert rows(connection, "SELECT name, ts FROM slice ORDER BY ts") == [
        ("before", 0), ("after", 20_000), ("last", 30_000)
    ]  # fmt: skip
    ((reason,),) = rows(connection, "SELECT reason FROM reject")
    assert "no JSON" in str(reason)


def test_what_is_no_file(tmp_path: Path) -> None:
    for path, why in ((tmp_path, r"no trace .* in the folder"), (tmp_path / "missing.json", "cannot read")):
        with pytest.raises(TraceError, match=why):
            loaded(path)


def archived(path: Path, content: dict[str, bytes]) -> Path:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            for name, text in content.items():
                packed.writestr(name, text)
    else:
        with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
            for name, text in content.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(text)
                tar.addfile(entry, io.BytesIO(text))
    return path


@pytest.mark.parametrize("name", ["all.zip", "all.tar", "all.tar.gz"])
def test_an_archive_has_its_traces_whatever_their_names_are(tmp_path: Path, name: str) -> None:
    content = {"../../escaped.json": GOOD, "/rank1.json.gz": gzip.compress(GOOD), "a.json": b"[1]", "notes.txt": b"x"}
    (tmp_path / "in").mkdir()
    path = archived(tmp_path / "in" / name, content)
    connection, files = loaded(path)
    assert [file.path for file in files] == [f"{path}/../../escaped.json", f"{path}//rank1.json.gz"]
    assert rows(connection, "SELECT count(*) FROM slice") == [(2 * files[0].slices,)]
    # Nothing was written beside it.
    assert sorted(each.name for each in tmp_path.rglob("*")) == sorted(["in", name])


@pytest.mark.parametrize("name", ["all.zip", "all.tar.gz"])
def test_archives_that_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(TraceError, match=r"no trace .* in the archive"):
        loaded(archived(tmp_path / f"none-{name}", {"notes.txt": b"x"}))
    with pytest.raises(TraceError, match="is not a trace"):
        loaded(archived(tmp_path / f"other-{name}", {"a.json": b"[1]"}))
    whole = archived(tmp_path / name, {"a.json": GOOD * 500})
    whole.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    with pytest.raises(TraceError, match=name):
        loaded(whole)


def test_an_archive_that_is_a_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_BOMB_BYTES", 1 << 20)
    with pytest.raises(TraceError, match="far more than its size"):
        loaded(archived(tmp_path / "bomb.zip", {"a.json": b" " * (1 << 23)}))


def test_a_folder_of_traces(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"rank{number}.json").write_bytes(GOOD)
    _, files = loaded(tmp_path)
    assert [file.path for file in files] == [str(tmp_path / f"rank{number}.json") for number in range(2)]


@pytest.mark.parametrize(("packed", "every"), [(False, 19), (True, 57)], ids=["plain", "packed"])
def test_a_file_that_was_cut_off(tmp_path: Path, packed: bool, every: int) -> None:
    """Whole events are kept, and the run says that the file ended early, wherever it ended."""
    events = [complete(f"op {at}", at, 0.5, args={"text": "]}, {", "list": [at, [1]]}) for at in range(3)]
    whole = json.dumps({"schemaVersion": 1, "traceEvents": events, "after": [1]}).encode()
    begun = whole.index(b"[")
    for length in range(begun + 1, len(whole), every):
        path = tmp_path / ("cut.json.gz" if packed else "cut.json")
        path.write_bytes(gzip.compress(whole, 0)[: 15 + length] if packed else whole[:length])
        connection, (file,) = loaded(path)
        assert file.note is not None and "ends early" in file.note
        assert file.events == accounted(file) and file.rejects <= 1
        assert file.slices == whole[:length].count(b"}}")
        assert rows(connection, "SELECT count(*) FROM slice WHERE dur = 500") == [(file.slices,)]


REJECTED = {
    '"ts": NaN': "ts is not finite",
    '"ts": -Infinity': "ts is not finite",
    '"ts": 1e400': "ts is out of range",
    '"ts": 9223372036854775808': "ts is out of range",
    '"ts": "now"': "ts is not a number",
    '"ts": null': "no ts",
    '"ts": [1]': "ts is not a number",
    '"dur": -0.001, "ts": 1': "negative duration",
    '"dur": 9223372036854775808, "ts": 1': "dur is out of range",
    '"dur": null, "ts": 1': "no dur",
    '"ph": "?", "ts": 1': 'unknown phase "?"',
    '"ph": {}, "ts": 1': "unknown phase {}",
}


@pytest.mark.parametrize(("field", "reason"), REJECTED.items(), ids=REJECTED.keys())
def test_events_that_are_none(tmp_path: Path, field: str, reason: str) -> None:
    start = '{"name": "bad", "pid": 1, "tid": 1, '
    start += "" if '"ph"' in field else '"ph": "X", '
    start += "" if '"dur"' in field else '"dur": 1, '
    path = tmp_path / "t.json"
    path.write_bytes(GOOD.replace(b"[", b"[" + start.encode() + field.encode() + b"}, ", 1))
    connection, (file,) = loaded(path)
    assert rows(connection, "SELECT reason FROM reject") == [(reason,)]
    assert rows(connection, "SELECT name, ts, dur FROM slice ORDER BY ts") == [("a", 1000, 2000), ("b", 4000, 2000)]
    assert file.events == accounted(file) == 3


NAMES = (
    "</script><script>alert(1)</script>",
    "'; DROP TABLE slice; --",
    "\"); ATTACH '/etc/passwd'; --",
    "nul \x00 and escape \x1b[2J",
    "lines\nand\ttabs",
    "right to left \u202e and a lone surrogate \ud800",
    "🔥" * 10_000,
    "",
    "$.args[*] ?(@)",
)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name[:12].encode("unicode_escape").decode())
def test_names_are_only_names(name: str) -> None:
    """Wherever text may stand: it comes back as it was, and nothing is executed."""
    args = {name: name, "plain": name}
    more = {"cat": name, "pid": name, "tid": name, "args": args}
    events = [
        {"ph": "X", "name": name, "ts": 1, "dur": 5, **more},
        {"ph": "M", "name": "process_name", **more, "args": {"name": name}},
        {"ph": "C", "name": name, "ts": 1, "pid": name, "args": {name or "key": 3}},
        {"ph": "b", "name": name, "ts": 1, "id": name, **more},
        {"ph": "e", "name": name, "ts": 2, "id": name, **more},
        {"ph": "s", "name": name, "ts": 1, "id": name, **more},
        {"ph": "f", "bp": "e", "name": name, "ts": 2, "id": name, **more},
        {"ph": "E", "name": name, "ts": 2, **more},
    ]
    connection, file = loaded_events(events, **{name: name})
    kept = name.encode("utf-8", "replace").decode()
    assert rows(connection, "SELECT DISTINCT name, category FROM slice") == [(kept, kept)]
    assert rows(connection, "SELECT string_value FROM args WHERE key = 'args.plain'") == [(kept,)] * 2
    assert rows(connection, "SELECT name FROM process") == [(kept or None,)]
    assert rows(connection, "SELECT count(*), any_value(value) FROM counter") == [(1, 3.0)]
    assert file.events == accounted(file) == len(events)


def test_text_in_other_encodings(tmp_path: Path) -> None:
    text = '[{"ph": "X", "name": "λ", "pid": 1, "tid": 1, "ts": 1, "dur": 1}]'
    for encoding in ("utf-8-sig", "utf-16"):
        path = tmp_path / f"{encoding}.json"
        path.write_bytes(text.encode(encoding))
        connection, _ = loaded(path)
        assert rows(connection, "SELECT name FROM slice") == [("λ",)]
    path.write_bytes(text.encode("latin-1", "xmlcharrefreplace").replace(b"&#955;", b"\xe9\x80"))
    connection, (file,) = loaded(path)
    assert rows(connection, "SELECT name FROM slice") == [("\ufffd",)]
    assert file.note == "invalid UTF-8 was replaced"


@pytest.mark.parametrize("length", range(30, 38))
def test_a_character_that_an_error_message_cuts_in_two(length: int) -> None:
    events = [complete("a", 1, 1), complete("b", 2, 1) | {"dur": "x" * (length % 4) + "💥" * length}]
    connection, file = loaded_events(events)
    assert rows(connection, "SELECT name FROM slice") == [("a",)]
    assert (file.events, file.rejects) == (2, 1)


def test_control_characters_within_names(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(b'[{"ph": "X", "name": "a\nb\x01", "pid": 1, "tid": 1, "ts": 1, "dur": 1}]')
    connection, _ = loaded(path)
    assert rows(connection, "SELECT name FROM slice") == [("a\nb\x01",)]


def test_an_event_larger_than_the_fast_reader_takes() -> None:
    connection, _ = loaded_events([complete("a", 1, 1, args={"x": "y" * 5_000_000})])
    assert rows(connection, "SELECT length(string_value) FROM args") == [(5_000_000,)]


def test_as_many_threads_as_events(tmp_path: Path) -> None:
    def calls(threads: int) -> int:
        path = written(tmp_path / f"{threads}.json", [complete("a", at, 1, tid=at, pid=at) for at in range(threads)])

        def load() -> None:
            connection, _ = loaded(path)
            assert rows(connection, "SELECT count(*) FROM thread_track") == [(threads,)]

        return calls_made(load)

    assert calls(20_000) <= 10 * calls(2_000)


def test_a_gzip_bomb_takes_no_room(tmp_path: Path) -> None:
    """10 GB of events in 10 MB: refused after the first quarter of a gigabyte, in a process of its own."""
    path = tmp_path / "bomb.json.gz"
    block = gzip.compress(b'{"ph":"X","name":"a","pid":1,"tid":1,"ts":1,"dur":1},' * 200_000)
    path.write_bytes(gzip.compress(b'{"traceEvents":[') + block * 1000)
    # The process's own high-water mark: what getrusage tells includes the parent it was forked from.
    code = (
        "import re, sys\n"
        "from pathlib import Path\n"
        "from tests.trace.loading import loaded\n"
        "try:\n"
        "    loaded(Path(sys.argv[1]))\n"
        "finally:\n"
        "    print(re.search(r'VmHWM:\\s*(\\d+) kB', Path('/proc/self/status').read_text())[1])\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=HANG_S)
    assert "decompresses to more than" in ended.stderr.splitlines()[-1]
    assert int(ended.stdout) < 800_000


def test_patience_takes_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A string that never ends is given up before it fills the memory."""
    monkeypatch.setattr("tilewright.trace.formats.scanner._LARGEST", 1 << 20)
    path = tmp_path / "t.json"
    path.write_bytes(b'[{"ph": "' + b"x" * (16 << 20))
    with pytest.raises(TraceError, match="Unterminated string"):
        loaded(path)


def test_a_list_of_other_things_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps([{"name": "a", "value": at} for at in range(1200)]))
    with pytest.raises(TraceError, match=r"none of its 1,200 entries is an event; the first is: unknown phase null"):
        loaded(path)
