"""Three nodes of a cluster are killed, stopped and cut off while clients work: every promise to these is kept.

By default there are six faults. `--long` makes 200 kills, 50 pauses and 50 partitions on PostgreSQL, in ten parts, and
60 rounds on SeaweedFS, in two; between them nodes end in peace, and hand the shard over. HEADRACE_SEED repeats the
choices of a run, HEADRACE_FAULT_ROUNDS sets the number of rounds of each part.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random, SystemRandom

import pytest
from tests.faults.cluster_faults import KILL, PARTITION, PAUSE, STOP, FaultDriver, failover_lines, pauses_after
from tests.faults.cluster_history import FinalLog
from tests.faults.cluster_network import (
    FROM_STORE,
    STORE_ANSWERS,
    STORE_REQUESTS,
    ClusterNetwork,
    NamespacedCluster,
    ProxiedCluster,
)
from tests.faults.cluster_processes import ClusterProcesses
from tests.faults.cluster_stage import ClusterClients
from tests.faults.fork_server import Nursery
from tests.faults.network_namespaces import why_not
from tests.faults.store_processes import (
    PostgresProcess,
    SeaweedProcess,
    StoreProcess,
    postgres_binaries,
    weed_program,
)

NODES = ["n1", "n2", "n3"]
NAMESPACES, PROXY = "namespaces", "proxy"
PARTS = 10
SEAWEED_PARTS = 2
UNREAD = "not read to the end"
"""What a driver says whose readers stay with a node that serves another log."""
_PART = [KILL] * 20 + [PAUSE] * 5 + [PARTITION] * 5 + [STOP] * 2
CHECKPOINTS = ("--checkpoint-seconds", "2", "--backup-seconds", "6")
"""Checkpoints and deletions of what they cover, while nodes that were stopped before still read."""
needs_postgres = pytest.mark.skipif(postgres_binaries() is None, reason="PostgreSQL (initdb) is not installed")
needs_weed = pytest.mark.skipif(weed_program() is None, reason="SeaweedFS (weed) is not installed")

Property = Callable[[str, object], None]


def _options(part: int) -> Sequence[str]:
    """Three of four parts store checkpoints all the time; in the others nodes read the log from its beginning."""
    return CHECKPOINTS if part % 4 else ()


def _rounds(kinds: list[str], dice: Random) -> list[str]:
    count = int(os.environ.get("HEADRACE_FAULT_ROUNDS", len(kinds)))
    shuffled = dice.sample(kinds, len(kinds))
    return [shuffled[number % len(shuffled)] for number in range(count)]


def _network(way: str, nursery: Nursery, directory: Path, store: StoreProcess) -> ClusterNetwork:
    if way == NAMESPACES and not why_not():
        return NamespacedCluster(NODES, store.port)
    return ProxiedCluster(nursery, directory, NODES, store.port)


def _history(
    directory: Path,
    store: StoreProcess,
    way: str,
    kinds: list[str],
    *options: str,
    function: str = "",
    deck: Sequence[str] = (),
) -> tuple[ClusterClients, FaultDriver, FinalLog, str]:
    """Make faults; returns what clients and the driver saw, the log in the end, and a title."""
    seed = int(os.environ.get("HEADRACE_SEED", SystemRandom().getrandbits(32)))
    print(f"HEADRACE_SEED={seed}")  # pytest shows it when the test fails
    dice = Random(seed)
    with store, Nursery(directory) as nursery:
        network = _network(way, nursery, directory, store)
        try:
            cluster = ClusterProcesses(nursery, directory, network, store, *options, function=function)
            cluster.start()
            cluster.serving()
            clients = ClusterClients(nursery, directory, seed, cluster.url, cluster.addresses)
            clients.start()
            driver = FaultDriver(cluster, clients, dice, deck)
            driver.run(_rounds(kinds, dice))
            final = clients.finish()
            cluster.check()
        finally:
            network.close()
    title = f"cluster faults with {type(store).__name__} and {type(network).__name__}, seed {seed}"
    return clients, driver, final, title


def _run(
    directory: Path, store: StoreProcess, way: str, kinds: list[str], tell: Property, options: Sequence[str] = ()
) -> None:
    clients, driver, final, title = _history(directory, store, way, kinds, *options)
    counts = clients.counts()
    lines = [*failover_lines(driver.faults, clients.records), f"records: {dict(counts)}"]
    print("\n".join(lines))
    tell(title, lines)
    assert not (found := clients.mistakes(final)), "\n".join(found[:20])
    assert counts["sent"] > 20 * len(driver.faults), f"this tested next to nothing: {counts}"


@needs_postgres
def test_six_faults_break_no_promise(tmp_path: Path, record_property: Property) -> None:
    kinds = [KILL, KILL, PAUSE, PAUSE, PARTITION, PARTITION]
    _run(tmp_path, PostgresProcess(), NAMESPACES, kinds, record_property, CHECKPOINTS)


@pytest.mark.long
@pytest.mark.timeout(1800)
@needs_postgres
@pytest.mark.parametrize("part", range(PARTS))
def test_many_faults_break_no_promise(tmp_path: Path, part: int, record_property: Property) -> None:
    _run(tmp_path, PostgresProcess(), (NAMESPACES, PROXY)[part % 2], _PART, record_property, _options(part))


@pytest.mark.long
@pytest.mark.timeout(1800)
@needs_weed
@pytest.mark.parametrize("part", range(SEAWEED_PARTS))
def test_faults_on_an_object_store_break_no_promise(tmp_path: Path, part: int, record_property: Property) -> None:
    _run(tmp_path, SeaweedProcess(), (NAMESPACES, PROXY)[part % 2], _PART, record_property, _options(part + 2))


@pytest.mark.long
@needs_postgres
def test_an_owner_that_loses_the_store_lets_its_clients_go(tmp_path: Path, record_property: Property) -> None:
    """Also while it stores a checkpoint, or syncs, which waits for the store."""
    kinds = (FROM_STORE, STORE_REQUESTS, STORE_ANSWERS) * 2
    clients, driver, final, title = _history(
        tmp_path, PostgresProcess(), NAMESPACES, [PARTITION] * len(kinds), *CHECKPOINTS, deck=kinds
    )
    record_property(title, failover_lines(driver.faults, clients.records))
    assert not (found := clients.mistakes(final)), "\n".join(found[:20])
    pauses_s = pauses_after(driver.faults, clients.records)
    assert max(pauses_s, default=0) < 8, f"clients stayed with an owner that could not serve them: {pauses_s}"


@pytest.mark.long
@needs_postgres
def test_nodes_that_end_in_peace_break_no_promise(tmp_path: Path, record_property: Property) -> None:
    _run(tmp_path, PostgresProcess(), NAMESPACES, [STOP] * 8, record_property, CHECKPOINTS)


@pytest.mark.long
@needs_postgres
@pytest.mark.parametrize(
    ("function", "kinds", "deck", "expected"),
    [
        ("serve_early", [KILL] * 6, [], {"lost", "two values", "transactions", "ended"}),
        ("serve_unfenced", [PAUSE] * 4, [], {"lost", "acknowledged by a fenced node", UNREAD}),
        ("serve_ungated", [PARTITION] * 4, [FROM_STORE] * 4, {"leases"}),
    ],
)
def test_nodes_that_break_a_rule_are_found(
    tmp_path: Path, function: str, kinds: list[str], deck: list[str], expected: set[str]
) -> None:
    """Negative controls of the whole: a right history is no luck."""
    wrong = f"tests.faults.wrong_nodes:{function}"
    try:
        clients, _, final, _ = _history(tmp_path, PostgresProcess(), NAMESPACES, kinds, function=wrong, deck=deck)
        found = clients.mistakes(final)
    except AssertionError as error:  # a client met what cannot be
        found = [f"{UNREAD if UNREAD in str(error) else 'ended'}: {error}"]
    assert {mistake.partition(":")[0] for mistake in found} & expected, found
