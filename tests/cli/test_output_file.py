"""A plain file is replaced whole; devices, pipes and open files of the process are written to as they are."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from alignedserve.cli.output_file import OutputFile, is_replaced, whole_file, write_json

NOBODY = 65534


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that everyone can reach, with `own`, which everyone may write to, `others`, which root alone may, and
    `closed`, into which nobody else may look."""
    # pytest's own folders are its user's alone.
    with tempfile.TemporaryDirectory() as directory:
        found = Path(directory)
        found.chmod(0o755)
        for name, mode in (("own", 0o777), ("others", 0o755), ("closed", 0o700)):
            (found / name).mkdir()
            (found / name).chmod(mode)
        yield found


def _accepts(path: Path) -> None:
    os.setuid(NOBODY)
    try:
        OutputFile().convert(str(path), None, None)
    except click.BadParameter:
        sys.exit(2)


def accepts(path: Path) -> bool:
    """Whether the path may be an output of a user who is not root."""
    process = multiprocessing.get_context("fork").Process(target=_accepts, args=(path,))
    process.start()
    process.join()
    assert process.exitcode in (0, 2)
    return process.exitcode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become someone else")
def test_what_matters_is_the_folder_of_the_file_that_is_replaced(place: Path) -> None:
    own, others = place / "own", place / "others"
    (others / "out").write_text("")
    (others / "out").chmod(0o666)
    os.mkfifo(others / "pipe")
    (others / "pipe").chmod(0o666)
    links = {
        own / "to-others": others / "out",
        own / "to-nothing": others / "none",
        others / "to-own": own / "out",
        own / "to-device": Path("/dev/null"),
    }
    for link, target in links.items():
        link.symlink_to(target)
    (own / "round").symlink_to(own / "round")
    refused = [others / "out", others / "none", own / "to-others", own / "to-nothing", own / "round"]
    refused += [place / "closed/out", place / "closed/none/out", own / ("x" * 300), own / ("x" * 300) / "out"]
    accepted = [own / "out", others / "pipe", others / "to-own", own / "to-device", Path("/dev/null")]
    assert [path for path in [*refused, *accepted] if accepts(path)] == accepted


def test_an_open_file_gets_what_comes_after_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("before\n")
    number = path.stat().st_ino
    with path.open("ab") as file:
        named = [Path(f"/dev/fd/{file.fileno()}"), Path(f"/proc/self/fd/{file.fileno()}"), tmp_path / "link"]
        (tmp_path / "link").symlink_to(named[0])
        for each in named:
            OutputFile().convert(str(each), None, None)
            assert not is_replaced(each)
            with whole_file(each) as written:
                written.write(f"by {each.name}\n".encode())
    lines = [f"by {each.name}\n" for each in named]
    assert path.read_text() == "".join(["before\n", *lines])
    assert path.stat().st_ino == number and {each.name for each in tmp_path.iterdir()} == {"link", "out"}


def test_a_file_that_is_open_and_has_no_name_is_written_to(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("w+b") as file:
        path.unlink()
        with whole_file(Path(f"/dev/fd/{file.fileno()}")) as written:
            written.write(b"some")
        file.seek(0)
        assert file.read() == b"some"
    assert not list(tmp_path.iterdir())


def test_what_was_printed_comes_first(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path; from alignedserve.cli.output_file import whole_file\n"
        "print('first')\n"
        "with whole_file(Path('/dev/stdout')) as file: file.write(b'second\\n')\n"
        "print('third')\n"
    )
    with (tmp_path / "out").open("wb") as file:
        subprocess.run([sys.executable, "-c", program], stdout=file, check=True)
    assert (tmp_path / "out").read_text() == "first\nsecond\nthird\n"


def test_a_plain_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("before")
    number = path.stat().st_ino
    with pytest.raises(KeyboardInterrupt), whole_file(path) as file:
        file.write(b"some")
        raise KeyboardInterrupt
    assert path.read_text() == "before" and path.stat().st_ino == number
    with whole_file(path) as file:
        file.write(b"all")
    assert path.read_text() == "all" and list(tmp_path.iterdir()) == [path]


def test_json_has_null_for_numbers_that_it_does_not_have(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(path, {"rate": math.inf, "rows": [{"share": math.nan, "names": ("ü", 1)}]})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {
        "rate": None,
        "rows": [{"share": None, "names": ["ü", 1]}],
    }
    assert path.read_text().startswith('{\n "rate": null')
