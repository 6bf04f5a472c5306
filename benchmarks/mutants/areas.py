"""The areas of the deciding code that random mutants are drawn from, and each area's files."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

# Patterns of files, relative to the root of the repository.
AREAS: dict[str, tuple[str, ...]] = {
    "router": ("router/*.py",),
    "pool": ("kvpool/*.py",),
    "workers": (
        *("prefill_worker/*.py", "decode_worker/*.py"),
        *("alignedserve/instance/*.py", "alignedserve/instance/process/*.py"),
    ),
    "scheduling": ("alignedserve/scheduling/**/*.py",),
    "protocol": ("alignedserve/protocol/*.py",),
    "store": ("alignedserve/store/**/*.py",),
    "batch": ("alignedserve/batch/*.py",),
    "gateway": (
        "alignedserve/gateway/limits/limits.py",
        "alignedserve/gateway/limits/fair_queue.py",
        "alignedserve/gateway/islands/pacing.py",
        *(
            f"alignedserve/gateway/http/{name}.py"
            for name in (
                "access",
                "connection",
                "connections",
                "framing",
                "json_pieces",
                "keys",
                "multipart",
                "reading",
            )
        ),
    ),
}


def files_of(area: str, root: Path) -> list[str]:
    """Returns sorted paths relative to the root."""
    found = {path for pattern in AREAS[area] for path in root.glob(pattern)}
    return sorted(str(path.relative_to(root)) for path in found if path.name != "__init__.py")


def area_of(file: str) -> str | None:
    """Returns the area of a file, given by its path relative to the root, or None if it is in no area."""
    for area, patterns in AREAS.items():
        if any(_matches(file, pattern) for pattern in patterns):
            return area
    return None


def _matches(file: str, pattern: str) -> bool:
    folder, name = pattern.rsplit("/", 1)
    if folder.endswith("/**"):
        return file.startswith(folder.removesuffix("**")) and fnmatch(file, f"*/{name}")
    return str(Path(file).parent) == folder and fnmatch(Path(file).name, name)
