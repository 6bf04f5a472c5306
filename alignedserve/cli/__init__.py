"""The command line. Each command's module is imported when the command runs, so that --help is quick."""

from __future__ import annotations

import sys


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        # A signal may arrive while click is imported.
        from alignedserve.launch.signals import exit_at_signals

        exit_at_signals()
    from alignedserve.cli.main import main as run

    run()
