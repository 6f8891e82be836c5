"""The commands of tenants, used as a person or a script uses them."""

# Fixtures that come from another file are used by their names only.
# ruff: noqa: F401, F811

import json

from tests.acceptance.test_cli_broker import broker, serving, topic
from tests.acceptance.test_cli_routes import run


def test_a_tenant_from_its_making_to_its_end(broker: str, topic: str) -> None:
    at = ("--connect", broker)
    name = f"t{abs(hash(topic)) % 10_000_000}"
    quotas = ("--quota", "topics=1", "--quota", "bytes_in=10MB")
    assert run("tenant", "create", name, "--description", "A customer", *quotas, *at).stdout == f"created {name}\n"
    assert "[tenant_exists]" in run("tenant", "create", name, *at, code=1).stderr
    own = (*at, "--tenant", name)
    run("topic", "create", topic, *own)
    refused = run("topic", "create", f"{topic}-2", *own, code=1).stderr
    assert "[quota_exceeded]" in refused
    assert f"headrace tenant alter {name} --quota topics=N" in refused
    assert name in run("tenant", "list", "--names", *at).stdout.split()
    described = json.loads(run("tenant", "describe", name, "--json", *at).stdout)
    assert (described["quotas"], described["usage"]["topics"]) == ({"topics": 1, "bytes_in": 10_000_000}, 1)
    lines = run("tenant", "usage", *own).stdout.splitlines()
    assert lines[0].split() == ["resource", "used", "quota"]
    assert lines[1].split() == ["topics", "1", "1"]
    assert lines[-1].split() == ["bytes_in", "per", "second", "10MB"]
    run("tenant", "alter", name, "--quota", "topics=none", "--quota", "groups=2", *at)
    usage = json.loads(run("tenant", "usage", name, "--json", *at).stdout)
    assert usage["limits"] == {"groups": 2, "bytes_in": 10_000_000}
    assert "[tenant_not_empty]" in run("tenant", "delete", name, *at, code=1).stderr
    assert run("tenant", "delete", name, "--force", *at).stdout == f"deleted {name}\n"
    assert "[tenant_not_found]" in run("tenant", "describe", name, *at, code=1).stderr


def test_wrong_quotas_are_told_before_anything_is_asked(broker: str) -> None:
    for wrong in ("topcis=1", "topics", "topics=many"):
        refused = run("tenant", "create", "x", "--quota", wrong, "--connect", broker, code=2).stderr
        assert "argument --quota" in refused
