"""Builds the site into a folder: `python -m docs.site [FOLDER]`, or build/site."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from docs.site import diagrams, llms
from docs.site.links import Links
from docs.site.markdown import converted
from docs.site.pages import ROOT, Site, anchor, place, read, title


def main() -> int:
    if any(word.startswith("-") for word in sys.argv[1:]) or len(sys.argv) > 2:
        sys.exit("python -m docs.site [DIRECTORY]: there are no options")
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build/site").resolve()
    with TemporaryDirectory() as folder:
        return build(read(), Path(folder), target)


def build(site: Site, work: Path, target: Path, root: Path = ROOT) -> int:
    """Builds the site in `work` and puts it at `target`, in place of what is there. Returns the generator's status."""
    twins = prepare(site, work, root)
    generator = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    # it imports `anchor`
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(generator, cwd=work, env=environment, capture_output=True, text=True)
    # a warning of the generator is an error, also one that its strict mode tolerates
    said = done.stdout + done.stderr
    if done.returncode or "warning" in said.lower():
        print(said, file=sys.stderr)
        return done.returncode or 1
    for name, text in twins.items():
        (work / "site" / name).write_text(text)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(work / "site", target)
    print(f"{len(site.pages)} pages in {target}. Read and search them at http://127.0.0.1:8080 with:")
    # browsers load no script for search from a file
    print(f"{sys.executable} -m http.server --bind 127.0.0.1 --directory {target} 8080")
    return 0


def prepare(site: Site, work: Path, root: Path = ROOT) -> dict[str, str]:
    """Writes what the generator reads into `work`. Returns the files that it does not make: Markdown and llms.txt."""
    links = Links(root, frozenset(site.pages), site.repository)
    texts = {page: links.rewritten(page, (root / page).read_text()) for page in site.pages}
    for page, text in texts.items():
        path = work / "docs" / place(page)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(converted(_with_pictures(text, path)))
    for name, copy in links.copies.items():
        path = work / "docs" / copy
        path.parent.mkdir(parents=True, exist_ok=True)
        if (root / name).is_dir():
            path.write_text("\n".join(sorted(each.name for each in (root / name).iterdir())) + "\n")
        else:
            shutil.copy(root / name, path)
    (work / "mkdocs.yml").write_text(yaml.dump(settings(site, texts), sort_keys=False))
    return {place(page): text for page, text in texts.items()} | {"llms.txt": llms.index(site, texts)}


def _with_pictures(text: str, path: Path) -> str:
    """Writes each diagram of the page beside it, and returns the text with links to them."""
    number = 0
    while found := diagrams.FENCE.search(text):
        number += 1
        picture = path.with_name(f"{path.stem}_{number}.svg")
        picture.write_text(diagrams.drawn(found[1]))
        text = text[: found.start()] + f"![diagram {number}]({picture.name})" + text[found.end() :]
    return text


def settings(site: Site, texts: dict[str, str]) -> dict[str, object]:
    """Returns the generator's settings, which are MkDocs'. Nothing is loaded from another site."""
    return {
        "site_name": site.name,
        "site_description": site.description,
        "docs_dir": "docs",
        "site_dir": "site",
        # each page has its Markdown beside it, under the same name
        "use_directory_urls": False,
        "nav": [
            {section.title: [{title(texts[page]): place(page)} for page in section.pages]}
            for section in site.sections
        ],
        "theme": {
            "name": "material",
            "font": False,
            "features": ["content.code.copy", "navigation.tabs", "navigation.top", "toc.follow"],
            "palette": [
                {"media": "(prefers-color-scheme: light)", "scheme": "default"},
                {"media": "(prefers-color-scheme: dark)", "scheme": "slate"},
            ],
        },
        "plugins": ["search"],
        "markdown_extensions": [
            "tables",
            "sane_lists",
            # headings have GitHub's anchors
            {"toc": {"permalink": True, "slugify": anchor}},
            {"pymdownx.highlight": {"anchor_linenums": False}},
            "pymdownx.superfences",
            "pymdownx.magiclink",
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
