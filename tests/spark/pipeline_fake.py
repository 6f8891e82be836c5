"""A driver that is no Spark: it holds the lock, says how it is, and keeps a diary of when it was there.

Stands for the Python that runs a pipeline. What it does is said by a line `# fake: WORD` in the pipeline's file.
"""

import os
import re
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from headrace.model.errors import HeadraceError, InvalidArgument
from headrace.spark.pipelines.driver import DriverRegistration
from headrace.spark.pipelines.paths import Folder
from headrace.spark.pipelines.records import FINISHED, RUNNING, STOPPED


def write_fake(path: Path) -> str:
    """Make a program of this file."""
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__)} "$@"\n')
    path.chmod(0o755)
    return str(path)


def pipeline_file(path: Path, does: str) -> str:
    """Write a file that is in order, and whose fake driver does so."""
    path.write_text(f"# fake: {does}\n-- sink: noop\n".replace("# fake", "-- fake") + "-- source: a\nselect * from a\n")
    return str(path)


def main(arguments: list[str]) -> None:
    """Be the driver."""
    file, folder = arguments[arguments.index("run") + 1], Folder(arguments[arguments.index("--supervised") + 1])
    found = re.search(r"fake: (\w+)", Path(file).read_text())
    assert found, file
    signal.signal(signal.SIGTERM, signal.SIG_IGN if found[1] == "stubborn" else _end)
    with DriverRegistration(folder, supervised=True, check=lambda: None) as registration:
        diary = folder.path / "diary"
        _note(diary, "begin")
        if found[1] == "slow":
            registration.update(doing="starting query one")
            while not (folder.path / "go").exists():
                time.sleep(0.02)
        registration.update(phase=RUNNING, doing="")
        print("the fake driver says hello", flush=True)
        try:
            _do(found[1])
            registration.update(phase=FINISHED)
        except KeyboardInterrupt:
            registration.update(phase=STOPPED)
        finally:
            _note(diary, "end")


def _do(what: str) -> None:
    if what == "finish":
        return
    if what == "fail":
        raise HeadraceError("the fake driver has failed, as it should")
    if what == "mistaken":
        raise InvalidArgument("/f.py:1: the fake driver cannot do what the file says")
    if what == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(0.05)


def _end(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(number)


def _note(diary: Path, what: str) -> None:
    with diary.open("a") as file:
        file.write(f"{what} {os.getpid()}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
