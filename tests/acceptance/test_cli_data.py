"""`headrace verify` and `headrace repair`, as a person or a script uses them."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.commands import Finished, run_command

import headrace
from headrace.model.errors import DataDirectoryDamaged, NotADataDirectory

SOON_S = 60.0


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The data of a broker that has ended."""
    path = tmp_path / "data"
    with headrace.open(str(path)) as bus:
        bus.create_topic("orders", partitions=2)
        bus.publish_many("orders", [b"apples", b"pears"], partition=1)
        bus.publish("jobs", b"resize")
        with bus.subscribe("orders", group="billing", timeout=20) as orders:
            for message in orders:
                orders.commit()
                if message.value == b"pears":
                    break
    return path


def run(*arguments: str, code: int = 0) -> Finished:
    """Run a command to its end, which must have this exit code and no traceback."""
    done = run_command(arguments, timeout_s=SOON_S)
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    assert done.returncode == code, (done.stdout, done.stderr)
    return done


def lines(*arguments: str, code: int = 0) -> list[str]:
    return run(*arguments, code=code).stdout.decode().splitlines()


def told(*arguments: str, code: int = 0) -> dict[str, Any]:
    """What a command prints with --json."""
    found: dict[str, Any] = json.loads(run(*arguments, "--json", code=code).stdout)
    return found


def flip_first_fact(data: Path) -> None:
    (path,) = (data / "broker" / "journal").glob("*.seg")
    content = bytearray(path.read_bytes())
    content[100] ^= 4
    path.write_bytes(content)


def test_a_sound_directory_is_said_to_be_so(data: Path) -> None:
    found = lines("verify", str(data))
    assert re.fullmatch(rf"{data}: 2 topics, 5 logs, [0-9,]+ bytes checked", found[0])
    assert found[1:] == ["sound"]
    assert lines("repair", str(data)) == [f"{data}: 5 logs checked", "nothing to repair"]
    content = told("verify", str(data))
    assert (content["sound"], content["topics"], content["problems"], content["set_aside"]) == (True, 2, [], [])


def test_a_lost_journal_is_told_repaired_and_told_of(data: Path) -> None:
    shutil.rmtree(data / "broker")
    with pytest.raises(DataDirectoryDamaged, match=f"headrace repair {data}"):
        headrace.open(str(data))
    found = lines("verify", str(data), code=3)
    assert any(line.startswith(f"problem: {data}/broker/journal") for line in found)
    assert found[-1].startswith("DAMAGED; ")
    done = lines("repair", str(data))
    assert "restored: 2 topics, 0 groups, 0 leased subscriptions, 0 schedules" in done
    assert {"  from its partitions: orders", "  from its partitions: jobs"} <= set(done)
    assert any(line.startswith("not restored: the lost part of the journal") for line in done)
    assert done[-1] == "repaired"
    with headrace.open(str(data)) as bus:
        assert bus.describe_topic("orders").settings["partitions"] == 2
        assert [message.value for batch in bus.fetch("orders", 1, 0) for message in batch.messages()] == [
            b"apples",
            b"pears",
        ]
    assert lines("verify", str(data))[-1] == "sound"


def test_a_damaged_journal_is_kept_and_what_follows_the_damage_counts(data: Path) -> None:
    flip_first_fact(data)
    problems = told("verify", str(data), code=3)["problems"]
    assert "facts are lost" in problems[0]["problem"]
    done = told("repair", str(data))
    assert (done["changed"], done["topics"], done["groups"]) == (True, ["jobs", "orders"], 1)
    (kept,) = done["set_aside"]
    assert kept["path"] == f"{data}/set-aside/broker-journal.1"
    after = told("verify", str(data))
    assert (after["sound"], after["set_aside"][0]["path"]) == (True, kept["path"])
    with headrace.open(str(data)) as bus:
        assert [at.offset for at in bus.describe_group("billing").places] == [0, 2]


def test_a_journal_that_the_system_does_not_let_us_read_is_left_alone(data: Path) -> None:
    (path,) = (data / "broker" / "journal").glob("*.seg")
    content = path.read_bytes()
    path.unlink()
    path.mkdir()  # no permission stops root
    run("repair", str(data), code=1)
    path.rmdir()
    path.write_bytes(content)
    assert lines("verify", str(data))[-1] == "sound"


@pytest.mark.parametrize("command", ["verify", "repair"])
def test_a_directory_that_is_not_a_brokers_is_left_alone(tmp_path: Path, command: str) -> None:
    (tmp_path / "broker").mkdir()
    (tmp_path / "broker" / "main.py").write_text("mine")
    assert b"[not_a_data_directory]" in run(command, str(tmp_path), code=1).stderr
    assert b"[not_a_data_directory]" in run(command, str(tmp_path / "nowhere"), code=1).stderr
    assert sorted(os.listdir(tmp_path)) == ["broker"]


def test_a_broker_does_not_move_in_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(NotADataDirectory, match=r"thesis\.tex"):
        headrace.open(str(tmp_path))
    refused = run("serve", "--data", str(tmp_path), "--port", "0", code=1)
    assert b"[not_a_data_directory]" in refused.stderr
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_help_tells_of_exit_codes() -> None:
    assert "Exit code: 0 sound, 3 damaged" in run("verify", "--help").stdout.decode()
    assert "Nothing is deleted" in run("repair", "--help").stdout.decode()
    run("verify", code=2)
