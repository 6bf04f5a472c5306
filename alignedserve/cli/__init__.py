"""The command line. Each command's module is imported when the command runs, so that --help is quick."""

from __future__ import annotations

from alignedserve.cli.main import main

__all__ = ["main"]
