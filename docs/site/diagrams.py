"""The two kinds of Mermaid diagrams that pages have, as SVG.

GitHub draws Mermaid itself. A browser needs a script of 3 MB for it, which generators load from another site.
"""

from __future__ import annotations

import re
from html import escape
from typing import NamedTuple

FENCE = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">'
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    '<path d="M0 0L8 4L0 8z" fill="#456"/></marker></defs>'
    '<rect width="{width}" height="{height}" fill="#fff"/>'
)


class Message(NamedTuple):
    sender: str
    receiver: str
    text: str


def drawn(mermaid: str) -> str:
    """Returns an SVG. Raises ValueError for another kind of diagram, or for a line that has no place in it."""
    kind, *lines = [line.strip() for line in mermaid.strip().split("\n")]
    if kind == "sequenceDiagram":
        return _sequence(lines)
    if kind == "flowchart TD":
        return _flowchart(lines)
    raise ValueError(f"no diagram of the kind {kind!r} can be drawn")


def _sequence(lines: list[str]) -> str:
    names = [line.split()[1] for line in lines if line.startswith("participant ")]
    messages = [_message(line) for line in lines if not line.startswith("participant ")]
    step, top, row = 230, 40, 34
    x = {name: step // 2 + step * number for number, name in enumerate(names)}
    width, height = step * len(names), top + row * (len(messages) + 1)
    parts = [HEAD.format(width=width, height=height)]
    for name in names:
        parts.append(_box(x[name], 16, name))
        parts.append(f'<path d="M{x[name]} 30V{height - 8}" stroke="#bcc" stroke-dasharray="3 3"/>')
    for number, (sender, receiver, text) in enumerate(messages):
        y = top + row * (number + 1)
        parts.append(_arrow(x[sender], y, x[receiver], y))
        # over the arrow, as far as the picture's edges allow
        half = 3.3 * len(text)
        middle = min(max((x[sender] + x[receiver]) / 2, half + 4), width - half - 4)
        parts.append(_text(middle, y - 6, text))
    return "".join(parts) + "</svg>\n"


def _message(line: str) -> Message:
    found = re.fullmatch(r"(\w+)->>(\w+): (.*)", line)
    if not found:
        raise ValueError(f"no message of a sequence diagram: {line!r}")
    return Message(*found.groups())


def _flowchart(lines: list[str]) -> str:
    layers: list[tuple[str, list[str]]] = []
    labels: dict[str, str] = {}
    arrows: list[tuple[str, str]] = []
    for line in lines:
        if found := re.fullmatch(r'subgraph \w+\["(.*)"\]', line):
            layers.append((found[1], []))
        elif found := re.fullmatch(r'(\w+)\["(.*)"\]', line):
            layers[-1][1].append(found[1])
            labels[found[1]] = found[2]
        elif found := re.fullmatch(r"(\w+) --> (.*)", line):
            arrows += [(found[1], to) for to in found[2].split(" & ")]
        elif line != "end":
            raise ValueError(f"no line of a flowchart: {line!r}")
    step, row, left = 150, 96, 110
    width = left + step * max(len(names) for _, names in layers)
    height = row * len(layers)
    parts, at = [HEAD.format(width=width, height=height)], dict[str, tuple[float, float]]()
    for number, (title, names) in enumerate(layers):
        y = row * number
        parts.append(f'<rect y="{y + 3}" width="{width}" height="{row - 6}" fill="#f3f6f8"/>')
        parts.append(_text(8, y + row // 2 + 4, title, anchor="start"))
        gap = (width - left) / len(names)
        for place, name in enumerate(names):
            # neighbours are a little higher and lower, so that arrows within a layer have room
            at[name] = (left + gap * (place + 0.5), y + row / 2 + (-18 if place % 2 else 18))
    layer_of = {name: number for number, (_, names) in enumerate(layers) for name in names}
    for sender, receiver in arrows:
        (x1, y1), (x2, y2) = at[sender], at[receiver]
        if layer_of[sender] == layer_of[receiver]:
            # from side to side
            right = 1 if x2 > x1 else -1
            x1, x2 = x1 + right * _width(labels[sender]) / 2, x2 - right * _width(labels[receiver]) / 2
        else:
            down = 14 if y2 > y1 else -14
            y1, y2 = y1 + down, y2 - down
        parts.append(_arrow(x1, y1, x2, y2))
    parts += [_box(*at[name], label) for name, label in labels.items()]
    return "".join(parts) + "</svg>\n"


def _width(label: str) -> int:
    return 8 * len(label) + 18


def _box(x: float, y: float, label: str) -> str:
    width = _width(label)
    return (
        f'<rect x="{x - width / 2:g}" y="{y - 14:g}" width="{width}" height="28" rx="4" fill="#e3ecf3" stroke="#456"/>'
        + _text(x, y + 4, label)
    )


def _arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke="#456" fill="none" marker-end="url(#tip)"/>'


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="#123">{escape(text)}</text>'
