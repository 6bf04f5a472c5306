"""Progress is for terminals."""

from __future__ import annotations

import io
import time

import pytest

from alignedserve.cli.progress import bar, busy


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


LIMIT_S = 20.0


def test_a_terminal_sees_what_takes_long_and_nothing_of_it_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    with busy("Loading", quiet_s=0.0):
        end_s = time.monotonic() + LIMIT_S
        while "Loading … 0 s" not in screen.getvalue() and time.monotonic() < end_s:
            time.sleep(0.001)
    assert screen.getvalue().startswith("\r\x1b[KLoading … 0 s") and screen.getvalue().endswith("\r\x1b[K")


def test_what_is_short_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    with busy("Loading", quiet_s=LIMIT_S):
        pass
    assert not screen.getvalue()


def test_a_pipe_gets_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with busy("Loading", quiet_s=0.0), bar(3, "Measuring", "run") as shown:
        shown.update()
        assert shown.disable
    assert capsys.readouterr() == ("", "")
