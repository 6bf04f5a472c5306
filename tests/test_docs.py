"""What the pages for users say is there: flags and their defaults, links, metrics, endpoints, parameters, messages."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import click
import pytest
import yaml
from fastapi import FastAPI
from starlette.routing import Match

from alignedserve.cli.main import cli
from alignedserve.gateway.anthropic.batches import message_batch_routes
from alignedserve.gateway.app import create_app
from alignedserve.gateway.endpoints import IN_BATCHES
from alignedserve.gateway.openai.batch_jobs.files import file_routes
from alignedserve.gateway.openai.batch_jobs.routes import batch_routes
from alignedserve.gateway.openai.bodies import ChatBody, CompletionBody
from alignedserve.gateway.openai.responses.routes import response_routes
from alignedserve.gateway.telemetry.exposition import metrics_route
from docs import flags as page_of_flags
from tests import frozen
from tests.deploy.test_grafana import exposed

ROOT = Path(__file__).parents[1]
GLOSSARY, CONTRIBUTING = ROOT / "docs/glossary.md", ROOT / "CONTRIBUTING.md"
ARCHITECTURE, ADDING_A_MODEL = ROOT / "docs/architecture.md", ROOT / "docs/adding_a_model.md"
HOW_IT_WORKS = sorted((ROOT / "docs/how_it_works").glob("*.md"))
PAGES = [ROOT / "README.md", CONTRIBUTING, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
RESULTS = sorted((ROOT / "benchmarks/results").glob("*.md"))
API = ROOT / "docs/reference/api.md"
HAVE_DEFAULTS = {API, ROOT / "docs/guides/memory_and_instances.md"}
MESSAGES, METRICS = ROOT / "docs/reference/messages.md", ROOT / "docs/reference/metrics.md"
CODE = ["alignedserve", "router", "kvpool", "prefill_worker", "decode_worker", "kernels", "deploy"]

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
SPAN = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
# up to a comment, the next command, or where it is part of a sentence
COMMAND = re.compile(r"(?<![\w/-])(?<!from )(?:alignedserve |python (?:-m )?benchmarks[./])[^#;|`]*")
DEFAULT = re.compile(r"`(--[a-z0-9-]+)[^`]*` \((?:[^)]*, )?default: ([^);]+)[);]")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def test_the_headline_is_the_same_everywhere() -> None:
    [headline] = re.findall(r"^\*\*(.+)\.\*\*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    site = tomllib.loads((ROOT / "docs/site/site.toml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((ROOT / "deploy/helm/Chart.yaml").read_text())
    assert [each["description"] for each in (site, project, chart)] == [f"{headline}.", headline, headline]


# ---- what there is ----


@cache
def flags_of(*words: str) -> dict[str, Any]:
    """Of a command, with their defaults."""
    command: click.Command = cli
    for word in words:
        assert isinstance(command, click.Group), f"{' '.join(words)}: there is no such command"
        found = command.get_command(click.Context(command), word)
        assert found, f"{' '.join(words)}: there is no such command"
        command = found
    options = [each for each in command.params if isinstance(each, click.Option)]
    flags = {flag: option.default for option in options for flag in (*option.opts, *option.secondary_opts)}
    # it passes on what is not its own
    return flags | (flags_of("serve") if words == ("batch", "run") else {})


@cache
def flags_of_benchmark(name: str) -> frozenset[str]:
    """`name`: of a module; those of the module alone, or of a package's main one."""
    path = ROOT / name.replace(".", "/")
    file = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    source = frozen.source_of(name) if name in frozen.NAMES else file.read_text()
    if source is None:
        pytest.skip(f"{frozen.COMMIT} is not in this copy")
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    adding = [call for call in calls if getattr(call.func, "attr", "") == "add_argument"]
    arguments = [arg for call in adding for arg in call.args]
    named = {arg.value for arg in arguments if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
    # the harness adds an option for each keyword
    shared = [call for call in calls if getattr(call.func, "id", "") == "parser_of"]
    return frozenset(named | {f"--{keyword.arg}" for call in shared for keyword in call.keywords})


def known_flags(command: str) -> frozenset[str]:
    """Of a command as it is written."""
    words = command.split()
    if words[0] == "python":
        name = next(word for word in words[1:] if word != "-m").removesuffix(".py").replace("/", ".")
        return flags_of_benchmark(name)
    path: list[str] = []
    group: Any = cli
    for word in words[1:]:
        if not isinstance(group, click.Group) or not re.fullmatch("[a-z-]+", word) or word.startswith("-"):
            break
        path.append(word)
        group = group.get_command(click.Context(group), word)
    return frozenset(flags_of(*path)) | {"--help"}


@cache
def app() -> FastAPI:
    """With all of its routes, and nothing behind them."""
    store, runner = Mock(), Mock()
    routers = [
        file_routes(store, Mock(), 1),
        batch_routes(store, runner, IN_BATCHES, Mock(), Mock()),
        message_batch_routes(store, Mock(), runner, Mock(), 1),
        metrics_route(Mock(), Mock()),
    ]
    routers.append(response_routes(Mock(), store.responses, Mock()))
    return create_app(Mock(), Mock(), routers=routers)


@cache
def said_in_code() -> list[str]:
    """All strings, and those parts of f-strings that are always the same."""
    files = [file for folder in CODE for file in (ROOT / folder).rglob("*.py")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


# ---- what is said ----


def blocks(page: Path) -> Iterator[str]:
    """Paragraphs, tables and list items, without what is in fences."""
    for block in re.split(r"\n\s*\n", FENCE.sub("\n\n", page.read_text())):
        yield from re.split(r"\n(?=- )", block)


def fenced_lines(page: Path) -> Iterator[str]:
    for fence in FENCE.findall(page.read_text()):
        yield from fence.split("\n")[1:-1]


def code_of(page: Path) -> Iterator[str]:
    yield from fenced_lines(page)
    for block in blocks(page):
        yield from (" ".join(span.split()) for span in SPAN.findall(block))


def tables(page: Path) -> Iterator[list[list[str]]]:
    for block in blocks(page):
        if block.startswith("|"):
            yield [[cell.strip() for cell in row.strip("|").split("|")] for row in block.strip().split("\n")]


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


# ---- flags ----


@each_page
def test_commands_have_the_flags_that_they_are_given(page: Path) -> None:
    for code in code_of(page):
        for command in COMMAND.findall(code):
            unknown = set(FLAG.findall(command)) - known_flags(command)
            assert not unknown, f"{command!r} has no {unknown}"


@each_page
def test_flags_by_themselves_are_those_of_serve_or_of_a_command_named_beside_them(page: Path) -> None:
    for block in blocks(page):
        spans = [" ".join(span.split()) for span in SPAN.findall(block)]
        commands = [command for span in spans for command in COMMAND.findall(span)]
        known = {*flags_of("serve"), *(flag for command in commands for flag in known_flags(command))}
        unknown = {flag for span in spans if span.startswith("--") for flag in FLAG.findall(span)} - known
        assert not unknown, block


@each_page
def test_no_flag_is_mentioned_outside_code(page: Path) -> None:
    """Where the others would not look."""
    for block in blocks(page):
        assert not FLAG.findall(SPAN.sub("", block)), block


@each_page
def test_defaults_are_those_of_serve(page: Path) -> None:
    known, said = flags_of("serve"), []
    for head, _, *rows in tables(page):
        if head[:2] == ["flag", "default"]:
            said += [(row[0].strip("`"), row[1]) for row in rows]
    for block in blocks(page):
        said += DEFAULT.findall(block)
    assert said or page not in HAVE_DEFAULTS
    for flag, text in said:
        assert flag in known
        default = known[flag]
        # what depends on other things, and what is off, has no default to tell
        has_none = default is None or default is False or default == ()
        assert text == ("" if has_none else _as_said(default)), flag


def _as_said(default: Any) -> str:
    """Objectives are floats that nobody writes as such."""
    return f"{default:g}" if isinstance(default, float) and default >= 50 else str(default)


def test_the_page_of_flags_is_as_the_commands_are() -> None:
    assert page_of_flags.PAGE.read_text() == page_of_flags.text(), "make flags"


def test_the_page_of_flags_names_every_option() -> None:
    """Also those with one letter, in the command's own section or among those that it shares with `serve`."""
    sections = page_of_flags.PAGE.read_text().split("\n## ")[1:]
    commands: list[tuple[tuple[str, ...], click.Command]] = [((), cli)]
    while commands:
        words, command = commands.pop()
        if isinstance(command, click.Group):
            context = click.Context(command)
            names = command.list_commands(context)
            commands += [((*words, name), command.get_command(context, name)) for name in names]  # type: ignore[misc]
            continue
        (section,) = [each for each in sections if each.startswith(f"`{' '.join(('alignedserve', *words))}`")]
        shares_all = "It also takes the options of `alignedserve serve`." in section
        options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
        missing = {name for each in options for name in each.opts if f"{name}`" not in section}
        assert not missing - (set(flags_of("serve")) if shares_all else set()), words


# ---- all else ----


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if not target.startswith(("http://", "https://")):
            name, _, anchor = target.partition("#")
            path = page.parent / name if name else page
            assert path.exists(), target
            assert not anchor or anchor in anchors(path), target


@pytest.mark.parametrize(
    "page", [GLOSSARY, CONTRIBUTING, ARCHITECTURE, ADDING_A_MODEL, *HOW_IT_WORKS], ids=lambda page: page.name
)
def test_files_are_there(page: Path) -> None:
    """Files and folders, by their whole paths or those within the package. A name alone stands for one named before."""
    text = FENCE.sub("", page.read_text())
    named = {span for span in SPAN.findall(text) if re.fullmatch(r"[\w/]+/[\w.]+(\.\w+|/)", span)}
    missing = {name for name in named if not any((root / name).exists() for root in (ROOT, ROOT / CODE[0]))}
    assert len(named) > (0 if page in HOW_IT_WORKS else 10)
    assert missing <= {"alignedserve/scheduling/policies/NAME.py"}


@pytest.mark.parametrize(("name", "most"), [("README.md", 119), ("docs/architecture.md", 200)])
def test_pages_that_are_read_first_are_short(name: str, most: int) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= most


def test_each_word_of_the_glossary_has_a_file() -> None:
    entries = [block for block in blocks(GLOSSARY) if block.startswith("**")]
    assert len(entries) > 15
    assert all(re.search(r"`[\w/]+\.py`", entry) for entry in entries)


def test_metrics_are_exported() -> None:
    said = {name for page in PAGES for name in re.findall(r"alignedserve:\w+", page.read_text())}
    assert len(said) > 10 and not said - exposed().keys()


def test_each_metric_is_told_of() -> None:
    """By the name of its family or, of a counter, of its samples."""
    said = set(re.findall(r"alignedserve:\w+", METRICS.read_text()))
    endings = re.compile("_(bucket|sum|count|created|total)$")
    assert {endings.sub("", name) for name in exposed()} <= {endings.sub("", name) for name in said}


ENDPOINT = re.compile(r"(?:(GET|POST|DELETE) )?(/[\w{}./:]+)")
NO_ENDPOINT = re.compile(r"/(dev|proc|tmp)\b")


def endpoints(page: Path) -> Iterator[tuple[str | None, str]]:
    for code in code_of(page):
        if (found := ENDPOINT.fullmatch(code)) and not NO_ENDPOINT.match(code):
            yield found[1], found[2]
        for path in re.findall(r"127\.0\.0\.1:8000(/[\w/]+)", code):
            # clients are given the part that all have in common
            if path != "/v1":
                yield "POST" if "curl" in code and " -d " in code else None, path


@each_page
def test_endpoints_are_routes(page: Path) -> None:
    for method, path in endpoints(page):
        scopes = [
            {"type": "http", "path": path, "method": each, "root_path": "", "headers": []}
            for each in ([method] if method else ["GET", "POST", "DELETE"])
        ]
        matches = [route.matches(scope)[0] for scope in scopes for route in app().router.routes]
        assert Match.FULL in matches, (method, path)


def test_every_route_is_told_of() -> None:
    said = {(method, path) for method, path in endpoints(API)}
    described = {
        (method.upper(), path.replace(":path}", "}"))
        for path, operations in app().openapi()["paths"].items()
        for method in operations
    }
    assert described and not described - said


def test_parameters_are_told_of_as_they_are() -> None:
    text = API.read_text()
    parameters = text[text.index("## Parameters") : text.index("## Limits")]
    taken, _, refused = parameters.partition("### Refused")
    fields = {*ChatBody.model_fields, *CompletionBody.model_fields}
    assert not fields - set(SPAN.findall(taken))
    listed = refused[: refused.index("Images")]
    assert set(SPAN.findall(re.sub(r"\([^)]*\)", "", listed))) == ChatBody.refused.keys()


@pytest.mark.slow
def test_messages_are_said() -> None:
    rows = [row for row in MESSAGES.read_text().split("\n") if row.startswith("| `")]
    assert len(rows) >= 35
    for row in rows:
        for message in SPAN.findall(row.split(" | ")[0]):
            for piece in message.split("…"):
                assert any(piece in said for said in said_in_code()), (message, piece)
