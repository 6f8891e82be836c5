"""Three nodes with security and TLS: they authenticate to each other by a token or by certificates."""

import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import make_ca
from tests.known import ENVIRONMENT
from tests.node_process import NodeProcess, caught_up, connect, describe, eventually, owner_of

import headrace
from headrace.errors import Forbidden, NotAuthenticated, SecurityRequired


class SecureStage:
    """A cluster whose security was initialised on its first node, as the documentation says."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.ca = make_ca(place / "ca")
        self.server = self.ca.make_server(["127.0.0.1", "localhost"])
        self.tls = ("--tls-certificate", self.server.certificate, "--tls-key", self.server.key)
        self.nodes: list[NodeProcess] = []
        first = NodeProcess(place, "a")
        local = ("--connect", f"headrace+unix://{first.data}/headrace.sock")
        self.admin, self.token = str(place / "admin.token"), str(place / "node.token")
        self._say("auth", "init", "--no-certificates", "--save", self.admin, *local)
        self._say("auth", "bind", "node", "node-*", *local)
        self._say("auth", "token", "create", "node-all", "--save", self.token, *local)
        assert first.terminate() == 0

    def _say(self, *words: str) -> None:
        said = subprocess.run([sys.executable, "-m", "headrace", *words], env=ENVIRONMENT, capture_output=True)
        assert said.returncode == 0, said.stderr.decode()

    def start(self, name: str, *more: str, **options: Any) -> NodeProcess:
        node = NodeProcess(self.place, name, *self.tls, *more, **options)
        self.nodes.append(node)
        return node

    @property
    def as_admin(self) -> dict[str, str]:
        return {"token_file": self.admin, "ca": str(self.place / "ca" / "ca.pem")}


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[SecureStage]:
    made = SecureStage(tmp_path)
    yield made
    for node in made.nodes:
        node.end()


def roles(stage: SecureStage) -> dict[str, str]:
    return roles_of(stage.nodes, stage.as_admin)


def roles_of(nodes: list[NodeProcess], options: dict[str, str]) -> dict[str, str]:
    return {node.node: node.role for node in describe(nodes, **options).nodes}


def test_nodes_with_a_token_follow_over_tls_and_definitions_survive_failovers(stage: SecureStage) -> None:
    trust = ("--node-token-file", stage.token, "--node-ca", str(stage.place / "ca" / "ca.pem"))
    a, b, c = (stage.start(name, *trust) for name in "abc")
    assert a.url.startswith("headraces://")
    assert a.http.startswith("https://")
    options = stage.as_admin
    for name in "bc":
        eventually(lambda: caught_up(stage.nodes, name, **options))  # noqa: B023
    with pytest.raises(NotAuthenticated), connect(stage.nodes, ca=options["ca"]) as bus:
        bus.topics()
    with connect(stage.nodes, token_file=stage.token, ca=options["ca"]) as bus:
        with pytest.raises(Forbidden):
            bus.publish("orders", b"by a node")
        assert bus.cluster.describe().shards[0].owner == "a"
    with connect([b], **options) as bus:
        bus.publish("orders", b"1")
        bus.auth.bind("developer", "ada")
        token = bus.auth.create_token("ada").token
    context = ssl.create_default_context(cafile=options["ca"])
    asked = urllib.request.Request(f"{c.http}/v1/topics", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(asked, context=context, timeout=10) as answer:  # redirected to the owner
        assert answer.geturl().startswith(a.http)
        assert answer.status == 200
    a.kill()
    with connect([b, c], token=token, ca=options["ca"]) as bus:
        assert bus.publish("orders", b"2").offset == 1
        with pytest.raises(Forbidden):
            bus.auth.create_token("eve")
    assert eventually(lambda: "serving" in roles(stage).values())


def test_nodes_authenticate_by_client_certificates(stage: SecureStage) -> None:
    trust = ("--tls-client-ca", str(stage.place / "ca" / "ca.pem"))
    for name in "ab":
        files = stage.ca.make_client(f"node-{name}")
        stage.start(name, *trust, "--node-certificate", files.certificate, "--node-key", files.key)
    eventually(lambda: caught_up(stage.nodes, "b", **stage.as_admin))
    with connect(stage.nodes, **stage.as_admin) as bus:
        assert {one.node: one.lag_us < 2_000_000 for one in bus.cluster.describe().nodes} == {"a": True, "b": True}
        bus.cluster.move(0, "b")  # only a follower that reports can take over in order
    eventually(lambda: owner_of(stage.nodes, **stage.as_admin) == "b")


def test_a_follower_with_a_wrong_token_says_so_once_and_takes_nothing_over(stage: SecureStage) -> None:
    wrong = stage.place / "wrong.token"
    wrong.write_text(Path(stage.token).read_text().strip()[:-4] + "AAAA\n")
    ca = ("--node-ca", str(stage.place / "ca" / "ca.pem"))
    stage.start("a", "--node-token-file", stage.token, *ca)
    b = stage.start("b", "--node-token-file", str(wrong), *ca)
    time.sleep(8)  # longer than any of the limits after which an owner counts as dead
    status = describe(stage.nodes, **stage.as_admin)
    assert {one.node: one.role for one in status.nodes} == {"a": "serving", "b": "following"}
    lines = [line for line in b.log.read_text().splitlines() if "owner refuses this node" in line]
    assert len(lines) == 1, b.log.read_text()
    assert "--node-token-file" in lines[0]
    assert "claiming" not in b.log.read_text()
    stage.nodes[0].kill()
    eventually(lambda: owner_of([b], **stage.as_admin) == "b")  # by the store alone


def test_a_change_on_one_node_counts_on_the_next_owner_within_a_second(stage: SecureStage) -> None:
    trust = ("--node-token-file", stage.token, "--node-ca", str(stage.place / "ca" / "ca.pem"))
    for name in "ab":
        stage.start(name, *trust)
    eventually(lambda: caught_up(stage.nodes, "b", **stage.as_admin))
    with connect(stage.nodes, **stage.as_admin) as bus:
        made = bus.auth.create_token("ada")
        bus.auth.bind("developer", "ada")
        bus.auth.revoke(made.info.id)
    stage.nodes[0].kill()
    with pytest.raises(NotAuthenticated), connect([stage.nodes[1]], token=made.token, ca=stage.as_admin["ca"]) as bus:
        bus.topics()


def test_without_security_no_node_listens_on_the_network(tmp_path: Path) -> None:
    first = NodeProcess(tmp_path, "a")
    second = NodeProcess(tmp_path, "b", "--host", "0.0.0.0", starts=False)
    try:
        assert "security is not enabled" in second.fail()
        with connect([first]) as bus:
            assert bus.publish("orders", b"1").durability is headrace.Durability.REPLICATED
    finally:
        first.end()
        second.end()


def test_security_stays_on_while_a_network_reaches_any_node(tmp_path: Path) -> None:
    made = SecureStage(tmp_path)
    try:
        made.start("a", "--node-token-file", made.token, "--node-ca", str(tmp_path / "ca" / "ca.pem"))
        b = made.start(
            *("b", "--node-token-file", made.token, "--node-ca", str(tmp_path / "ca" / "ca.pem")),
            *("--advertise", "headraces://node-b.example.org:7390"),
        )
        eventually(lambda: caught_up(made.nodes[:1], "b", **made.as_admin))
        with connect(made.nodes[:1], **made.as_admin) as bus:
            with pytest.raises(SecurityRequired, match=r"node-b\.example\.org"):
                bus.auth.enable(False)
            assert b.terminate() == 0
            eventually(lambda: roles_of(made.nodes[:1], made.as_admin)["b"] == "stopped")
            bus.auth.enable(False)
    finally:
        for node in made.nodes:
            node.end()
