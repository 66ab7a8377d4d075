"""Checks the claims of the documents, one row for each."""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path

from tilewright.records.errors import TilewrightError, UsageError

from .claim import Claim, Document, Finding, Verdict
from .lab import Lab

FILES = (
    "profiling_homework",
    "triton_softmax",
    "online_and_attention",
    "fusion_and_tiles",
    "compiler_view",
    "kernels_lecture",
    "waves_and_profiling",
)
_NEEDS = {"cpu": "needs `--device cpu`", "cuda": "needs an NVIDIA GPU"}


@dataclass(frozen=True)
class Row:
    """One claim, what was found here, and what it was found with."""

    id: str
    document: str
    machine: str
    """The document's."""
    claim: str
    theirs: str
    ours: str
    verdict: Verdict
    why: str
    by: tuple[str, ...]
    """Commands and experiments."""
    device: str
    threads: int
    torch: str
    date: str

    @staticmethod
    def from_json(line: str) -> Row:
        values = json.loads(line)
        return Row(**values | {"by": tuple(values["by"])})

    def as_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)


def documents() -> list[Document]:
    """The documents, in order."""
    return [importlib.import_module(f".{name}", __package__).DOCUMENT for name in FILES]


def selected(only: Sequence[str]) -> list[tuple[Document, Claim]]:
    """The claims that a pattern of `only` names (`H5`, `V*`), or all; UsageError if a pattern names none."""
    known = [(document, claim) for document in documents() for claim in document.claims]
    for pattern in only:
        if not any(fnmatchcase(claim.id, pattern) for _, claim in known):
            spans = [f"{it.claims[0].id} to {it.claims[-1].id}" for it in documents()]
            raise UsageError(f"no claim {pattern!r}; they are {', '.join(spans)}")
    return [it for it in known if not only or any(fnmatchcase(it[1].id, pattern) for pattern in only)]


def check_claims(
    only: Sequence[str] = (), *, device: str = "cpu", tell: Callable[[str], None] = lambda _: None
) -> Iterable[Row]:
    """The rows of the selected claims, each as soon as it is checked.

    A claim that this device cannot check, or whose experiment refuses with a TilewrightError, has the verdict
    "not here" and the reason; any other exception makes it "failed".
    """
    from tilewright.hardware.ceilings import device_name
    from tilewright.hardware.detect import detect

    name = device_name(detect(), device)
    with tempfile.TemporaryDirectory(prefix="tilewright-claims-") as runs:
        yield from _rows(selected(only), Lab(device, Path(runs), tell), name)


def _rows(claims: Iterable[tuple[Document, Claim]], lab: Lab, device: str) -> Iterator[Row]:
    import torch

    for document, claim in claims:
        lab.used.clear()
        found = _finding(claim, lab)
        yield Row(
            claim.id,
            document.title,
            document.machine,
            claim.text,
            claim.theirs,
            found.ours,
            found.verdict,
            claim.why,
            tuple(lab.used),
            device,
            torch.get_num_threads(),
            str(torch.__version__),
            str(date.today()),
        )


def _finding(claim: Claim, lab: Lab) -> Finding:
    if claim.needs and claim.needs != lab.device.partition(":")[0]:
        return Finding(_NEEDS[claim.needs], "not here")
    try:
        return claim.check(lab)
    except TilewrightError as error:
        return Finding(str(error).partition("\n")[0], "not here")
    except Exception as error:
        return Finding(f"{type(error).__name__}: {error}".partition("\n")[0], "failed")


def read_rows(path: Path) -> list[Row]:
    """The rows of a file of JSON lines."""
    return [Row.from_json(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write JSON lines; rows of claims that are not among `rows` stay."""
    from tilewright.records.atomic_file import write_document

    known = {row.id: row for row in read_rows(path)} if path.exists() else {}
    known |= {row.id: row for row in rows}
    order = [claim.id for document in documents() for claim in document.claims]
    text = "".join(f"{known[id_].as_json()}\n" for id_ in order if id_ in known)
    write_document(path, text, "claims")
