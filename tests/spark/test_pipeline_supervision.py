"""Pipelines that are looked after: what a supervisor decides, and what it does with real processes."""

import hashlib
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import msgspec
import pytest
from tests.known import ENVIRONMENT
from tests.spark.conftest import SparkBroker
from tests.spark.pipeline_fake import pipeline_file, write_fake

from headrace.cli.main import main
from headrace.spark.pipelines import logs
from headrace.spark.pipelines.children import command
from headrace.spark.pipelines.paths import Folder
from headrace.spark.pipelines.processes import is_alive, start_mark
from headrace.spark.pipelines.records import TOPIC, PipelineRecord, PipelineSettings
from headrace.spark.pipelines.registry import Registry
from headrace.spark.pipelines.supervisor import host_name, supervised
from headrace.spark.pipelines.supervisor_decisions import (
    GRACE_S,
    HEALTHY_S,
    Do,
    ObservedDriver,
    SupervisionState,
    decide,
)

SOON_S = 60.0
SECOND_US = 1_000_000
UP = ObservedDriver(alive=True, pid=7, started="1", phase="running")
GONE = ObservedDriver(phase="failed", error="it broke")


def eventually(look: Callable[[], Any], why: Callable[[], object] = lambda: "") -> Any:
    """What a look gives at last."""
    end = time.monotonic() + SOON_S
    while not (found := look()):
        assert time.monotonic() < end, why()
        time.sleep(0.02)
    return found


# What is decided: no process, no broker, no clock.


class World:
    """One pipeline, its supervisor's memory, and the time."""

    def __init__(self, **changes: Any) -> None:
        wanted = PipelineSettings(file="/f.py", sha256="", master="local[2]", host="here")
        definition = {name: changes.pop(name) for name in ("restart", "restarts_max") if name in changes}
        wanted = msgspec.structs.replace(wanted, **definition)
        self.record = PipelineRecord(name="p", definition=wanted, **changes)
        self.memory = SupervisionState()
        self.now_us = 1_000 * SECOND_US

    def see(self, observed: ObservedDriver, *, after_s: float = 0.0, ending: bool = False) -> Do | None:
        """What is done at such a sight."""
        self.now_us += round(after_s * SECOND_US)
        done, self.record, self.memory = decide(self.memory, self.record, observed, self.now_us, 1.0, ending=ending)
        return done

    def change(self, **changes: Any) -> None:
        """What somebody else writes to the record."""
        self.record = msgspec.structs.replace(self.record, **changes)

    def run(self) -> None:
        """Come to where the driver runs."""
        assert self.see(ObservedDriver()) is Do.START
        assert self.see(UP) is None
        assert (self.record.state, self.record.pid) == ("running", 7)


def test_a_new_pipeline_is_started_once() -> None:
    world = World()
    assert world.see(ObservedDriver()) is Do.START
    assert world.record.state == "starting"
    assert world.see(UP._replace(phase="starting")) is None
    assert world.see(UP) is None
    assert world.record.state == "running"
    assert world.see(UP, after_s=5) is None


def test_failures_are_retried_later_and_later_and_forgotten_after_a_healthy_minute() -> None:
    world = World()
    world.run()
    for pause_s in (1, 2, 4, 8, 16, 32, 60, 60):
        assert world.see(GONE) is None
        assert (world.record.state, world.record.error) == ("waiting", "it broke")
        assert world.record.next_start_us == world.now_us + pause_s * SECOND_US
        assert world.see(GONE, after_s=pause_s - 0.001) is None
        assert world.see(GONE, after_s=0.001) is Do.START
        assert world.see(UP) is None
    assert world.record.restarts == 8
    assert world.see(UP, after_s=HEALTHY_S) is None
    assert world.see(GONE) is None
    assert world.record.next_start_us == world.now_us + SECOND_US


def test_failures_that_come_together_are_not_retried_together() -> None:
    pauses = set()
    for chance in (0.0, 0.5, 1.0):
        world = World()
        world.run()
        _, record, _ = decide(world.memory, world.record, GONE, world.now_us, chance)
        pauses.add(record.next_start_us - world.now_us)
    assert pauses == {750_000, 875_000, 1_000_000}


def test_it_gives_up_after_as_many_restarts_as_it_is_told() -> None:
    world = World(restarts_max=2)
    world.run()
    for _ in range(2):
        world.see(GONE)
        assert world.see(GONE, after_s=60) is Do.START
        world.see(UP)
    world.see(GONE)
    assert world.record.state == "failed"
    assert world.record.settled
    assert world.see(GONE, after_s=3600) is None
    world.change(generation=2)  # somebody starts it again
    assert world.see(GONE) is Do.START
    assert world.record.restarts == 0


@pytest.mark.parametrize(
    ("policy", "ended", "state"),
    [
        ("on-failure", "finished", "finished"),
        ("on-failure", "failed", "waiting"),
        ("on-failure", "stopped", "waiting"),
        ("always", "finished", "waiting"),
        ("never", "failed", "failed"),
        ("never", "finished", "finished"),
    ],
)
def test_the_policy_says_what_comes_after_the_end(policy: str, ended: str, state: str) -> None:
    world = World(restart=policy)
    world.run()
    world.see(ObservedDriver(phase=ended))
    assert world.record.state == state
    assert world.record.pid == 0


def test_a_driver_that_ended_without_a_word_has_an_error_all_the_same() -> None:
    world = World()
    world.run()
    world.see(ObservedDriver(phase="failed"))
    assert "killed" in world.record.error


@pytest.mark.parametrize("policy", ["always", "on-failure", "never"])
def test_what_would_fail_again_is_not_started_again(policy: str) -> None:
    world = World(restart=policy)
    world.run()
    assert world.see(GONE._replace(permanent=True)) is None
    assert (world.record.state, world.record.error, world.record.settled) == ("failed", "it broke", True)
    assert world.see(GONE._replace(permanent=True), after_s=3600) is None
    world.change(generation=2)  # somebody has mended it
    assert world.see(GONE._replace(permanent=True)) is Do.START


def test_a_driver_that_should_stop_is_asked_and_then_killed() -> None:
    world = World()
    world.run()
    world.change(wanted="stopped")
    assert world.see(UP) is Do.TERMINATE
    assert world.record.state == "stopping"
    assert world.see(UP, after_s=GRACE_S - 1) is None
    assert world.see(UP, after_s=1) is Do.KILL
    assert world.see(UP, after_s=1) is None
    assert world.see(UP, after_s=5) is Do.KILL
    assert world.see(ObservedDriver(phase="failed")) is None
    assert (world.record.state, world.record.error) == ("stopped", "")
    assert world.see(ObservedDriver(), after_s=100) is None


def test_a_restart_is_an_end_and_a_beginning() -> None:
    world = World()
    world.run()
    world.change(generation=2)
    assert world.see(UP) is Do.TERMINATE
    world.see(ObservedDriver(phase="stopped", locked=True))
    assert world.see(ObservedDriver(phase="stopped", locked=True)) is None  # something of the old one is there
    assert world.see(ObservedDriver(phase="stopped")) is Do.START
    assert (world.record.state_generation, world.record.restarts) == (2, 0)


def test_a_wish_to_stop_ends_the_waiting() -> None:
    world = World()
    world.run()
    world.see(GONE)
    world.change(wanted="stopped")
    assert world.see(GONE, after_s=100) is None
    assert world.record.state == "stopped"


def test_a_new_supervisor_takes_over_what_runs_and_replaces_what_does_not() -> None:
    world = World()
    world.run()
    world.memory = SupervisionState()
    assert world.see(UP) is None
    assert world.record.state == "running"
    world.memory = SupervisionState()
    assert world.see(GONE) is None
    assert world.record.state == "waiting"
    assert world.see(GONE, after_s=1) is Do.START


def test_a_supervisor_that_ends_takes_its_drivers_with_it_and_they_come_back() -> None:
    world = World()
    world.run()
    assert world.see(UP, ending=True) is Do.TERMINATE
    assert world.see(ObservedDriver(phase="stopped"), ending=True) is None
    assert (world.record.state, world.record.wanted) == ("stopped", "running")
    world.memory = SupervisionState()
    assert world.see(ObservedDriver(phase="stopped")) is Do.START


# What is done: real processes, a real broker; only the driver is no Spark.


class Stage:
    """A broker, and pipelines whose drivers are fakes."""

    def __init__(self, broker: SparkBroker, path: Path) -> None:
        self.broker = broker
        self.path = path
        self.home = broker.data / "pipelines"
        self.python = write_fake(path / "fake-python")
        self.registry = Registry(broker.bus)
        self.registry.prepare()
        self.started: list[subprocess.Popen[bytes]] = []

    def add(self, name: str, does: str = "run", **changes: Any) -> PipelineRecord:
        """Want a pipeline to run."""
        file = pipeline_file(self.path / f"{name}.sql", does)
        wanted = PipelineSettings(
            file=file,
            sha256=hashlib.sha256(Path(file).read_bytes()).hexdigest(),
            master="local[2]",
            host=host_name(),
            python=self.python,
            environment={"PYTHONPATH": ENVIRONMENT["PYTHONPATH"]},
            **changes,
        )
        record = self.registry.change(name, lambda _: PipelineRecord(name=name, definition=wanted))
        assert record is not None
        return record

    def supervise(self, *options: str) -> subprocess.Popen[bytes]:
        """Start a supervisor."""
        with (self.path / "supervisor.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "headrace", "pipeline", "supervise", "--connect", self.broker.address, *options],
                env=ENVIRONMENT,
                stdout=log,
                stderr=log,
            )
        self.started.append(process)
        return process

    def record(self, name: str) -> PipelineRecord:
        """A pipeline as the broker knows it."""
        self.registry.look()
        return self.registry.get(name)

    def until(self, name: str, **wanted: Any) -> PipelineRecord:
        """Wait for a pipeline to be so."""

        def look() -> PipelineRecord | None:
            record = self.record(name)
            return record if all(getattr(record, each) == value for each, value in wanted.items()) else None

        found: PipelineRecord = eventually(look, lambda: f"{self.record(name)}\n{self.said()}")
        return found

    def diary(self, name: str) -> list[str]:
        """When drivers were there."""
        return (self.home / name / "diary").read_text().splitlines()

    def said(self) -> str:
        """What supervisors log."""
        paths = [self.path / "supervisor.log", self.home / "supervisor.log"]
        return "\n".join(path.read_text() for path in paths if path.exists())

    def close(self) -> None:
        """End all that is left."""
        for process in self.started:
            process.kill()
            process.wait()
        self.registry.look()
        for record in list(self.registry.records.values()):
            self.registry.remove(record.name)
            driver = Folder(self.home / record.name).driver()
            if driver is not None and is_alive(driver.pid, driver.started):
                os.kill(driver.pid, signal.SIGKILL)
            eventually(lambda: not Folder(self.home / record.name).locked())  # noqa: B023 asked at once
            shutil.rmtree(self.home / record.name, ignore_errors=True)


@pytest.fixture
def stage(broker: SparkBroker, tmp_path: Path) -> Iterator[Stage]:
    yield from _staged(broker, tmp_path)


@pytest.fixture
def own_stage(own_broker: SparkBroker, tmp_path: Path) -> Iterator[Stage]:
    """With a broker that may be killed."""
    yield from _staged(own_broker, tmp_path)


def _staged(broker: SparkBroker, path: Path) -> Iterator[Stage]:
    made = Stage(broker, path)
    yield made
    made.close()
    eventually(lambda: not supervised(made.home), made.said)


def run(*arguments: str, code: int = 0) -> str:
    """What a command prints."""
    with TemporaryFile("w+", encoding="utf-8") as out, TemporaryFile("w+", encoding="utf-8") as errors:
        with redirect_stdout(out), redirect_stderr(errors):
            exit_code = main(arguments)
        said = [os.pread(file.fileno(), 1 << 24, 0).decode() for file in (out, errors)]
    assert exit_code == code, f"{exit_code}: {said[0]}{said[1]}"
    return "".join(said) if code else said[0]


def test_a_supervisor_runs_what_is_wanted_and_ends_when_nothing_is(stage: Stage) -> None:
    stage.add("one")
    stage.add("done", "finish")
    stage.add("broken", "fail", restart="never")
    supervisor = stage.supervise()
    first = stage.until("one", state="running")
    assert stage.until("done", state="finished").error == ""
    assert "as it should" in stage.until("broken", state="failed").error
    os.kill(first.pid, signal.SIGKILL)
    second = stage.until("one", state="running", restarts=1)
    assert second.pid != first.pid
    assert "SIGKILL" in second.error
    stage.registry.change("one", lambda record: record and msgspec.structs.replace(record, wanted="stopped"))
    stage.until("one", state="stopped", pid=0)
    assert supervisor.wait(SOON_S) == 0
    assert stage.diary("one") == [f"begin {first.pid}", f"begin {second.pid}", f"end {second.pid}"]
    assert stage.diary("done")[0].startswith("begin")
    assert len(stage.diary("done")) == 2


def test_a_killed_supervisor_is_followed_by_one_that_finds_its_drivers(stage: Stage) -> None:
    for name in ("stays", "goes"):
        stage.add(name)
    supervisor = stage.supervise("--stay")
    stays, goes = (stage.until(name, state="running") for name in ("stays", "goes"))
    supervisor.kill()
    supervisor.wait()
    os.kill(goes.pid, signal.SIGKILL)
    eventually(lambda: start_mark(goes.pid) is None)
    again = stage.supervise("--stay")
    back = stage.until("goes", state="running", restarts=1)
    assert stage.supervise().wait(SOON_S) == 0  # one is enough: this one ends at once
    assert stage.record("stays").pid == stays.pid
    assert stage.diary("stays") == [f"begin {stays.pid}"]
    again.terminate()
    assert again.wait(SOON_S) == 0
    assert not is_alive(stays.pid, stays.started)
    assert not is_alive(back.pid, back.started)
    assert stage.record("stays").wanted == "running"


def test_drivers_go_on_while_the_broker_is_away(own_stage: Stage) -> None:
    stage = own_stage
    stage.add("one")
    supervisor = stage.supervise("--stay")
    first = stage.until("one", state="running")
    stage.broker.kill()
    eventually(lambda: "drivers keep running" in stage.said(), stage.said)
    assert is_alive(first.pid, first.started)
    stage.broker.start()
    stage.broker.connect().close()
    eventually(lambda: "broker reachable again" in stage.said(), stage.said)
    os.kill(first.pid, signal.SIGKILL)
    stage.until("one", state="running", restarts=1)
    assert supervisor.poll() is None


def test_the_commands_do_what_they_say(stage: Stage) -> None:
    here = ("--connect", stage.broker.address)
    assert run("pipeline", "list", *here, "--json") == ""
    record = stage.add("one")
    assert "one: running" in run("pipeline", "start", "one", *here)  # starts a supervisor, as there is none
    assert supervised(stage.home)
    first = stage.record("one")
    assert "is wanted already" in stage_note("pipeline", "start", "one", *here)
    table = run("pipeline", "list", *here).splitlines()
    assert table[0].split()[:2] == ["pipeline", "state"]
    assert table[1].split()[:3] == ["one", "running", "0"]
    assert run("pipeline", "list", *here, "--names") == "one\n"
    status = json.loads(run("pipeline", "status", "one", *here, "--json"))
    assert (status["state"], status["pid"], status["supervised"]) == ("running", first.pid, True)
    assert status["log"] == str(stage.home / "one" / "log")
    assert f"process {first.pid} on" in run("pipeline", "status", "one", *here)
    assert "the fake driver says hello\n" in run("pipeline", "logs", "one", *here)
    assert json.loads(run("pipeline", "logs", "one", *here, "-n", "1", "--json")) == {
        "line": "the fake driver says hello"
    }
    assert "pipeline_in_use" in run("pipeline", "remove", "one", "--yes", *here, code=1)
    assert "one: running" in run("pipeline", "restart", "one", *here)
    second = stage.record("one")
    assert (second.pid != first.pid, second.generation, second.restarts) == (True, 2, 0)
    assert run("pipeline", "stop", "one", *here) == "one: stopped\n"
    assert stage.diary("one") == [f"{what} {pid}" for pid in (first.pid, second.pid) for what in ("begin", "end")]
    assert run("pipeline", "stop", "one", *here) == "one: stopped\n"
    assert "removed pipeline one" in run("pipeline", "remove", "one", "--yes", "--files", *here)
    assert not (stage.home / "one").exists()
    assert "pipeline_not_found" in run("pipeline", "status", "one", *here, code=1)
    eventually(lambda: not supervised(stage.home), stage.said)
    assert record.definition.file.endswith("one.sql")


def test_start_waits_until_the_queries_have_started(stage: Stage) -> None:
    here = ("--connect", stage.broker.address)
    stage.add("one", "slow")
    told = run("pipeline", "start", "one", *here, "--wait", "1s", code=1)
    stage.until("one", state="starting")
    assert "one did not start within 1s: " in told
    assert "headrace pipeline logs one" in told
    eventually(lambda: (driver := Folder(stage.home / "one").driver()) and driver.doing, stage.said)
    assert "starting query one" in run("pipeline", "start", "one", *here, "--wait", "100ms", code=1)
    assert "one: starting" in run("pipeline", "start", "one", *here, "--no-wait")
    (stage.home / "one" / "go").touch()
    assert "one: running, process" in run("pipeline", "start", "one", *here)
    assert run("pipeline", "stop", "one", *here) == "one: stopped\n"


def test_a_terminal_shows_what_a_pipeline_that_starts_is_at(stage: Stage) -> None:
    here = ("--connect", stage.broker.address)
    stage.add("one", "slow")
    terminal, theirs = pty.openpty()
    command = [sys.executable, "-m", "headrace", "pipeline", "start", "one", *here]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=theirs) as started:
        os.close(theirs)
        observed = b""
        end = time.monotonic() + SOON_S
        while b"one: starting query one (" not in observed:
            assert time.monotonic() < end, observed
            if select.select([terminal], [], [], 1.0)[0]:
                observed += os.read(terminal, 4096)
        (stage.home / "one" / "go").touch()
        assert started.wait(SOON_S) == 0
    os.close(terminal)
    assert run("pipeline", "stop", "one", *here) == "one: stopped\n"


@pytest.mark.parametrize("policy", ["never", "on-failure"])
def test_stop_does_not_show_an_old_error(stage: Stage, policy: str) -> None:
    here = ("--connect", stage.broker.address)
    stage.add("one", "fail", restart=policy)
    stage.supervise("--stay")
    eventually(lambda: "as it should" in stage.record("one").error)
    assert run("pipeline", "stop", "one", *here) == "one: stopped\n"
    assert stage.record("one").state == "stopped"
    table = run("pipeline", "list", *here).splitlines()
    assert table[1].split()[:2] == ["one", "stopped"]
    pipeline_file(stage.path / "one.sql", "run")
    assert "one: running" in run("pipeline", "start", "one", *here)
    assert run("pipeline", "stop", "one", *here) == "one: stopped\n"


def test_a_mistake_in_a_file_is_told_once_and_checkpoints_are_reset(stage: Stage) -> None:
    here = ("--connect", stage.broker.address)
    stage.add("one", "mistaken", home=str(stage.home))
    told = run("pipeline", "start", "one", *here, code=1)
    assert "one: failed: /f.py:1: the fake driver cannot do what the file says" in told
    assert (stage.record("one").restarts, len(stage.diary("one"))) == (0, 2)
    checkpoint = stage.home / "one" / "checkpoints" / "one"  # an SQL file has one query, called as the file is
    (checkpoint / "offsets").mkdir(parents=True)
    pipeline_file(stage.path / "one.sql", "run")
    assert "give --yes" in run("pipeline", "start", "one", "--reset-checkpoint", *here, code=2)
    assert checkpoint.exists()
    assert "one: running" in run("pipeline", "start", "one", "--reset-checkpoint", "--yes", *here)
    assert not checkpoint.exists()
    (kept,) = (stage.home / "one" / "checkpoints").iterdir()
    assert (kept.name.startswith("one.before-"), (kept / "offsets").is_dir()) == (True, True)
    assert "pipeline_in_use" in run("pipeline", "start", "one", "--reset-checkpoint", "--yes", *here, code=1)
    assert run("pipeline", "stop", "one", *here) == "one: stopped\n"


def test_what_a_supervisor_wrote_before_the_machine_was_restarted_is_not_believed(own_stage: Stage) -> None:
    stage = own_stage  # no supervisor of another test is about to end
    record = stage.add("one", home=str(stage.home))
    gone = {"state": "running", "state_generation": record.generation, "pid": os.getpid(), "started": "before"}
    stage.registry.change("one", lambda each: each and msgspec.structs.replace(each, **gone))
    assert f"process {os.getpid()} " not in run("pipeline", "start", "one", "--connect", stage.broker.address)
    assert stage.record("one").restarts == 0


def stage_note(*arguments: str) -> str:
    """What a command says on stderr, though all is well."""
    with TemporaryFile("w+", encoding="utf-8") as out, TemporaryFile("w+", encoding="utf-8") as errors:
        with redirect_stdout(out), redirect_stderr(errors):
            assert main(arguments) == 0
        return os.pread(errors.fileno(), 1 << 20, 0).decode()


def test_a_driver_that_cannot_be_started_is_told_of(stage: Stage) -> None:
    stage.add("nowhere", restarts_max=1)
    stage.registry.change("nowhere", lambda record: record and _with_python(record, "/no/such/python"))
    supervisor = stage.supervise()
    failed = stage.until("nowhere", state="failed")
    assert "could not be started" in failed.error
    assert failed.restarts == 1
    assert supervisor.wait(SOON_S) == 0


def _with_python(record: PipelineRecord, python: str) -> PipelineRecord:
    return msgspec.structs.replace(record, definition=msgspec.structs.replace(record.definition, python=python))


def test_what_is_run_by_hand_is_left_alone(stage: Stage) -> None:
    stage.add("one")
    folder = Folder(stage.home / "one")
    lock = folder.lock()
    supervisor = stage.supervise()
    time.sleep(1.5)
    assert stage.record("one").state == "waiting"
    lock.release()
    stage.until("one", state="running")
    supervisor.terminate()
    assert supervisor.wait(SOON_S) == 0


def test_a_driver_runs_nothing_that_is_in_the_directory_it_was_started_from(tmp_path: Path) -> None:
    for name in ("re", "json", "msgspec", "headrace"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user ran')")
    wanted = PipelineSettings(file="/no/f.sql", sha256="", master="local[2]", host="here", python=sys.executable)
    words = command(PipelineRecord(name="p", definition=wanted), "headrace://127.0.0.1:1", Folder(tmp_path / "p"))
    done = subprocess.run(words, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, timeout=SOON_S, check=False)
    assert b"there is no file /no/f.sql" in done.stderr


def test_nobody_undoes_what_another_has_written(broker: SparkBroker) -> None:
    wanted = PipelineSettings(file="/f.py", sha256="", master="local[2]", host="here")
    registries = [Registry(broker.bus) for _ in range(3)]
    registries[0].prepare()
    registries[0].change("p", lambda _: PipelineRecord(name="p", definition=wanted))
    for _ in range(10):
        for registry in registries:  # each knows less than there is
            registry.change("p", lambda each: each and msgspec.structs.replace(each, restarts=each.restarts + 1))
    registries[0].look()
    assert registries[0].get("p").restarts == 30
    registries[1].remove("p")
    registries[0].look()
    assert registries[0].records == {}


def test_a_registry_whose_log_was_trimmed_is_read_from_its_first_offset(own_stage: Stage) -> None:
    stage = own_stage
    stage.add("early")
    registry = Registry(stage.broker.bus)
    registry.look()
    stage.broker.bus.trim_topic(TOPIC, stage.broker.bus.offsets(TOPIC, at="latest"))
    assert not registry.check_kept()
    assert registry.records == {}
    stage.add("late")
    fresh = Registry(stage.broker.bus)
    assert fresh.look()
    assert list(fresh.records) == ["late"]
    assert registry.look()
    assert registry.check_kept()
    assert list(registry.records) == ["late"]
    assert registry.get("late").definition.host == host_name()


@pytest.mark.parametrize("how", ["observed", "unseen"])
def test_a_registry_that_was_trimmed_is_healed(own_stage: Stage, how: str) -> None:
    stage, here = own_stage, ("--connect", own_stage.broker.address)
    bus = stage.broker.bus
    stage.add("one")
    stage.add("gone", "finish")
    supervisor = stage.supervise("--stay")
    before = stage.until("one", state="running")
    stage.until("gone", state="finished")
    run("pipeline", "remove", "gone", "--yes", *here)
    eventually(lambda: (stage.home / "one" / "record.json").exists(), stage.said)
    if how == "unseen":
        eventually(lambda: Folder(stage.home / "one").record() == before, stage.said)
        supervisor.kill()
        supervisor.wait()
    bus.trim_topic(TOPIC, bus.offsets(TOPIC, at="latest"))
    if how == "unseen":
        assert run("pipeline", "list", *here, "--names") == ""
        stage.supervise("--stay")
    eventually(lambda: run("pipeline", "list", *here, "--names") == "one\n", stage.said)
    again = stage.until("one", state="running")
    assert (again.pid, again.generation) == (before.pid, before.generation)
    assert run("pipeline", "stop", "one", *here) == "one: stopped\n"
    assert "removed" in run("pipeline", "remove", "one", "--yes", *here)
    assert run("pipeline", "list", *here, "--names") == ""
    assert stage.diary("one") == [f"begin {before.pid}", f"end {before.pid}"]


def test_a_log_that_is_too_large_is_put_aside(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert not logs.rotate(log)
    with log.open("ab") as file:
        for turn in range(5):
            file.write(b"%d\n" % turn * 100)
            file.flush()
            assert logs.rotate(log, bytes_max=200)
            assert log.stat().st_size == 0
        file.write(b"a\nb\nc\n")
    assert [(tmp_path / f"log.{number}").read_bytes()[:1] for number in (1, 2, 3)] == [b"4", b"3", b"2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "log.1", "log.2", "log.3"]
    assert logs.last_lines(log, 2) == (b"b\nc\n", 6)
    following = logs.follow(log, 0, every_s=0.0)
    assert next(following) == b"a\nb\nc\n"
    os.truncate(log, 0)
    log.write_bytes(b"d\n")
    assert next(following) == b"d\n"
