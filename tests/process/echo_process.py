"""The program of a child in tests: what it is told tells it what to do (test_child.py)."""

from __future__ import annotations

import os
import signal
import sys
import time

from alignedserve.process.child import read_frame, write_frame


def main() -> None:
    while (told := read_frame(sys.stdin.buffer)) is not None:
        match told.split():
            case [b"greeting", path]:
                # whoever waits for it may leave now
                os.mkfifo(path + b".reached")
                with open(path, "rb"):
                    write_frame(sys.stdout.buffer, b"")
            case [b"slowly", seconds, answer]:
                time.sleep(float(seconds))
                write_frame(sys.stdout.buffer, answer)
            case [b"once", path]:
                # the first that is asked this ends over it
                if not os.path.exists(path):
                    open(path, "w").close()
                    os.kill(os.getpid(), signal.SIGKILL)
                write_frame(sys.stdout.buffer, b"twice")
            case [b"exit", status]:
                os._exit(int(status))
            case [b"alarm"]:
                signal.setitimer(signal.ITIMER_REAL, 0.01)
                signal.pause()
            case _:
                write_frame(sys.stdout.buffer, told + b" %d" % os.getpid())


if __name__ == "__main__":
    main()
