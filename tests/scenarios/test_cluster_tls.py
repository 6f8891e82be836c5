"""Certificates of nodes that are replaced, broken or expired, while they serve and while they follow."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import make_ca
from tests.node_process import NodeProcess, caught_up, connect, eventually, owner_of

from headrace.errors import Busy
from headrace.security.development_ca import CertificateFiles

KEPT = "certificates not reloaded; the old ones stay in use"
RELOADED = "certificates reloaded"


class TlsStage:
    """Nodes that speak TLS, each with a certificate of its own."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._ca = make_ca(place / "ca")
        self.options = {"ca": str(place / "ca" / "ca.pem")}
        self.nodes: list[NodeProcess] = []

    def certify(self, name: str, **validity: Any) -> CertificateFiles:
        """Write the certificate of a node, in the place of the one before."""
        return self._ca.make_server(["127.0.0.1"], files=(f"{name}.pem", f"{name}-key.pem"), **validity)

    def expire(self, name: str) -> CertificateFiles:
        """Write one that has expired."""
        return self.certify(name, not_before=datetime.now(UTC) - timedelta(days=2), days=1)

    def start(self, name: str, files: CertificateFiles) -> NodeProcess:
        tls = ("--tls-certificate", files.certificate, "--tls-key", files.key, "--node-ca", self.options["ca"])
        self.nodes.append(NodeProcess(self._place, name, *tls))
        return self.nodes[-1]

    def move(self, to: NodeProcess) -> None:
        """Hand the shard over, and wait for it."""
        with connect(self.nodes, **self.options) as bus:
            bus.cluster.move(0, to.name)
        eventually(lambda: owner_of(self.nodes, **self.options) == to.name)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[TlsStage]:
    made = TlsStage(tmp_path)
    yield made
    for node in made.nodes:
        node.end()


@pytest.mark.parametrize("way", ["expired", "garbage"])
def test_a_bad_certificate_does_not_replace_that_of_a_node_whoever_serves(stage: TlsStage, way: str) -> None:
    a, b = (stage.start(name, stage.certify(name)) for name in "ab")
    eventually(lambda: caught_up(stage.nodes, "b", **stage.options))
    files = stage.expire("b")
    if way == "garbage":
        Path(files.certificate).write_text("garbage")
    eventually(lambda: KEPT in b.log.read_text())
    stage.move(b)
    with connect([b], **stage.options) as bus:  # with the one that it had
        bus.publish("orders", b"1")
    stage.move(a)
    stage.certify("b")
    eventually(lambda: RELOADED in b.log.read_text())
    stage.move(b)
    assert b.log.read_text().count(KEPT) == 1
    assert "node ends" not in b.log.read_text()


def test_a_node_whose_certificate_has_expired_leaves_the_shard_to_others(stage: TlsStage) -> None:
    a = stage.start("a", stage.certify("a"))
    b = stage.start("b", stage.expire("b"))
    c = stage.start("c", stage.certify("c"))
    for name in "bc":
        eventually(lambda: caught_up(stage.nodes, name, **stage.options))  # noqa: B023
    with connect(stage.nodes, **stage.options, timeout=3) as bus:
        bus.publish("orders", b"1")
        with pytest.raises(Busy, match=r"b cannot take the shard over yet: .*its certificate is not valid now"):
            bus.cluster.move(0, "b")
    a.kill()
    assert eventually(lambda: owner_of([c], **stage.options)) == "c"
    assert "claiming" not in b.log.read_text()
    stage.certify("b")
    eventually(lambda: RELOADED in b.log.read_text())
    stage.move(b)
