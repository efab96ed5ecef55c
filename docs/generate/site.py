"""Hooks of MkDocs: the pages of ``docs/`` as a site, as they are (``make site``).

Pages link to files outside ``docs/``. Those that are pages themselves become pages of the site,
README.md its first one; of sources and pictures the site has a copy under ``source/``.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File

from docs.generate.sources import PICTURES, SHOWN, source_text

ROOT = Path(__file__).parents[2]
_OUTSIDE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/mutation/README.md")
_LINK = re.compile(r"\]\(([^)#:\s]+)(#[^)]*)?\)")
# The word behind a language, as in ```python new=passes/squares.py, says where the text belongs.
_FENCE = re.compile(r"^```(\w+) \w+=(\S+)$", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside ``docs/``, and whatever pages link to."""
    for path in _OUTSIDE:
        text = (ROOT / path).read_text(encoding="utf-8")
        files.append(File.generated(config, _address(path), content=text))
    for page in list(files.documentation_pages()):
        for link, _ in _LINK.findall(page.content_string):
            _add(_repository_path(page.src_uri, link), files, config)
    return files


def _add(path: str, files: Any, config: Any) -> None:
    """Add a source file, or the files of a folder with a page that lists them."""
    address, file = _address(path), ROOT / path
    if not address.startswith("source/") or files.get_file_from_path(address):
        return
    if file.suffix in PICTURES:
        files.append(File.generated(config, address, abs_src_path=str(file)))
        return
    if file.is_dir():
        members = sorted(each for each in file.iterdir() if each.suffix in SHOWN)
        text = "\n".join(f"- [{each.name}]({file.name}/{each.name}.md)" for each in members)
    else:
        members = []
        text = source_text(file)
    files.append(File.generated(config, address, content=f"# {path}\n\n{text}\n"))
    for member in members:
        _add(member.relative_to(ROOT).as_posix(), files, config)


def on_post_build(config: Any) -> None:
    """Remove the page of servers for wrong addresses, which finds nothing if opened as a file."""
    Path(config["site_dir"], "404.html").unlink()


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrite links to where the site has the file."""
    here = page.file.src_uri
    if here.startswith("source/"):
        return markdown

    def link(found: re.Match[str]) -> str:
        address = _address(_repository_path(here, found[1]))
        relative = os.path.relpath(address, PurePosixPath(here).parent)
        return f"]({relative}{found[2] or ''})"

    return _FENCE.sub(r'```\1 title="\2"', _LINK.sub(link, markdown))


def _repository_path(page: str, link: str) -> str:
    """Return the file that a page of the site links to, as a path in the repository."""
    outside = {_address(path): path for path in _OUTSIDE}
    origin = PurePosixPath(outside.get(page, f"docs/{page}"))
    return os.path.normpath(origin.parent / link)


def _address(path: str) -> str:
    """Return the place of a file of the repository in the site."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/") or path in _OUTSIDE:
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(PICTURES) else f"source/{path}.md"
