"""mkdocs: README and CONTRIBUTING are pages of the site; a link to a file beside docs/ becomes the file's path.

A page in Chinese has the theme's words in Chinese: the label of the search, the buttons, the language for the browser.
mkdocstrings: examples in docstrings, which begin with `>>>`, are blocks of code.
"""

import os
import re
from pathlib import Path

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# Pages of the site that stand in the root of the repository, where GitHub shows them.
PAGES = {
    "README.md": "index.md",
    "README.zh-CN.md": "index.zh-CN.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"\[([^][]+)\]\(([^()\s]+)\)")


def on_files(files: Files, config) -> Files:
    for name, uri in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, uri, content=linked(text, ROOT, ROOT / "docs")))
    return files


def on_page_markdown(markdown: str, page, config, files) -> str:
    folder = (ROOT / "docs" / page.file.src_uri).parent
    return linked(markdown, folder, folder)


def on_page_context(context, page, config, nav):
    """The language of what the theme writes: pages are rendered one after the other."""
    chinese = re.match(r"(learn/)?zh/|index\.zh-CN", page.file.src_uri)
    config.theme["language"] = "zh" if chinese else "en"
    return context


def linked(text: str, folder: Path, base: Path) -> str:
    """`text`, whose relative links start at `folder`, with those of a page in `base`.

    What is no part of the site is named by its path in the repository.
    """

    def link(found: re.Match[str]) -> str:
        words, target = found.groups()
        path, hash_, anchor = target.partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return found[0]
        file = (folder / path).resolve()
        if (name := str(file.relative_to(ROOT))) in PAGES:
            file = ROOT / "docs" / PAGES[name]
        if not file.is_relative_to(ROOT / "docs"):
            return f"`{name}`" if words in (name, Path(name).name) else f"{words} (`{name}`)"
        return f"[{words}]({os.path.relpath(file, base)}{hash_}{anchor})"

    return LINK.sub(link, text)


class Examples(griffe.Extension):
    """Fences around the examples of docstrings."""

    def on_object(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring is not None:
            paragraphs = obj.docstring.value.split("\n\n")
            fenced = [f"```pycon\n{text}\n```" if text.startswith(">>>") else text for text in paragraphs]
            obj.docstring.value = "\n\n".join(fenced)
