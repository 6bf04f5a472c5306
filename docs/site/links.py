"""Relative links, from where they lead in the repository to where they lead on the site."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from docs.site.pages import place

CODE = re.compile(r"(^ *```.*?^ *```$|`[^`\n]+(?:\n[^`\n]+)*`)", re.MULTILINE | re.DOTALL)
TARGET = re.compile(r"\]\(([^)\s]+)\)")
PICTURES = {".png", ".svg"}


@dataclass
class Links:
    root: Path
    pages: frozenset[str]
    # the URL of the repository's files, up to their paths; if empty, files are copied
    repository: str
    # files of the repository that the site needs, and their places on it
    copies: dict[str, str] = field(default_factory=dict)

    def rewritten(self, page: str, text: str) -> str:
        """Returns the page's text with links as they are on the site, and the repository's URL where it is known. Notes
        the files that the page needs."""
        if self.repository:
            text = text.replace("REPOSITORY_URL", re.split(r"/(?:-/)?(?:blob|src)/", self.repository)[0])
        return outside_code(
            text, lambda part: TARGET.sub(lambda link: f"]({self._link(page, link[1])})", part)
        )

    def _link(self, page: str, target: str) -> str:
        if re.match(r"[a-z]+:", target) or target.startswith("#"):
            return target
        name, mark, anchor = target.partition("#")
        path = os.path.normpath(PurePosixPath(page).parent / name)
        if not (self.root / path).exists():
            raise ValueError(f"{page} links to {target}, which does not exist")
        if path in self.pages:
            return _relative(page, place(path)) + mark + anchor
        if Path(path).suffix in PICTURES:
            self.copies[path] = place(path)
            return _relative(page, place(path))
        if self.repository:
            return f"{self.repository}/{path}{mark}{anchor}"
        # a browser shows it as text; of a folder, it is a list of its files
        self.copies[path] = f"source/{path}" + ("/files.txt" if (self.root / path).is_dir() else ".txt")
        return _relative(page, self.copies[path])


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Returns the text, changed by `change` except for fenced blocks and code spans."""
    parts = CODE.split(text)
    return "".join(part if number % 2 else change(part) for number, part in enumerate(parts))


def _relative(page: str, target: str) -> str:
    return os.path.relpath(target, PurePosixPath(place(page)).parent)
