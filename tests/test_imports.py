"""Imports go in one direction (docs/architecture.md), and light modules stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from benchmarks.house.imports import all_imports, between_folders, hard_imports, rings
from benchmarks.house.source import product

ROOT = Path(__file__).parent.parent
# The engine, the kernels and what they stand on run in any process, with these and nothing else installed.
DATA_PLANE = ["alignedserve/engine", "alignedserve/ops", "alignedserve/models", "kernels"]
DATA_PLANE_MAY_IMPORT = {
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "huggingface_hub",
    "jinja2",
    "tqdm",
    "triton",
}

# `alignedserve` has links to those beside it, and only as parts of it they are imported.
BESIDE = ("kernels", "kvpool", "router", "prefill_worker", "decode_worker")
OURS = ("alignedserve", *BESIDE)
BASE = {
    f"alignedserve.{name}"
    for name in (
        *("types", "version", "sampling_params", "structured_outputs", "kv"),
        *("process", "timing", "protocol", "scheduling"),
    )
}
INSTANCE = BASE | {
    "alignedserve.engine",
    "alignedserve.instance",
    "alignedserve.text.grammar",
    "alignedserve.transport",
}
# An instance's state machine, and what of the engine and of transports it can be without torch.
STATE_MACHINES = {
    *(f"alignedserve.{part}_worker.{module}" for part in ("prefill", "decode") for module in ("worker",)),
    *(f"alignedserve.instance.{module}" for module in ("executor", "loop", "memory", "requests", "worker")),
    *(f"alignedserve.engine.{module}" for module in ("config", "outputs", "request")),
    *(f"alignedserve.transport.{module}" for module in ("completions", "runs", "staging_buffer")),
    "alignedserve.text.grammar",
}
# What of ours, beside itself, a part may import. `launch` and `cli` may import everything, and are imported by nobody.
MAY_IMPORT = {
    "alignedserve/timing": set(),
    "alignedserve/process": {"alignedserve.types"},
    "alignedserve/kv": {"alignedserve.types"},
    "alignedserve/protocol": {
        f"alignedserve.{name}"
        for name in ("types", "version", "sampling_params", "structured_outputs", "kv", "timing")
    },
    # what policies see of the router and of instances is all that they may
    "alignedserve/scheduling": {
        f"alignedserve.{name}" for name in ("types", "timing", "protocol.messages", "kv.layout")
    },
    "kernels": set(),
    "alignedserve/ops": {"alignedserve.kernels", "alignedserve.kv.groups", "alignedserve.sampling_params"},
    "alignedserve/models": {"alignedserve.kv.groups", "alignedserve.ops"},
    "router": BASE | {"alignedserve.kvpool.segment"},
    "kvpool": BASE,
    "prefill_worker": INSTANCE,
    "decode_worker": INSTANCE,
    "alignedserve/instance": BASE
    | {"alignedserve.engine", "alignedserve.text.grammar", "alignedserve.transport"}
    | {"alignedserve.models.config", "alignedserve.kvpool.segment"},
    "alignedserve/transport": BASE | {"alignedserve.kernels"},
    "alignedserve/gateway": BASE
    | {"alignedserve"}
    | {f"alignedserve.engine.{module}" for module in ("choices", "config", "lora_modules", "request")}
    | {"alignedserve.models.locate", "alignedserve.text", "alignedserve.batch", "alignedserve.store"}
    | {"alignedserve.lengths"},
    "alignedserve/lengths": BASE,
    "alignedserve/batch": BASE | {"alignedserve.store"},
    "alignedserve/store": BASE,
    "alignedserve/vopr": BASE
    | {"alignedserve.sim", "alignedserve.router", "alignedserve.kvpool", "alignedserve.store"}
    | {"alignedserve.gateway", "alignedserve.batch", "alignedserve.lengths", "alignedserve.text"}
    | {"alignedserve.engine.config", "alignedserve.engine.request"},
    "alignedserve/sim": BASE | STATE_MACHINES | {"alignedserve.router", "alignedserve.kvpool"},
}
# What of the gateway each of its folders, and each file beside them, may import: only what is listed above it, so that
# there is no cycle.
GATEWAY_MAY_IMPORT: dict[str, set[str]] = {
    "limits": set(),
    "webhooks": set(),
    "page": set(),
    "grammars": {"limits"},
    "http": {"limits"},
    "telemetry": {"http"},
    "tools": {"http"},
    "config": {"limits", "telemetry", "webhooks"},
    "islands": {"http", "limits", "telemetry"},
    "model": {"http", "telemetry", "tools"},
    "generation": {"grammars", "http", "islands", "limits", "model", "telemetry", "tools"},
    "openai": {"generation", "http", "islands", "limits", "model", "tools", "webhooks"},
    "anthropic": {"generation", "http", "limits", "model", "openai", "tools"},
    "tool_routes": {"generation", "http", "limits", "model", "openai"},
    "endpoints": {"anthropic", "generation", "openai", "tool_routes"},
    "services": {"anthropic", "config", "endpoints", "generation", "http", "openai", "telemetry", "webhooks"},
    "ending": {"http", "services"},
    "launcher_link": {"config", "ending", "http", "islands", "openai", "services", "telemetry"},
    "app": {"anthropic", "endpoints", "generation", "http", "openai", "page", "telemetry", "tool_routes"},
    "process": {
        "app",
        "config",
        "ending",
        "endpoints",
        "generation",
        "grammars",
        "http",
        "islands",
        "launcher_link",
        "model",
        "openai",
        "services",
        "telemetry",
    },
}


@cache
def imports_of(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return frozenset(plain | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)})


@pytest.mark.parametrize("folder", DATA_PLANE)
def test_the_data_plane_needs_no_server(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        packages = {name.split(".")[0] for name in imports_of(path)}
        foreign = packages - set(sys.stdlib_module_names) - DATA_PLANE_MAY_IMPORT - {"alignedserve"}
        assert not foreign, f"{path.relative_to(ROOT)} imports {foreign}"


def test_lower_parts_do_not_import_higher_ones() -> None:
    higher = ("alignedserve.offline", "alignedserve.cli", "alignedserve.demo")
    lower = [*(ROOT / "kernels").rglob("*.py"), *(ROOT / "alignedserve/engine").rglob("*.py")]
    lower += (ROOT / "alignedserve/models").rglob("*.py")
    for path in lower:
        upward = {name for name in imports_of(path) if name.startswith(higher)}
        assert not upward, f"{path.relative_to(ROOT)} imports {upward}"
    for path in (ROOT / "kernels").rglob("*.py"):
        upward = {
            name
            for name in imports_of(path)
            if name.startswith(("alignedserve.engine", "alignedserve.models"))
        }
        assert not upward, f"{path.relative_to(ROOT)} imports {upward}"


def is_within(name: str, packages: Iterable[str]) -> bool:
    """The bare `alignedserve` is its version, and holds nothing else."""
    return any(
        name == package or (package != "alignedserve" and name.startswith(f"{package}."))
        for package in packages
    )


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_point_one_way(folder: str) -> None:
    itself = f"alignedserve.{folder.removeprefix('alignedserve/')}".replace("/", ".")
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        ours = {name for name in imports_of(path) if name.split(".")[0] in OURS}
        foreign = {name for name in ours if not is_within(name, {itself} | MAY_IMPORT[folder])}
        assert not foreign, f"{path.relative_to(ROOT)} imports {foreign}"


def test_modules_have_no_cycle() -> None:
    """Imports in functions, and those for types, count too."""
    assert rings(all_imports(product())) == []


def test_folders_have_no_cycle() -> None:
    """A folder counts without the folders in it."""
    sources = product()
    assert rings(between_folders(sources, hard_imports(sources))) == []


def test_packages_have_no_cycle() -> None:
    """Packages are sorted so that each comes after those that it imports, which a cycle makes impossible."""
    packages = {path.parent.name for path in (ROOT / "alignedserve").glob("*/__init__.py")}
    found: dict[str, set[str]] = {}
    for package in packages:
        files = (ROOT / "alignedserve" / package).rglob("*.py")
        names = {name for path in files for name in imports_of(path) if name.startswith("alignedserve.")}
        found[package] = ({name.split(".")[1] for name in names} & packages) - {package}
    assert {"engine", "gateway", "router"} < found.keys()
    list(TopologicalSorter(found).static_order())


def test_the_gateways_folders_have_no_cycle() -> None:
    root, package = ROOT / "alignedserve/gateway", "alignedserve.gateway"
    found: dict[str, set[str]] = {}
    for path in root.rglob("*.py"):
        importer = path.relative_to(root).with_suffix("").parts[0]
        names = {name for name in imports_of(path) if is_within(name, {package})}
        assert package not in names, f"{path.relative_to(ROOT)} does not say which folder it imports"
        found.setdefault(importer, set()).update(name.split(".")[2] for name in names)
    assert found.pop("__init__") == set()
    assert {importer: names - {importer} for importer, names in found.items()} == GATEWAY_MAY_IMPORT
    above: set[str] = set()
    for importer, names in GATEWAY_MAY_IMPORT.items():
        assert names <= above, f"{importer} may import what is below it: {names - above}"
        above.add(importer)


def test_only_the_command_line_imports_the_launcher() -> None:
    tops = ("alignedserve/launch", "alignedserve/cli", "alignedserve/__main__.py")
    for path in (path for package in OURS for path in (ROOT / package).rglob("*.py")):
        if not str(path.relative_to(ROOT)).startswith(tops):
            assert not any(is_within(name, {"alignedserve.launch"}) for name in imports_of(path)), path


def test_ray_is_imported_by_the_launcher_only() -> None:
    for path in (path for package in OURS for path in (ROOT / package).rglob("*.py")):
        if not path.is_relative_to(ROOT / "alignedserve/launch"):
            assert not any(is_within(name, {"ray"}) for name in imports_of(path)), path


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_and_kernels_load_no_torch() -> None:
    loaded = run_python(
        "import sys, alignedserve, alignedserve.cli, alignedserve.kernels; print('torch' in sys.modules)"
    )
    assert loaded.strip() == "False"


@pytest.mark.parametrize(
    "modules",
    [
        "alignedserve.router.router, alignedserve.router.process",
        "alignedserve.kvpool.pool, alignedserve.kvpool.process",
        "alignedserve.cli.simulate.compare",
    ],
)
def test_who_decides_loads_neither_torch_nor_ray(modules: str) -> None:
    assert (
        run_python(f"import sys, {modules}; print({{'torch', 'ray'}} & sys.modules.keys())").strip()
        == "set()"
    )


def test_the_launcher_sets_ray_up_before_it_loads_it() -> None:
    loaded = run_python("import sys, alignedserve.launch.serve; print('ray' in sys.modules)")
    assert loaded.strip() == "False"


def test_folders_beside_the_package_are_parts_of_it() -> None:
    """Installed, they are nowhere else: `kernels` is Hugging Face's."""
    for path in (
        path
        for package in (*OURS, "tests", "benchmarks", "research")
        for path in (ROOT / package).rglob("*.py")
    ):
        packages = {name.split(".")[0] for name in imports_of(path)}
        assert not packages & set(BESIDE), f"{path.relative_to(ROOT)} imports {packages & set(BESIDE)}"
    for name in BESIDE:
        assert (ROOT / "alignedserve" / name).resolve() == ROOT / name


def test_nothing_of_the_product_imports_what_measures_it_or_research() -> None:
    others = {"benchmarks", "docs", "research", "tests"}
    for path in (path for package in OURS for path in (ROOT / package).rglob("*.py")):
        packages = {name.split(".")[0] for name in imports_of(path)}
        assert not packages & others, f"{path.relative_to(ROOT)} imports {packages & others}"
