"""Which pages the site has, in which order, and where."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# those whose name alone would not be theirs on the site
PLACES = {
    "README.md": "index.md",
    "SECURITY.md": "reporting_vulnerabilities.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
}
# folders of pages, and what they are called on the site
FOLDERS = {"docs/": "", "benchmarks/results/": "results/"}


@dataclass(frozen=True)
class Section:
    title: str
    # paths in the repository
    pages: tuple[str, ...]


@dataclass(frozen=True)
class Site:
    name: str
    description: str
    # the URL of the repository's files, up to their paths; empty if there is none
    repository: str
    sections: tuple[Section, ...]

    @property
    def pages(self) -> list[str]:
        return [page for section in self.sections for page in section.pages]


def read(root: Path = ROOT, environment: Mapping[str, str] = os.environ) -> Site:
    """Returns the site of `site.toml`. Raises ValueError if a page is in no section, in two, or missing."""
    settings = tomllib.loads((Path(__file__).parent / "site.toml").read_text())
    named = [page for section in settings["section"] for page in section["pages"]]
    sections = tuple(
        Section(section["title"], (*section["pages"], *_rest(section, root, named)))
        for section in settings["section"]
    )
    repository = environment.get("DOCS_REPOSITORY") or settings["repository"]
    site = Site(settings["name"], settings["description"], repository.rstrip("/"), sections)
    _check(site, root)
    return site


def place(path: str) -> str:
    """Returns where a page or picture of the repository is on the site."""
    if path in PLACES:
        return PLACES[path]
    for folder, name in FOLDERS.items():
        if path.startswith(folder):
            return re.sub(r"(^|/)README\.md$", r"\1index.md", name + path.removeprefix(folder))
    return path


def title(text: str) -> str:
    """Returns a page's first heading, without marks."""
    found = re.search(r"^# (.+)$", text, re.MULTILINE)
    if not found:
        raise ValueError("a page has no title")
    return re.sub(r"[`*]", "", found[1])


def _rest(section: Mapping[str, str], root: Path, named: list[str]) -> list[str]:
    if "rest" not in section:
        return []
    files = (root / section["rest"]).glob("*.md")
    names = [str(path.relative_to(root)) for path in files]
    left = [name for name in names if name not in named]
    # decision records are in the order of their numbers
    return (
        sorted(left) if section["rest"].endswith("adr") else sorted(left, key=lambda name: _title(root, name))
    )


def _title(root: Path, name: str) -> str:
    return title((root / name).read_text()).lower()


def _check(site: Site, root: Path) -> None:
    if missing := [page for page in site.pages if not (root / page).exists()]:
        raise ValueError(f"site.toml names pages that do not exist: {', '.join(missing)}")
    if twice := {page for page in site.pages if site.pages.count(page) > 1}:
        raise ValueError(f"site.toml has pages in two sections: {', '.join(sorted(twice))}")
    found = {str(path.relative_to(root)) for path in (root / "docs").rglob("*.md")}
    if unnamed := found - set(site.pages):
        raise ValueError(f"site.toml has no section for: {', '.join(sorted(unnamed))}")


def anchor(text: str, separator: str) -> str:
    """Returns a heading's anchor, as GitHub forms it."""
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", separator)
