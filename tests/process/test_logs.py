"""What is logged about goes on when nothing can be written."""

from __future__ import annotations

import errno
import io
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from alignedserve.process.logs import LogConfig, _File, set_up_logging

logger = logging.getLogger("alignedserve.of_a_test")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    # Handlers of this module's own are removed.
    set_up_logging("text")
    logging.getLogger().setLevel(level)


def test_a_directory_that_is_gone_stops_no_one_and_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line that could not be written was once an error of whatever it was about: each request was a 500."""
    directory, path = tmp_path / "logs", tmp_path / "logs" / "x.log"
    LogConfig(dir=str(directory)).start("x", has_console=False)
    logger.info("first")
    shutil.rmtree(directory)
    for _ in range(3):
        logger.info("lost")
    assert capsys.readouterr().err == f"{path}: no lines can be written now: No such file or directory\n"
    directory.mkdir()
    logger.info("written again")
    shutil.rmtree(directory)
    logger.info("lost again")
    directory.mkdir()
    logger.info("last")
    assert path.read_text().endswith("] last\n") and path.read_text().count("\n") == 1
    assert capsys.readouterr().err.count("no lines can be written now") == 1


def test_a_full_disk_stops_no_one_and_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("json", path="/dev/full")
    for _ in range(3):
        logger.info("lost")
    assert capsys.readouterr().err == "/dev/full: no lines can be written now: No space left on device\n"


class FailsToClose(io.FileIO):
    """A file on a server, say, which finds out as it is closed that there is no room."""

    def close(self) -> None:
        was_closed = self.closed
        super().close()
        if not was_closed:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def test_a_file_that_can_not_be_closed_stops_no_one_and_is_followed_by_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.log"
    set_up_logging("text", path=str(path))
    (handler,) = (each for each in logging.getLogger().handlers if isinstance(each, _File))
    handler.close()
    handler.stream = io.TextIOWrapper(io.BufferedWriter(FailsToClose(path, "w")))
    path.rename(tmp_path / "x.log.1")
    logger.info("lost")
    logger.info("written again")
    assert capsys.readouterr().err == f"{path}: no lines can be written now: Disk quota exceeded\n"
    assert path.read_text().endswith("] written again\n") and path.read_text().count("\n") == 1


def test_what_is_wrong_with_a_line_itself_is_still_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logging("text", path=str(tmp_path / "x.log"))
    (handler,) = (each for each in logging.getLogger().handlers if isinstance(each, _File))
    handler.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, "%d", ("no number",), None))
    assert "Logging error" in capsys.readouterr().err
