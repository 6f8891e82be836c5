"""The self-test of a shared store, which every node runs before it relies on the store's conditions."""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from headrace.model.errors import StoreUnavailable, StoreUnqualified
from headrace.storage.stores.store import KeyExists, SharedStore, VersionMismatch

RACERS = 16
_REMEDY = (
    "Two nodes could both acknowledge on it, so none serves. Use another store, or a version of this one that keeps "
    "the conditions If-None-Match and If-Match of S3, also when several clients write at the same time"
)


def qualify_store(store: SharedStore, cluster: str, nonce: str) -> None:
    """Check that a store keeps the promises of SharedStore, as far as can be seen in a moment; takes about 50 requests.

    The objects are below `CLUSTER/self-test/NONCE/`, and are deleted at the end. Raises StoreUnqualified with what is
    wrong, or StoreUnavailable if the store fails meanwhile.
    """
    prefix = f"{cluster}/self-test/{nonce}/"
    names = [f"{prefix}object", f"{prefix}listed/0", f"{prefix}listed/1", f"{prefix}listed0", f"{prefix}race"]
    try:
        _check_conditions(store, names[0])
        _check_listing(store, prefix, names[1:4])
        _check_create_race(store, names[4])
        _check_replace_race(store, names[4])
        _check_deletion(store, prefix, names)
    finally:
        with suppress(StoreUnavailable):  # what is left there disturbs nobody
            store.delete(names)


def _check_conditions(store: SharedStore, key: str) -> None:
    if store.get(key) is not None:
        _refuse(store, "it has an object that was never put")
    store.put_new(key, b"first")
    first = store.get(key)
    if first is None or first.data != b"first":
        _refuse(store, f"an object reads as {first and first.data!r} directly after b'first' was put")
    with suppress(KeyExists):
        store.put_new(key, b"again")
        _refuse(store, "it creates an object that exists, instead of refusing to")
    try:
        version = store.replace(key, b"second", first.version)
    except VersionMismatch:
        _refuse(store, "it refuses to replace an object that has not changed")
    if (found := store.get(key)) is None or found.data != b"second":
        _refuse(store, f"an object reads as {found and found.data!r} directly after it was replaced by b'second'")
    with suppress(VersionMismatch):
        store.replace(key, b"stale", first.version)
        _refuse(store, "it replaces an object that has changed since the version that it was given")
    try:
        same = store.replace(key, b"second", version) == version
    except VersionMismatch:
        _refuse(store, "it refuses the version that it has given an object a moment ago")
    if same:
        _refuse(store, "the version of an object stays the same when it is replaced by the same bytes")


def _check_listing(store: SharedStore, prefix: str, names: list[str]) -> None:
    for name in names:
        store.put_new(name, b"")
    found = store.names(f"{prefix}listed")
    if found != names:
        _refuse(store, f"it lists {found}, not {names}")
    for count, name in enumerate(names):
        after = names[count - 1] if count else ""
        if (found := store.names(f"{prefix}listed", after, 1)) != [name]:
            _refuse(store, f"it lists {found} as the first key behind {after!r}, not {name!r}")


def _check_create_race(store: SharedStore, key: str) -> None:
    _race(store, key, "create one object", KeyExists, lambda data: store.put_new(key, data))


def _check_replace_race(store: SharedStore, key: str) -> None:
    found = store.get(key)
    if found is None:
        _refuse(store, "an object is gone that was put a moment ago")
    _race(store, key, "replace one version", VersionMismatch, lambda data: store.replace(key, data, found.version))


def _race(store: SharedStore, key: str, what: str, refusal: type[Exception], change: Callable[[bytes], object]) -> None:
    """Let all racers make a change that only one may make; the object must have the data of that one."""
    start = threading.Barrier(RACERS)
    won: list[bytes] = []
    failures: list[BaseException] = []

    def run(number: int) -> None:
        start.wait()
        data = f"{what} {number}".encode()
        try:
            change(data)
            won.append(data)
        except refusal:
            pass
        except BaseException as error:  # noqa: BLE001  # told on the thread that checks
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,), name="headrace-self-test") for number in range(RACERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = store.get(key)
    if len(won) > 1:
        _refuse(store, f"it let {len(won)} of {RACERS} clients {what} that tried at the same time, instead of one")
    if won and (found is None or found.data != won[0]):
        _refuse(store, f"it let one of {RACERS} clients {what} that tried at the same time, and has another's data")
    for failure in failures:
        # Some stores ask to try again when requests collide, which is no lie if one of them won.
        if not won or not isinstance(failure, StoreUnavailable):
            raise failure
    if not won:
        _refuse(store, f"it let none of {RACERS} clients {what} that tried at the same time, instead of one")


def _check_deletion(store: SharedStore, prefix: str, names: list[str]) -> None:
    store.delete([*names, f"{prefix}never-there"])
    left = store.names(prefix)
    if left or store.get(names[0]) is not None:
        _refuse(store, f"it still has {left or names[0]} after that was deleted")


def _refuse(store: SharedStore, what: str) -> NoReturn:
    raise StoreUnqualified(f"no cluster can use the store {store.location}: {what}. {_REMEDY}")
