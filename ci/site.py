"""Hook of mkdocs: files outside of ``docs/`` to which pages link become part of the site.

Pages link to files of the repository as GitHub resolves them: ``../configs/1e1pd.yaml``. The site
has a copy of each such file under ``repository/``, a listing of each such folder, and a page for
each Markdown file. The site therefore needs no address of the repository, and no network.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = "repository"
"""Folder of the site with what is not below docs/."""

ALWAYS = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Pages of the navigation outside of docs/."""

LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
FENCE = re.compile(r"^ *```.*?^ *```$|`[^`\n]+`", re.DOTALL | re.MULTILINE)


def source_of(uri: str) -> str:
    """Return the path in the repository of a page of the site."""
    inside, _, path = uri.partition("/")
    return path if inside == OUTSIDE else f"docs/{uri}"


def uri_of(path: str) -> str:
    """Return the source URI, within the site, of a file or folder of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        path = posixpath.join(path, "README.md")
    return f"{OUTSIDE}/{path}"


def targets(text: str, page: str) -> Iterator[str]:
    """Yield the files and folders of the repository to which the text of a page links."""
    for match in LINK.finditer(FENCE.sub("", text)):
        yield posixpath.normpath(posixpath.join(posixpath.dirname(page), match[2]))


def listing(folder: str) -> str:
    """Return a page with links to the files of a folder that has no README."""
    names = sorted(each.name for each in (ROOT / folder).iterdir() if not each.name.startswith("."))
    return "\n".join([f"# {folder}", "", *(f"- [{name}]({name})" for name in names), ""])


def text_of(path: str) -> str | None:
    """Return the Markdown of a page, written or listed; None for another file."""
    place = ROOT / path
    if place.is_dir():
        readme = place / "README.md"
        return readme.read_text("utf-8") if readme.exists() else listing(path)
    return place.read_text("utf-8") if path.endswith(".md") else None


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the linked files outside of ``docs/``, and those to which these link."""
    waiting = [source_of(each.src_uri) for each in files.documentation_pages()]
    waiting += ALWAYS
    seen = set[str]()
    while waiting:
        path = waiting.pop()
        if path in seen or not (ROOT / path).exists():
            continue
        seen.add(path)
        text = text_of(path)
        if files.get_file_from_path(uri_of(path)) is None:
            content = (ROOT / path).read_bytes() if text is None else text
            files.append(File.generated(config, uri_of(path), content=content))
        page = f"{path}/README.md" if (ROOT / path).is_dir() else path
        waiting += targets(text or "", page)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between files of the site."""
    uri = page.file.src_uri
    source = source_of(uri)

    def mended(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        if not (ROOT / path).exists():
            return match[0]  # mkdocs reports it.
        return f"{match[1]}{os.path.relpath(uri_of(path), posixpath.dirname(uri))}{match[3]}"

    return LINK.sub(mended, markdown)
