"""What programs read: `llms.txt`, and each page's Markdown."""

from __future__ import annotations

import re

from docs.site.pages import Site, place, title

# a page's first paragraph of prose
PARAGRAPH = re.compile(r"\n\n((?![#|<!`>-])[^\n](?:.|\n(?!\n))*)")
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


def index(site: Site, texts: dict[str, str]) -> str:
    """Returns `llms.txt`: each page's link, title and first sentence."""
    lines = [f"# {site.name}", "", f"> {site.description}", ""]
    lines += ["Each page exists as HTML too: its link ends in `.html` in place of `.md`.", ""]
    for section in site.sections:
        lines += [f"## {section.title}", ""]
        lines += [
            f"- [{title(texts[page])}]({place(page)}): {summary(texts[page])}" for page in section.pages
        ]
        lines.append("")
    return "\n".join(lines)


def summary(text: str) -> str:
    """Returns a page's first sentence, without links; empty if it begins with something else."""
    found = PARAGRAPH.search(text)
    prose = LINK.sub(r"\1", " ".join(found[1].split())).replace("**", "") if found else ""
    return re.split(r"(?<=[.!?:])\s", prose)[0].rstrip(":")
