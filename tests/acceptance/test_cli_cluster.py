"""The commands of clusters, with real nodes on a directory, and on PostgreSQL where there is one."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.acceptance.test_cli_routes import run
from tests.cluster_processes import CLUSTER, ClusterProcesses
from tests.commands import run_command
from tests.known import ENVIRONMENT
from tests.store_servers import PostgresServer, running

import headrace
from headrace.cli.commands.restore import _moment
from headrace.storage.replicated.keys import Position


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    """Two nodes on a directory."""
    directory = tmp_path_factory.mktemp("cluster")
    with ClusterProcesses(directory, f"directory://{directory}/store") as nodes:
        yield nodes


def owner_of(cluster: ClusterProcesses) -> tuple[str, str]:
    """The node that serves, and another one."""
    with headrace.connect(cluster.url) as bus:
        owner = bus.cluster.describe().shards[0].owner
    return owner, next(name for name in cluster.names if name != owner)


def published(url: str, topic: str, *values: bytes) -> None:
    """Publish to a topic."""
    with headrace.connect(url) as bus:
        assert all(receipt.durability == headrace.Durability.REPLICATED for receipt in bus.publish_many(topic, values))


def values_of(bus: headrace.Bus, topic: str) -> list[str]:
    """What a topic of one partition holds."""
    batches = bus.fetch(topic, 0, 0)
    return [(value or b"").decode() for batch in batches for value in batch.columns().values]


def served(data: Path, topic: str) -> list[str]:
    """What a topic holds, if a broker without a cluster serves a directory."""
    with headrace.open(str(data)) as bus:
        return values_of(bus, topic)


def at_store(cluster: ClusterProcesses) -> tuple[str, ...]:
    """The options that name the cluster in its store."""
    return "--store", cluster.store, "--cluster", CLUSTER


def is_level(cluster: ClusterProcesses) -> bool:
    """Whether no node lags behind."""
    with headrace.connect(cluster.url) as bus:
        return not any(node.lag_objects for node in bus.cluster.describe().nodes)


def test_the_status_names_nodes_roles_and_the_store(cluster: ClusterProcesses) -> None:
    owner, other = owner_of(cluster)
    cluster.wait_until(lambda: is_level(cluster), "catching up")
    lines = run("cluster", "status", "--connect", cluster.url).stdout.splitlines()
    assert lines[0] == f"cluster  {CLUSTER}"
    assert lines[1].startswith("store    directory:")
    assert re.match(rf"shard    0: {owner} serves, epoch \d+", lines[2])
    at = lines.index("")
    assert lines[at + 1].split()[:3] == ["node", "role", "lag"]
    rows = {line.split()[0]: line for line in lines[at + 2 :]}
    assert rows[owner].split()[1] == "serving"
    assert rows[other].split()[1:3] == ["following", "0"]
    assert f"127.0.0.1:{cluster.ports[other]}" in rows[other]
    found = json.loads(run("cluster", "status", "--json", "--connect", cluster.url).stdout)
    assert {node["node"]: node["role"] for node in found["nodes"]} == {owner: "serving", other: "following"}
    assert found["shards"][0]["owner"] == owner
    assert headrace.__version__ in {node["version"] for node in found["nodes"]}


def test_any_node_can_be_asked(cluster: ClusterProcesses) -> None:
    owner, other = owner_of(cluster)
    one = f"headrace://127.0.0.1:{cluster.ports[other]}"
    found = json.loads(run("cluster", "status", "--json", "--connect", one).stdout)
    assert found["node"] == owner


def test_a_drained_node_hands_over_and_stays_out_until_it_is_undone(cluster: ClusterProcesses) -> None:
    owner, other = owner_of(cluster)
    published(cluster.url, "drained", b"before")
    done = run("cluster", "drain", owner, "--connect", cluster.url).stdout.splitlines()
    assert re.match(rf"{other} serves shard 0 instead of {owner}, epoch \d+ \(", done[0])
    assert done[1] == f"{owner} is drained"
    assert owner_of(cluster)[0] == other
    published(cluster.url, "drained", b"after")
    cluster.wait_until(lambda: cluster.roles().get(owner) == "following", "following")
    status = json.loads(run("cluster", "status", "--json", "--connect", cluster.url).stdout)
    assert [node["node"] for node in status["nodes"] if node["drained"]] == [owner]
    undone = json.loads(run("cluster", "drain", owner, "--undo", "--json", "--connect", cluster.url).stdout)
    assert undone == {"node": owner, "drained": False, "moved": []}
    moved = json.loads(run("cluster", "move", "0", owner, "--json", "--connect", cluster.url).stdout)
    assert (moved["node"], moved["node_before"], moved["shard"], moved["moved"]) == (owner, other, 0, True)
    assert moved["seconds"] < 30
    again = run("cluster", "move", "0", owner, "--connect", cluster.url).stdout
    assert again == f"{owner} serves shard 0 already: nothing to do\n"
    with headrace.connect(cluster.url) as bus:
        assert values_of(bus, "drained") == ["before", "after"]
    cluster.wait_until(lambda: cluster.roles().get(other) == "following", "following")


def test_what_cannot_be_moved_is_told(cluster: ClusterProcesses) -> None:
    assert "node-9" in run("cluster", "move", "0", "node-9", "--connect", cluster.url, code=1).stderr
    assert "node-9" in run("cluster", "drain", "node-9", "--connect", cluster.url, code=1).stderr
    run("cluster", "move", "7", "node-1", "--connect", cluster.url, code=1)
    assert "is not a whole number" in run("cluster", "move", "x", "node-1", "--connect", cluster.url, code=2).stderr


def test_an_upgrade_to_the_format_there_is_does_nothing(cluster: ClusterProcesses) -> None:
    done = json.loads(run("cluster", "upgrade", "--json", "--connect", cluster.url).stdout)
    assert done["format"] == done["format_before"]
    assert run("cluster", "upgrade", "--connect", cluster.url).stdout.endswith("already: nothing to do\n")


def test_a_broker_without_a_cluster_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headrace", "serve", "--data", str(tmp_path / "data"), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        port = json.loads(process.stdout.readline())["port"]
        refused = run("cluster", "status", "--connect", f"headrace://127.0.0.1:{port}", code=1).stderr
        process.terminate()
    assert "not part of a cluster" in refused


def test_an_earlier_state_can_be_restored(cluster: ClusterProcesses, tmp_path: Path) -> None:
    published(cluster.url, "restored", b"first")
    time.sleep(0.3)
    between = time.time_ns() // 1000
    time.sleep(0.3)
    published(cluster.url, "restored", b"second")
    points = [json.loads(line) for line in run("restore", *at_store(cluster), "--list", "--json").stdout.splitlines()]
    assert points[-1]["what"] == "newest"
    assert points[0]["what"] == "beginning"
    assert points[0]["time_us"] > 0
    assert run("restore", *at_store(cluster), "--list").stdout.splitlines()[0].split() == ["what", "position", "time"]
    done = json.loads(run("restore", *at_store(cluster), "--at", str(between), str(tmp_path / "then"), "--json").stdout)
    assert done["files"] > 0
    assert done["time_us"] <= between
    assert served(tmp_path / "then", "restored") == ["first"]
    run("restore", *at_store(cluster), "--at", "-0.2s", str(tmp_path / "a-while-ago"))
    exact = run("restore", *at_store(cluster), "--at", done["position"], str(tmp_path / "exact")).stdout
    assert f"as of {done['position']}" in exact
    assert served(tmp_path / "exact", "restored") == ["first"]
    text = run("restore", *at_store(cluster), str(tmp_path / "newest")).stdout
    assert text.endswith(f"serve it: headrace serve --data {tmp_path / 'newest'}\n")
    assert served(tmp_path / "newest", "restored") == ["first", "second"]
    assert run("verify", str(tmp_path / "newest")).stdout.splitlines()[-1] == "sound"


def test_what_cannot_be_restored_is_told(cluster: ClusterProcesses, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    assert "not an empty directory" in run("restore", *at_store(cluster), str(tmp_path / "full"), code=1).stderr
    none = ("--store", cluster.store, "--cluster", "none")
    assert "has no cluster none" in run("restore", *none, str(tmp_path / "x"), code=1).stderr
    assert "has no cluster none" in run("restore", *none, "--list", code=1).stderr
    assert "has no position" in run("restore", *at_store(cluster), "--at", "9:9", str(tmp_path / "y"), code=1).stderr
    assert not (tmp_path / "y").exists()
    early = run("restore", *at_store(cluster), "--at", "2001-01-01T00:00:00Z", str(tmp_path / "z"), code=1).stderr
    assert "had no data yet at that moment: it begins at 1:2 of 20" in early
    assert not (tmp_path / "z").exists()
    assert "give the DIRECTORY" in run("restore", *at_store(cluster), code=2).stderr
    assert "leave out DIRECTORY" in run("restore", *at_store(cluster), "--list", "x", code=2).stderr
    assert "nor a position" in run("restore", *at_store(cluster), "--at", "soon", "x", code=2).stderr
    assert "in the future" in run("restore", *at_store(cluster), "--at", "+10m", "x", code=2).stderr


@pytest.mark.parametrize(("text", "age_s"), [("-10m", 600), ("90s ago", 90), ("-1.5h", 5400)])
def test_moments_may_be_relative(text: str, age_s: float) -> None:
    found = _moment(text)
    assert isinstance(found, int)
    assert abs(time.time() - found / 1e6 - age_s) < 5


def test_a_position_is_an_epoch_and_a_number() -> None:
    assert _moment("3:1042") == Position(3, 1042)
    assert _moment("2026-01-31T12:00:00Z") == 1_769_860_800_000_000


def filled(data: Path) -> None:
    """A data directory with messages, a group and a role."""
    with headrace.open(str(data)) as bus:
        bus.create_topic("orders")
        bus.publish_many("orders", [b"3 apples", b"5 pears"])
        bus.commit("billing", {("orders", 0): 1})
        bus.auth.set_role("bookkeeper", [headrace.Grant(["consume"], "topic", ["orders"])])


def test_a_directory_becomes_a_cluster_and_comes_back(tmp_path: Path) -> None:
    filled(tmp_path / "data")
    store = f"directory://{tmp_path}/store"
    options = ("--store", store, "--cluster", CLUSTER)
    lines = run("cluster", "import", str(tmp_path / "data"), *options).stdout.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'data'} is cluster {CLUSTER} in directory:")
    assert lines[0].endswith("read back and compared")
    assert lines[1] == "security definitions copied"
    assert served(tmp_path / "data", "orders") == ["3 apples", "5 pears"]  # it is as it was
    again = run("cluster", "import", str(tmp_path / "data"), *options, code=1).stderr
    assert f"has a cluster {CLUSTER} already" in again
    with ClusterProcesses(tmp_path, store) as nodes, headrace.connect(nodes.url) as bus:
        assert values_of(bus, "orders") == ["3 apples", "5 pears"]
        assert [place.offset for place in bus.describe_group("billing").places] == [1]
        assert "bookkeeper" in {role.name for role in bus.auth.describe().roles}
        assert bus.publish("orders", b"2 plums").offset == 2
        bus.auth.set_role("checker", [headrace.Grant(["consume"], "topic", ["audit"])])
    done = json.loads(run("cluster", "export", str(tmp_path / "exported"), *options, "--json").stdout)
    assert (done["cluster"], done["path"]) == (CLUSTER, str(tmp_path / "exported"))
    assert served(tmp_path / "exported", "orders") == ["3 apples", "5 pears", "2 plums"]
    with headrace.open(str(tmp_path / "exported")) as bus:
        assert {"checker", "bookkeeper"} <= {role.name for role in bus.auth.describe().roles}
        assert bus.publish("orders", b"1 fig").offset == 3


def test_a_damaged_directory_is_imported_only_on_demand(tmp_path: Path) -> None:
    filled(tmp_path / "data")
    options = ("--store", f"directory://{tmp_path}/store", "--cluster", CLUSTER)
    (path,) = (tmp_path / "data" / "topics").glob("*/0/*.seg")
    content = bytearray(path.read_bytes())
    content[len(content.rstrip(b"\0")) - 3] ^= 1
    path.write_bytes(content)
    refused = run("cluster", "import", str(tmp_path / "data"), *options, code=1).stderr
    assert f"{tmp_path / 'data'} is damaged: offsets 0 to 1 in {path}" in refused
    assert f"`headrace repair {tmp_path / 'data'}`" in refused
    done = json.loads(run("cluster", "import", str(tmp_path / "data"), *options, "--damaged", "--json").stdout)
    assert done["cluster"] == CLUSTER


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    options = ("--store", f"directory://{tmp_path}/store", "--cluster", CLUSTER)
    with headrace.open(str(tmp_path / "data")) as bus:
        bus.publish("orders", b"1")
        refused = run("cluster", "import", str(tmp_path / "data"), *options, code=1).stderr
        assert "is in use by process" in refused
    assert "[" in run("cluster", "import", str(tmp_path / "nothing"), *options, code=1).stderr
    node = tmp_path / "node"
    (node / "shards" / "000").mkdir(parents=True)
    assert "has only a part of the data" in run("cluster", "import", str(node), *options, code=1).stderr
    wrong = ("--store", f"directory://{tmp_path}/store", "--cluster", "../up")
    assert "cluster must be" in run("cluster", "import", str(tmp_path / "data"), *wrong, code=1).stderr


def test_a_node_refuses_the_directory_of_a_plain_broker(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    filled(plain)
    before = sorted(path for path in plain.rglob("*"))
    options = ("--store", f"directory://{tmp_path}/store", "--cluster", CLUSTER)
    serve = ("serve", "--data", str(plain), "--port", "0", "--node", "q", *options)
    refused = run_command(serve, timeout_s=60)  # apart from pytest, whose log handlers it would replace
    assert refused.returncode == 1
    assert b"has the data of a broker that is not a node; `headrace cluster import" in refused.stderr
    assert sorted(path for path in plain.rglob("*")) == before
    assert not (tmp_path / "store").exists()
    run("cluster", "import", str(plain), *options)


@pytest.mark.parametrize("in_order", [True, False], ids=["stopped", "killed"])
def test_the_directory_of_a_node_is_imported_after_the_loss_of_the_store(in_order: bool, tmp_path: Path) -> None:
    with ClusterProcesses(tmp_path, f"directory://{tmp_path}/lost", nodes=1) as nodes:
        published(nodes.url, "orders", b"3 apples", b"5 pears")
        with headrace.connect(nodes.url) as bus:
            bus.auth.set_role("bookkeeper", [headrace.Grant(["consume"], "topic", ["orders"])])
            time.sleep(0.5)  # the journal has the definitions a moment later
            bus.publish("orders", b"2 plums")
        data = tmp_path / "node-1" / "data"
        options = ("--store", f"directory://{tmp_path}/other", "--cluster", "rescued")
        assert "is in use by process" in run("cluster", "import", str(data), *options, code=1).stderr
        if in_order:
            assert nodes.stop("node-1") == 0
        else:
            nodes.kill("node-1")
    shutil.rmtree(tmp_path / "lost")
    lines = run("cluster", "import", str(data), *options).stdout.splitlines()
    assert lines[1].startswith(f"it is the copy of node node-1 of cluster {CLUSTER}")
    assert ("stopped in order" in lines[1], "never committed" in lines[1]) == (in_order, not in_order)
    assert lines[2] == "security definitions copied"
    run("cluster", "export", str(tmp_path / "exported"), *options)
    assert served(tmp_path / "exported", "orders") == ["3 apples", "5 pears", "2 plums"]
    with headrace.open(str(tmp_path / "exported")) as bus:
        assert "bookkeeper" in {role.name for role in bus.auth.describe().roles}


def test_postgresql_is_a_store(tmp_path: Path) -> None:
    with running(PostgresServer) as server:
        with ClusterProcesses(tmp_path, server.url, 2, server.environment) as nodes:
            published(nodes.url, "orders", b"3 apples")
            owner, other = owner_of(nodes)
            nodes.kill(owner)
            published(nodes.url, "orders", b"5 pears")
            found = json.loads(run("cluster", "status", "--json", "--connect", nodes.url).stdout)
            assert found["shards"][0]["owner"] == other
            assert server.environment["PGPASSWORD"] not in json.dumps(found)
        secret = tmp_path / "credentials"
        secret.write_text(f"PGPASSWORD={server.environment['PGPASSWORD']}\n")
        options = ("--store", server.url, "--cluster", CLUSTER, "--store-credentials-file", str(secret))
        run("cluster", "export", str(tmp_path / "exported"), *options)
        assert served(tmp_path / "exported", "orders") == ["3 apples", "5 pears"]
