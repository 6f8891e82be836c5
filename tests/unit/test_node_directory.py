"""The directory of a node of a cluster is the node's: no command for the data of a plain broker takes it for one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.test_data_directory import contents
from tests.unit.test_directory_copy import as_node, opened, restore, values

import headrace
from headrace.model.errors import NotADataDirectory
from headrace.offline import upgrade_data
from headrace.server import import_directory, repair_data, verify_data

ORDERS = [b"3 apples", b"5 pears"]
PLAIN: list[Callable[[str], Any]] = [
    opened,
    lambda data: verify_data(data, lambda _: None),
    lambda data: repair_data(data, lambda _: None),
    lambda data: upgrade_data(data, lambda _: None),
]


def rescue_store(data: str) -> str:
    """A store beside the directory of the node."""
    return f"directory://{data.partition('/node')[0]}/rescue"


def imported(data: str) -> None:
    import_directory(data, rescue_store(data), "rescued", "", lambda *_: None)


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """The directory of a node that stopped."""
    with headrace.open(str(tmp_path / "node"), store=f"directory://{tmp_path}/store", cluster="trading") as bus:
        bus.publish_many("orders", ORDERS)
    return tmp_path / "node"


@pytest.mark.parametrize("use", PLAIN)
def test_the_directory_of_a_node_is_refused(node: Path, use: Callable[[str], Any]) -> None:
    before = contents(node)
    with pytest.raises(NotADataDirectory, match="is the directory of a node of a cluster") as refused:
        use(str(node))
    for text in ("compares its copy with the store at each start", f"headrace serve --data {node} --cluster"):
        assert text in str(refused.value)
    for text in ("`headrace cluster status`", "`headrace cluster export`"):
        assert text in str(refused.value)
    assert contents(node) == before


@pytest.mark.parametrize("use", [*PLAIN, imported, as_node])
@pytest.mark.parametrize("end", ["", "/"])
def test_the_copy_of_a_node_is_refused(node: Path, use: Callable[[str], Any], end: str) -> None:
    before = contents(node)
    with pytest.raises(NotADataDirectory, match=f"is the copy of a cluster that its node keeps in {node}"):
        use(f"{node}/shards/000{end}")
    assert contents(node) == before


def test_the_copy_of_a_running_node_is_refused(node: Path, tmp_path: Path) -> None:
    with headrace.open(str(node), store=f"directory://{tmp_path}/store", cluster="trading") as bus:
        for use in (*PLAIN, imported, as_node):
            with pytest.raises(NotADataDirectory):
                use(str(node / "shards" / "000"))
        bus.publish("orders", b"2 plums")
    restore(f"directory://{tmp_path}/store", tmp_path / "copy")
    assert values(tmp_path / "copy") == [*ORDERS, b"2 plums"]


def test_a_node_starts_again_and_its_directory_is_imported(node: Path, tmp_path: Path) -> None:
    for _ in range(2):
        with headrace.open(str(node), store=f"directory://{tmp_path}/store", cluster="trading") as bus:
            assert [value for batch in bus.fetch("orders", 0, 0) for value in batch.columns().values] == ORDERS
    imported(str(node))
    with headrace.open(str(tmp_path / "other"), store=rescue_store(str(node)), cluster="rescued") as bus:
        assert [value for batch in bus.fetch("orders", 0, 0) for value in batch.columns().values] == ORDERS


def test_a_copy_that_was_taken_out_of_the_node_is_a_data_directory(node: Path, tmp_path: Path) -> None:
    (node / "shards" / "000").rename(tmp_path / "out")
    assert verify_data(str(tmp_path / "out"), lambda _: None).sound
    assert values(tmp_path / "out") == ORDERS


def test_other_directories_are_not_taken_for_a_node(tmp_path: Path) -> None:
    data = tmp_path / "shards" / "000"
    with headrace.open(str(data)) as bus:
        bus.publish_many("orders", ORDERS)
    (tmp_path / "shards" / "000" / "node.json").write_text("{}")
    assert verify_data(str(data), lambda _: None).sound
