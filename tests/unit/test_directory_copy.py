"""A copy of a cluster in a directory is whole or nobody takes it for one, whenever the process that makes it ends."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tests.known import ENVIRONMENT

import headrace
from headrace.model.errors import InvalidArgument, LogInUse, NotADataDirectory
from headrace.offline import upgrade_data
from headrace.server import repair_data, restore_directory, verify_data
from headrace.server.cluster_transfer import check_no_broker, import_directory
from headrace.server.directory_copy import DirectoryCopy, whole_copy
from headrace.storage.disk import PrivateDisk
from headrace.storage.replicated.restore import DirectoryRestorer

CLUSTER = "trading"
VALUES = [b"%d" % number * 100 for number in range(2000)]


@pytest.fixture
def store(tmp_path: Path) -> str:
    """A store with a cluster."""
    with headrace.open(str(tmp_path / "plain")) as bus:
        bus.publish_many("orders", VALUES)
    url = f"directory://{tmp_path}/store"
    import_directory(str(tmp_path / "plain"), url, CLUSTER, "", lambda *_: None)
    return url


def restore(store: str, target: Path) -> None:
    restore_directory(str(target), store, CLUSTER, "", None, lambda *_: None)


def values(data: Path) -> list[bytes | None]:
    with headrace.open(str(data)) as bus:
        return [value for batch in bus.fetch("orders", 0, 0) for value in batch.columns().values]


def opened(data: str) -> None:
    headrace.open(data).close()


def as_node(data: str) -> None:
    check_no_broker(PrivateDisk(), data)


def imported(data: str) -> None:
    import_directory(data, f"directory://{data}-store", "another", "", lambda *_: None)


USES: list[Callable[[str], Any]] = [
    opened,
    lambda data: verify_data(data, lambda _: None),
    lambda data: repair_data(data, lambda _: None),
    lambda data: upgrade_data(data, lambda _: None),
    imported,
    as_node,
]


def check_refused(data: Path) -> None:
    """Nobody takes the directory for a copy, and nobody changes it."""
    before = sorted(data.rglob("*"))
    for use in USES:
        with pytest.raises(NotADataDirectory, match=r"begun there and not finished \(\.unfinished\)"):
            use(str(data))
    assert sorted(data.rglob("*")) == before


class Killed(BaseException):
    """The process ends here, and cleans nothing up."""


def test_a_copy_is_all_there_is(store: str, tmp_path: Path) -> None:
    restore(store, tmp_path / "copy")
    assert sorted(os.listdir(tmp_path / "copy")) == ["broker", "format", "topics"]
    assert values(tmp_path / "copy") == VALUES


@pytest.mark.parametrize("moves", range(3))
def test_a_copy_that_was_killed_between_the_moves_is_refused(
    store: str, tmp_path: Path, moves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, left = PrivateDisk.rename, [moves]

    def killing(self: PrivateDisk, source: str, target: str, *, sync: bool = True) -> None:
        if not left[0]:
            raise Killed
        left[0] -= 1
        rename(self, source, target, sync=sync)

    with monkeypatch.context() as patched:
        patched.setattr(PrivateDisk, "rename", killing)
        patched.setattr(DirectoryCopy, "abandon", lambda copy: copy._release())
        with pytest.raises(Killed):
            restore(store, tmp_path / "copy")
    assert not (tmp_path / "copy" / "format").exists()
    check_refused(tmp_path / "copy")
    if moves:
        with pytest.raises(InvalidArgument, match="remove the directory"):
            restore(store, tmp_path / "copy")
        shutil.rmtree(tmp_path / "copy")
    restore(store, tmp_path / "copy")
    assert values(tmp_path / "copy") == VALUES


def test_a_copy_that_was_killed_before_its_folder_was_removed_is_refused(store: str, tmp_path: Path) -> None:
    restore(store, tmp_path / "copy")
    (tmp_path / "copy" / ".unfinished").mkdir()
    check_refused(tmp_path / "copy")
    with pytest.raises(InvalidArgument, match="and other files: remove the directory"):
        restore(store, tmp_path / "copy")
    assert (tmp_path / "copy" / "format").exists()


@pytest.mark.parametrize("inside", [["lock"], ["lock", "content"], ["content"], []])
def test_a_folder_that_an_earlier_attempt_left_is_cleaned(store: str, tmp_path: Path, inside: list[str]) -> None:
    folder = tmp_path / "copy" / ".unfinished"
    folder.mkdir(parents=True)
    for name in inside:
        if name == "content":
            (folder / name / "topics" / "9" / "0").mkdir(parents=True)
            (folder / name / "format").write_bytes(b"half")
        else:
            (folder / name).write_text("1")
    check_refused(tmp_path / "copy")
    restore(store, tmp_path / "copy")
    assert sorted(os.listdir(tmp_path / "copy")) == ["broker", "format", "topics"]
    assert values(tmp_path / "copy") == VALUES


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
@pytest.mark.parametrize("where", ["bring_to", "sync", "finish"])
def test_an_error_leaves_nothing(
    store: str,
    tmp_path: Path,
    exists: bool,
    error: type[BaseException],
    where: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner: type = DirectoryCopy if where == "finish" else DirectoryRestorer
    done = getattr(owner, where)

    def failing(self: Any, *given: Any) -> NoReturn:
        done(self, *given)
        raise error

    monkeypatch.setattr(owner, where, failing)
    target = tmp_path / "copy"
    if exists:
        target.mkdir(mode=0o750)
    with pytest.raises(error):
        restore(store, target)
    assert target.exists() == exists
    if exists:
        assert (list(target.iterdir()), target.stat().st_mode & 0o777) == ([], 0o750)


def test_two_processes_do_not_copy_into_one_directory(store: str, tmp_path: Path) -> None:
    with whole_copy(PrivateDisk(), str(tmp_path / "copy")) as content:
        with pytest.raises(LogInUse, match="in use by process"):
            restore(store, tmp_path / "copy")
        shutil.copytree(tmp_path / "plain", content)
    assert values(tmp_path / "copy") == VALUES


KILLED = """
import sys, time
from headrace.server.directory_copy import DirectoryCopy
from headrace.server import restore_directory
from headrace.storage.disk import PrivateDisk
from headrace.storage.replicated.restore import DirectoryRestorer

def slow(owner, name, seconds):
    call = getattr(owner, name)
    def slowly(*given, **more):
        print(name, flush=True)
        time.sleep(seconds)
        return call(*given, **more)
    setattr(owner, name, slowly)

slow(DirectoryRestorer, "_fetch", 0.3)
slow(DirectoryRestorer, "sync", 1)
slow(DirectoryCopy, "finish", 1)
slow(PrivateDisk, "rename", 1)
slow(PrivateDisk, "remove_directory", 1)
target, store = sys.argv[1:]
restore_directory(target, store, "trading", "", None, lambda done, _: print("progress", flush=True))
print("done", flush=True)
"""


@pytest.mark.parametrize(
    ("after", "times"),
    [("_fetch", 1), ("progress", 2), ("sync", 1), ("finish", 1), ("rename", 1), ("rename", 2), ("rename", 3)],
)
def test_a_copy_whose_process_is_killed_is_not_taken_for_one(
    store: str, tmp_path: Path, after: str, times: int
) -> None:
    target = tmp_path / "copy"
    command = [sys.executable, "-c", KILLED, str(target), store]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            times -= line.strip() == after
            if not times:
                break
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    check_refused(target)
    if os.listdir(target) != [".unfinished"]:
        with pytest.raises(InvalidArgument, match="remove the directory"):
            restore(store, target)
        shutil.rmtree(target)
    restore(store, target)
    assert values(target) == VALUES
