"""Draws the two pictures of architecture.md, which `make picture` puts between their markers.

The first one is read off the source: which folder of the package imports which. An arrow that a longer way implies is
left out. Folders that import each other share a box, and so do the single modules that everything stands on. Only the
layers are said here; a test (tests/test_picture.py) holds that no arrow points up.

The second one is written here, and the test holds that its messages are sent and heard where it says so.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "alignedserve"
PAGE = ROOT / "docs/architecture.md"

# from above to below
LAYERS = {
    "commands": ("cli", "launch", "bench", "vopr", "sim"),
    "front ends": ("gateway", "batch", "store", "lengths", "offline", "demo"),
    "instances": ("prefill_worker", "decode_worker", "instance", "transport"),
    "decisions": ("router", "kvpool"),
    "policies": ("scheduling",),
    "the engine": ("engine", "models", "ops", "text", "kernels"),
    "base": ("protocol", "kv", "timing", "process", "base"),
}
# modules that are no folder and not of the base
SINGLE = {"__main__": "cli"}

Graph = Mapping[str, Set[str]]


# ---- who imports whom -----------------------------------------------------------------------------------------------


def rooms() -> dict[str, list[Path]]:
    """The files of each box."""
    found: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.iterdir()):
        if (path / "__init__.py").exists():
            found[path.name] = sorted(path.resolve().rglob("*.py"))
        elif path.suffix == ".py" and path.stem != "__init__":
            found.setdefault(SINGLE.get(path.stem, "base"), []).append(path)
    return found


def imports() -> dict[str, set[str]]:
    """What each box imports of the others. All imports count, those within functions too."""
    files = rooms()
    exported = dict(_exported())
    return {
        room: {_room_of(name, files, exported) for path in paths for name in imported(path)} - {room}
        for room, paths in files.items()
    }


def imported(path: Path) -> Iterator[str]:
    """Names below `alignedserve`: of modules, or of what the package itself exports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "alignedserve":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("alignedserve."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            names = (alias.name.split(".") for alias in node.names)
            yield from (name[1] for name in names if name[0] == "alignedserve" and len(name) > 1)


def _exported() -> Iterator[tuple[str, str]]:
    """Name, and the module that it is from."""
    for node in ast.walk(ast.parse((PACKAGE / "__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("alignedserve."):
            yield from ((alias.name, node.module.split(".")[1]) for alias in node.names)


def _room_of(name: str, files: Mapping[str, list[Path]], exported: Mapping[str, str]) -> str:
    module = exported.get(name, name)
    return module if module in files else SINGLE.get(module, "base")


# ---- graphs ---------------------------------------------------------------------------------------------------------


def reachable(graph: Graph, start: str) -> set[str]:
    """Without the start, unless a circle leads back to it."""
    found: set[str] = set()
    ahead = set(graph[start])
    while ahead:
        node = ahead.pop()
        found.add(node)
        ahead |= graph[node] - found
    return found


def circles(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Each node, with those that it reaches and that reach it."""
    reach = {node: reachable(graph, node) for node in graph}
    return {
        node: tuple(sorted({node} | {other for other in reach[node] if node in reach[other]}))
        for node in graph
    }


def reduced(graph: Graph) -> dict[str, set[str]]:
    """Without the edges that a longer way implies. The graph has no circles."""
    return {
        node: {
            to
            for to in found
            if not any(to in reachable(graph, between) for between in found if between != to)
        }
        for node, found in graph.items()
    }


def boxes() -> dict[tuple[str, ...], set[tuple[str, ...]]]:
    """The picture's boxes, with the arrows that are left."""
    graph = imports()
    circle = circles(graph)
    names = {room: ", ".join(circle[room]) for room in graph}
    merged: dict[str, set[str]] = {name: set() for name in names.values()}
    for room, found in graph.items():
        merged[names[room]] |= {names[to] for to in found} - {names[room]}
    by_name = {names[room]: circle[room] for room in graph}
    return {by_name[name]: {by_name[to] for to in found} for name, found in reduced(merged).items()}


# ---- a request's way ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    sender: str
    receiver: str
    message: str
    what: str


WAY = (
    Step("gateway", "router", "Submit", "tokens, objectives, predicted length"),
    Step("router", "kvpool", "Reserve", "blocks for its KV"),
    Step("kvpool", "router", "Reserved", ""),
    Step("router", "prefill_worker", "Prefill", "compute it and save its KV to the pool"),
    Step("prefill_worker", "router", "PrefillReport", "first token, KV held, KV saved"),
    Step("router", "gateway", "Tokens", ""),
    Step("router", "kvpool", "Commit", "the request is a candidate"),
    Step("router", "kvpool", "FormBatch", "form a batch for a decode instance"),
    Step("kvpool", "router", "Candidates", "requests of similar length"),
    Step("router", "prefill_worker", "Stage", "with a link: load KV that will be pulled"),
    Step("router", "decode_worker", "Offer", "admit when there is room"),
    Step("decode_worker", "router", "DecodeReport", "admissions, and a token per request"),
    Step("router", "kvpool", "MakeSpare", "the pool's copy may be dropped"),
    Step("router", "gateway", "Tokens", ""),
    Step("router", "decode_worker", "Evict", "when blocks run short: back to the pool, then Commit"),
    Step("router", "kvpool", "Release", "when the answer is complete"),
)


# ---- drawing --------------------------------------------------------------------------------------------------------


def draw_imports() -> str:
    found = boxes()
    lines = ["flowchart TD"]
    for number, (layer, members) in enumerate(LAYERS.items()):
        lines.append(f'  subgraph layer{number}["{layer}"]')
        lines += [f'    {_id(box)}["{", ".join(box)}"]' for box in found if box[0] in members]
        lines.append("  end")
    lines += [f"  {_id(box)} --> {' & '.join(map(_id, sorted(to)))}" for box, to in found.items() if to]
    return "\n".join(lines)


def _id(box: tuple[str, ...]) -> str:
    return f"{box[0]}_box"


def draw_way() -> str:
    lines = ["sequenceDiagram"]
    lines += [f"  participant {room}" for room in dict.fromkeys(step.sender for step in WAY)]
    for step in WAY:
        what = f": {step.what}" if step.what else ""
        lines.append(f"  {step.sender}->>{step.receiver}: {step.message}{what}")
    return "\n".join(lines)


PICTURES = {"imports": draw_imports, "way": draw_way}


def with_pictures(page: str) -> str:
    """The page, with the pictures as they are now. Raises ValueError for a page that lacks a marker."""
    for name, draw in PICTURES.items():
        between = re.compile(rf"(?<=<!-- picture: {name} -->\n).*?(?=<!-- end of picture -->)", re.DOTALL)
        if not between.search(page):
            raise ValueError(f"{PAGE.name} has no markers of the picture {name}")
        page = between.sub(f"```mermaid\n{draw()}\n```\n", page, count=1)
    return page


if __name__ == "__main__":
    PAGE.write_text(with_pictures(PAGE.read_text()))
