"""The site has every page, as GitHub shows it, and loads nothing from elsewhere."""

from __future__ import annotations

import html
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

from docs.site import diagrams, llms
from docs.site.__main__ import build
from docs.site.links import Links
from docs.site.markdown import converted
from docs.site.pages import ROOT, Site, place, read

SITE = read(environment={})


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site") / "site"
    assert build(SITE, tmp_path_factory.mktemp("work"), target) == 0
    return target


# ---- all of it, as it is built ----


class Elements(HTMLParser):
    """Counts what a page is made of. `within`: the tag in which it counts."""

    COUNTED = frozenset(("h1", "h2", "h3", "h4", "li", "ol", "ul", "tr", "th", "td", "pre", "img"))

    def __init__(self, text: str, within: str = "") -> None:
        super().__init__()
        self.within = within
        self.is_within = not within
        self.found: Counter[str] = Counter()
        self.feed(text)

    def handle_starttag(self, tag: str, _: object) -> None:
        self.is_within |= tag == self.within
        if self.is_within and tag in self.COUNTED:
            self.found[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        self.is_within &= tag != self.within


@pytest.mark.slow
def test_pages_have_the_elements_that_github_shows(built: Path) -> None:
    reader = MarkdownIt("commonmark").enable("table")
    for page in SITE.pages:
        # diagrams are pictures on the site
        text = diagrams.FENCE.sub("![diagram](diagram.svg)", (ROOT / page).read_text())
        there = (built / place(page)).with_suffix(".html").read_text()
        assert Elements(there, within="article").found == Elements(reader.render(text)).found, page


@pytest.mark.slow
def test_links_and_anchors_of_the_site_lead_somewhere(built: Path) -> None:
    texts = {path: path.read_text() for path in built.rglob("*.html") if path.name != "404.html"}
    anchors = {path: set(re.findall(r'\bid="?([^" >]+)', text)) for path, text in texts.items()}
    num_links = 0
    for path, text in texts.items():
        for target in map(html.unescape, re.findall(r'(?:href|src)="?([^" >]+)', text)):
            if re.match("[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            file = (path.parent / name).resolve() if name else path
            file = file / "index.html" if file.is_dir() else file
            assert file.exists(), (path, target)
            # the generator numbers lines of code with `__`
            assert not anchor or anchor.startswith("__") or anchor in anchors[file], (path, target)
            num_links += 1
    assert num_links > 1000


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(built: Path) -> None:
    tags = re.compile(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?((?:https?:)?//[^\" >]+)")
    for path in [*built.rglob("*.html"), *built.rglob("*.css"), *built.rglob("*.svg")]:
        text = path.read_text()
        assert not tags.findall(text), path
        assert not re.search(r"url\(\"?(https?:)?//", text), path


@pytest.mark.slow
def test_each_page_has_its_markdown_and_can_be_searched(built: Path) -> None:
    index = (built / "llms.txt").read_text()
    found = (built / "search.json").read_text()
    for page in SITE.pages:
        twin = built / place(page)
        assert twin.exists() and f"]({place(page)})" in index
        assert twin.with_suffix(".html").name in found
        for target in re.findall(r"\]\(([^)\s]+\.md)[#)]", twin.read_text()):
            assert target.startswith("http") or (twin.parent / target).exists(), (page, target)


# ---- its parts ----


def test_each_page_has_one_place() -> None:
    places = [place(page).lower() for page in SITE.pages]
    assert len(set(places)) == len(places)


def test_pages_that_no_section_names_are_an_error(tmp_path: Path) -> None:
    for page in [*SITE.pages, "docs/new.md"]:
        (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / page).write_text("# A page")
    with pytest.raises(ValueError, match=re.escape("no section for: docs/new.md")):
        read(tmp_path)
    (tmp_path / "docs/new.md").unlink()
    (tmp_path / "docs/glossary.md").unlink()
    with pytest.raises(ValueError, match=re.escape("do not exist: docs/glossary.md")):
        read(tmp_path)


def test_links_lead_into_the_repository(tmp_path: Path) -> None:
    text = "[a](../gpu.md#what-was-measured) [b](../../deploy/keep.sh) [c](https://x.org/) `[d](e.md)`"
    links = Links(ROOT, frozenset(SITE.pages), "https://code.example.org/blob/main")
    assert links.rewritten("docs/guides/sizing.md", text) == (
        "[a](../gpu.md#what-was-measured) [b](https://code.example.org/blob/main/deploy/keep.sh)"
        " [c](https://x.org/) `[d](e.md)`"
    )
    assert not links.copies


def test_the_command_that_clones_has_the_url_of_the_repository_where_it_is_known() -> None:
    text = "```sh\ngit clone REPOSITORY_URL alignedserve\n```"
    known = Links(ROOT, frozenset(SITE.pages), "https://code.example.org/me/it/blob/main")
    assert "git clone https://code.example.org/me/it alignedserve" in known.rewritten("README.md", text)
    assert Links(ROOT, frozenset(SITE.pages), "").rewritten("README.md", text) == text
    assert "git clone REPOSITORY_URL " in (ROOT / "README.md").read_text()


def test_files_are_copied_where_no_repository_is_known() -> None:
    links = Links(ROOT, frozenset(SITE.pages), "")
    assert links.rewritten("docs/gpu.md", "[a](../deploy/keep.sh) ![b](page.png) [c](../tests/clients)") == (
        "[a](source/deploy/keep.sh.txt) ![b](page.png) [c](source/tests/clients/files.txt)"
    )
    assert links.copies.keys() == {"deploy/keep.sh", "docs/page.png", "tests/clients"}
    with pytest.raises(ValueError, match=r"docs/gpu\.md links to none\.md"):
        links.rewritten("docs/gpu.md", "[a](none.md)")


def test_the_repository_is_one_setting() -> None:
    assert (
        read(environment={"DOCS_REPOSITORY": "https://code.example.org/"}).repository
        == "https://code.example.org"
    )


@pytest.mark.parametrize(
    ("github", "python_markdown"),
    [
        ("Text:\n- a\n- b", "Text:\n\n- a\n- b"),
        ("1. a\n   b\n2. c", "1. a\n    b\n2. c"),
        ("1. a:\n\n   ```sh\n     x\n   ```\n2. b", "1. a:\n\n    ```sh\n      x\n    ```\n\n2. b"),
        ("- a\n  - b\n\nend", "- a\n\n    - b\n\nend"),
        ("- a\n  - b\n  - c\n- d\n  - e", "- a\n\n    - b\n    - c\n\n- d\n\n    - e"),
        ("```\n1. a\n   b\n```", "```\n1. a\n   b\n```"),
    ],
)
def test_lists_are_written_as_the_generator_reads_them(github: str, python_markdown: str) -> None:
    assert converted(github) == python_markdown


def test_diagrams_are_drawn() -> None:
    drawn = diagrams.drawn("sequenceDiagram\n  participant a\n  participant b\n  a->>b: Go: <now>\n")
    texts = [element.text for element in ElementTree.fromstring(drawn).iter() if element.tag.endswith("text")]
    assert texts == ["a", "b", "Go: <now>"]
    chart = 'flowchart TD\n subgraph l0["top"]\n a_box["a"]\n b_box["b"]\n end\n a_box --> b_box\n'
    assert "marker-end" in diagrams.drawn(chart)
    with pytest.raises(ValueError, match="gantt"):
        diagrams.drawn("gantt\n")
    with pytest.raises(ValueError, match="no line of a flowchart"):
        diagrams.drawn("flowchart TD\n a -.-> b\n")


def test_the_index_for_programs_has_each_pages_first_sentence() -> None:
    site = Site("Name", "What it is.", "", SITE.sections[:1])
    texts = dict.fromkeys(site.pages, "# Title\n\n![a](b)\n\nThis is [it](c.md). More.\n")
    assert "- [Title](quickstart.md): This is it.\n" in llms.index(site, texts)
