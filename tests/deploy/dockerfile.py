"""A Dockerfile's steps, read and run without a builder: each stage is a directory with a new Debian, and chroot.

It supports the few instructions that deploy/Dockerfile uses. debootstrap makes what a registry would provide.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

# These describe the image and do nothing while it is built.
_SAID = ("EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD")
_DONE = ("RUN", "COPY", "ARG", "ENV", "USER", "WORKDIR")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass
class Stage:
    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)


def parse(text: str) -> list[Stage]:
    stages: list[Stage] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append(Stage(name, base))
        elif instruction in _SAID + _DONE and not line.endswith("\\"):
            stages[-1].steps.append((instruction, rest))
        else:
            raise ValueError(f"line {number}: {instruction} is none of FROM, {', '.join(_SAID + _DONE)}")
    return stages


def steps_of(stages: list[Stage], stage: Stage) -> list[tuple[str, str]]:
    """Returns the steps of a stage and of those that it starts from."""
    before = [each for each in stages if each.name == stage.base and each.name]
    return [step for each in before for step in steps_of(stages, each)] + stage.steps


def said_last(steps: list[tuple[str, str]], instruction: str) -> list[str]:
    """Returns the words of the last of these instructions, which must be a JSON list."""
    *_, rest = [rest for each, rest in steps if each == instruction]
    found: list[str] = json.loads(rest[rest.index("[") :])
    return found


class Root:
    """A directory with a Debian, and the settings made by the steps so far."""

    def __init__(self, directory: Path, suite: str, mirror: str) -> None:
        self.directory = directory
        self.environment = {"PATH": _PATH}
        self.user = "root"
        self.workdir = "/"
        made = ["debootstrap", "--variant=minbase", suite, str(directory), mirror]
        subprocess.run(made, check=True, stdout=subprocess.DEVNULL)

    def apply(
        self, steps: list[tuple[str, str]], context: Path, stages: dict[str, Root], for_run: dict[str, str]
    ) -> None:
        """`for_run`: variables only for RUN, like a builder's secrets, and values of ARG."""
        for instruction, rest in steps:
            if instruction == "RUN":
                command = self.command(["/bin/sh", "-c", rest], for_run)
                subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
            elif instruction == "COPY":
                self._copy(shlex.split(rest), context, stages)
            elif instruction == "ARG":
                name, _, default = rest.partition("=")
                for_run = {name: default} | for_run
            elif instruction == "ENV":
                name, _, value = rest.partition("=")
                self.environment[name] = value
            elif instruction == "USER":
                self.user = rest
            elif instruction == "WORKDIR":
                self.workdir = rest
                self._at(rest).mkdir(parents=True, exist_ok=True)

    def command(self, words: list[str], more: dict[str, str] | None = None) -> list[str]:
        """Returns a command that runs these words in the root, with its own processes and mounts, which end with it.
        Its first child is the program itself."""
        home = "/root" if self.user == "root" else f"/home/{self.user}"
        environment = self.environment | {"HOME": home} | (more or {})
        inside = f"cd {shlex.quote(self.workdir)} && exec {shlex.join(words)}"
        entered = ["chroot", f"--userspec={self.user}", str(self.directory), "/usr/bin/env", "-i"]
        entered += [f"{name}={value}" for name, value in environment.items()] + ["/bin/sh", "-c", inside]
        at = shlex.quote(str(self.directory))
        mounts = (
            f"mount -t proc proc {at}/proc && mount --rbind /dev {at}/dev && "
            f"mount -t tmpfs -o size=2g,mode=1777 tmpfs {at}/dev/shm"
        )
        own = ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
        return [*own, "/bin/sh", "-c", f"{mounts} && exec {shlex.join(entered)}"]

    def _copy(self, words: list[str], context: Path, stages: dict[str, Root]) -> None:
        *sources, target = words
        place = context
        if sources[0].startswith("--from="):
            place = stages[sources.pop(0).removeprefix("--from=")].directory
        for source in sources:
            found = place / source.lstrip("/")
            to = self._at(target)
            # A directory's content is copied into the target, a file to the target or into it.
            if found.is_dir():
                shutil.copytree(found, to, symlinks=True, dirs_exist_ok=True)
            else:
                shutil.copy(found, to)

    def _at(self, path: str) -> Path:
        """Returns where a path in the image is on this machine."""
        return self.directory / os.path.normpath(os.path.join(self.workdir, path)).lstrip("/")


def stages_for(stages: list[Stage], last: Stage) -> list[Stage]:
    """Returns the stages that have to be made for the last one, because its steps copy from them."""
    names = {name for _, rest in steps_of(stages, last) for name in re.findall(r"^--from=(\S+)", rest)}
    return [each for each in stages if each.name in names]


def suite_of(stages: list[Stage], stage: Stage) -> str:
    """Returns the Debian suite that a stage is ultimately based on."""
    while not (found := re.fullmatch(r"debian:(\w+)-slim", stage.base)):
        [stage] = [each for each in stages if each.name == stage.base]
    return found[1]
