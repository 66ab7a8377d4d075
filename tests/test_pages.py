"""The pages: in the navigation of the site; links have targets, blocks compile or run, commands are understood."""

import ast
import json
import pkgutil
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import typer

import tilewright
from benchmarks.tables import CHINESE, in_chinese
from tests.trace.loading import complete, written
from tilewright import functional
from tilewright.cli.app import EXAMPLES as HELP
from tilewright.cli.app import app
from tilewright.records.errors import StoreError
from tilewright.store import query
from tilewright.trace import trace_run

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *ROOT.glob("*/README.md")])
BLOCK = re.compile(r"^(?P<run><!-- run -->\n+)?(?P<indent> *)```(?P<language>\w*)\n(?P<code>.*?)^ *```$", re.M | re.S)
COMMAND = typer.main.get_command(app)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, *languages: str) -> list[tuple[int, str, bool]]:
    """Line, code and whether it is to be run, of each block in one of `languages`."""
    text = text_of(page)
    found = [block for block in BLOCK.finditer(text) if block["language"] in languages]
    return [(text[: block.start("code")].count("\n"), dedent(block["code"]), bool(block["run"])) for block in found]


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", text_of(page)), re.MULTILINE)
    words = [re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", each.strip().lower()).replace(" ", "-") for each in words}


def missing(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return not target.exists() or bool(anchor and target.suffix == ".md" and anchor not in anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_have_targets(page: Path) -> None:
    links = re.findall(r"\]\(([^()\s]+)\)", BLOCK.sub("", text_of(page)))
    local = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    assert not [link for link in local if missing(page, link)]


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = re.findall(r"[:-] (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    made_from_others = re.findall(r'"\S+\.md": "(\S+\.md)"', (DOCS / "hooks.py").read_text("utf-8"))
    pages = [str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")]
    assert sorted(navigation) == sorted(pages + made_from_others)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.name)
def test_python_blocks_compile(page: Path) -> None:
    for line, code, _ in blocks(page, "python"):
        compile("\n" * line + code, str(page), "exec")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "<!-- run -->" in text_of(page)], ids=lambda page: page.name
)
def test_marked_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__page__"}
    for line, code, run in blocks(page, "python"):
        if run:
            exec(compile("\n" * line + code, str(page), "exec"), names)


@pytest.mark.parametrize("notebook", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_run(notebook: Path, home: Path) -> None:
    names: dict[str, object] = {"__name__": "__notebook__"}
    cells = [cell for cell in json.loads(notebook.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert cells and not any(cell["outputs"] for cell in cells)
    for cell in cells:
        exec(compile("".join(cell["source"]), str(notebook), "exec"), names)


def commands(page: Path) -> list[tuple[int, str]]:
    """Line and text of each call of `tilewright` in the blocks of a page."""
    found = []
    for start, code, _ in blocks(page, "", "sh", "bash"):
        for number, line in enumerate(code.splitlines(), start + 1):
            if call := re.match(r"(?:\$ )?tilewright (?P<rest>[a-z-].*)", line):
                found.append((number, call["rest"]))
    return found


def arguments(call: str) -> list[str]:
    """The words of a call; what a page says beside it, alternatives, brackets and pipes are left out."""
    verb, gap, rest = re.fullmatch(r"(\S+)( *)(.*)", call).groups()  # type: ignore[union-attr]
    if len(gap) > 7:
        return [verb]
    rest = re.sub(r"\$\([^)]*\)", "SHELL", rest)
    rest = re.split(r"  +|  *[|#>&]|; ", rest + " ")[0]
    return [verb, *shlex.split(re.sub(r"\|\w+", "", re.sub(r"(?<!\S)\[|\](?!\S)", "", rest)))]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_commands_are_understood(page: Path) -> None:
    """Verbs, options and the number of arguments; nothing runs."""
    for line, call in commands(page):
        command, rest = COMMAND, arguments(call)
        while isinstance(command, typer.core.TyperGroup):
            command, rest = command.commands[rest[0]], rest[1:]
        try:
            command.make_context(command.name, rest)
        except Exception as error:
            pytest.fail(f"{page.name}:{line}: tilewright {call}: {error}")


def queries() -> Iterator[tuple[str, str]]:
    """Every query that a page or the help of a verb shows, with its place."""
    shown = [(page.name, f"tilewright {call}") for page in PAGES for _, call in commands(page)]
    for place, call in [*shown, *((verb.__name__, example) for verb, example in HELP.items())]:
        words = arguments(call.removeprefix("tilewright "))
        yield from (
            (place, word) for word in words[1:] if words[0] == "sql" and " " in word and not word.endswith(("…", "..."))
        )
    yield from ((page.name, code) for page in PAGES for _, code, _ in blocks(page, "sql"))


def test_queries_that_pages_show_are_answered(tmp_path: Path, home: Path) -> None:
    """By a run that has every table, if hardly a row."""
    trace = written(tmp_path / "trace.json", [complete("ProfilerStep#0", 0, 9), complete("aten::mm", 1, 5)])
    run, _ = trace_run([trace], command="", tell=lambda _: None)
    for place, asked in queries():
        try:
            query(run, asked)
        except StoreError as error:
            pytest.fail(f"{place}: {error}")


LINK = re.compile(r"\]\(([^()#\s]+)")
TRANSLATED = [
    (ROOT / "README.md", CHINESE),
    *((DOCS / page.name, page) for page in sorted((DOCS / "zh").glob("*.md"))),
    *((page, page.parent / "zh" / page.name) for page in sorted((DOCS / "learn").glob("*.md")) if page.stem != "index"),
]


def target(page: Path, link: str) -> str:
    """The file or address that a link leads to; of a Chinese page its English one."""
    where = link if "://" in link else str((page.parent / link).resolve())
    return where.replace("/zh/", "/").replace(".zh-CN", "")


def sections(page: Path) -> list[tuple[str, Counter[str], set[str]]]:
    """Of each section its level, the figures of its text and tables, and where its links lead, in English."""
    parts = re.split(r"^(#+) .*$", BLOCK.sub("", text_of(page)), flags=re.MULTILINE)
    return [
        (level, Counter(re.findall(r"\d+(?:\.\d+)?", text)), {target(page, link) for link in LINK.findall(text)})
        for level, text in zip(parts[1::2], parts[2::2], strict=True)
    ]


@pytest.mark.parametrize(("english", "chinese"), TRANSLATED, ids=lambda page: page.name)
def test_translations_hold_the_same(english: Path, chinese: Path) -> None:
    """Headings, figures, links, commands and Python; the links of the pages to each other apart."""
    both = [sections(page) for page in (english, chinese)]
    for original, translated in zip(*both, strict=True):
        assert original == translated
    first, second = ([arguments(call) for _, call in commands(page)] for page in (english, chinese))
    assert first == [[word for word in call if word not in ("--language", "zh")] for call in second]
    first, second = (
        [ast.dump(ast.parse(code)) for _, code, _ in blocks(page, "python")] for page in (english, chinese)
    )
    assert first == second


@pytest.mark.parametrize(("english", "chinese"), TRANSLATED, ids=lambda page: page.name)
def test_tables_of_chinese_pages_are_those_of_the_english(english: Path, chinese: Path) -> None:
    text = text_of(chinese)
    assert in_chinese(text, text_of(english)) == text, "run python -m benchmarks.tables"


def test_every_public_name_is_in_the_api_page() -> None:
    described = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", text_of(DOCS / "api.md"), re.MULTILINE)}
    assert {*tilewright.__all__, *functional.__all__} - {"functional"} <= described


PRESENT = [page for page in PAGES if page.name not in ("CHANGELOG.md", "experiments.md")]
"""Pages on the tree as it is; these two speak of files that were removed."""
EXAMPLES = {"mine.py", "bench/suites/scale.py"}
"""Files that a reader writes."""
OTHER_OPTIONS = {"--type", "--ff", "--lf", "--strict", "--draws", "--no-deps", "--nproc-per-node"}
"""Of nsys, pytest, mypy, pip and torchrun, and a field of examples/gpt."""


def spans(page: Path) -> list[str]:
    """The code within a page's sentences."""
    return re.findall(r"`([^`\n]+)`", BLOCK.sub("", text_of(page)))


def test_files_that_pages_name_exist() -> None:
    rooms = ("src", "tests", "benchmarks", "examples", "docs")
    files = [*ROOT.glob("*.*"), *(path for room in rooms for path in (ROOT / room).rglob("*.*"))]
    known = {"/".join(path.parts[-depth:]) for path in files for depth in range(1, len(path.parts))}
    named = {
        word for page in PRESENT for word in spans(page) if re.fullmatch(r"[\w./-]+\.(py|cuh?|cpp|h|sql|md|txt)", word)
    }
    made_up = re.compile(r"(?:file|model|train|layer|net|record|scale|\w*_training)\.py")
    assert sorted(word for word in named - known - EXAMPLES if not made_up.fullmatch(word)) == []


def test_names_of_tilewright_in_pages_exist() -> None:
    for page in PRESENT:
        for name in re.findall(r"\btilewright(?:\.\w+)+", " ".join(spans(page))):
            pkgutil.resolve_name(name)


def test_options_that_pages_name_exist() -> None:
    scripts = "".join(map(text_of, [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]))
    known = set(re.findall(r"[\"'](--[a-z0-9-]+)[\"']", scripts)) | OTHER_OPTIONS | {"--help", "--version"}
    for command in COMMAND.commands.values():
        for one in getattr(command, "commands", {"": command}).values():
            known |= {option for parameter in one.params for option in (*parameter.opts, *parameter.secondary_opts)}
    known |= {option for parameter in COMMAND.params for option in parameter.opts}
    named = {option for page in PRESENT for span in spans(page) for option in re.findall(r"(?<!\S)--[a-z0-9-]+", span)}
    assert named - known == set()
