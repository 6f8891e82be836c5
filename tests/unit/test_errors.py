"""Errors: public by one name, and the same error after a journey to another process."""

import copy
import importlib
import pickle
import pkgutil

import pytest

import headrace
from headrace.client.producer.producer_errors import Undelivered
from headrace.client.producer.serializing import CannotDeserialize
from headrace.model import errors
from headrace.model.errors import CorruptBatch, HeadraceError, OffsetOutOfRange, error_of


def every_kind() -> list[type[HeadraceError]]:
    """All errors there are, those of rooms that need no Spark included."""
    for room in ("client", "embedded", "engines", "storage"):
        package = importlib.import_module(f"headrace.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    importlib.import_module("headrace.spark.errors")
    found = [HeadraceError]
    for kind in found:
        found += [below for below in kind.__subclasses__() if below not in found]
    return [kind for kind in found if kind.__module__.startswith("headrace.")]


def made(kind: type[HeadraceError]) -> HeadraceError:
    if kind is CorruptBatch:
        return CorruptBatch(3, 7, "/a/log", 640, "a checksum is wrong")
    if kind is CannotDeserialize:
        return CannotDeserialize("orders", 0, 7, ValueError("no value"), b"{")
    if kind is Undelivered:
        return Undelivered(3, None)
    error = kind("it did not work", first_offset=3)
    error.position = 640  # type: ignore[attr-defined]
    error.add_note("seen by a test")
    return error


@pytest.mark.parametrize("kind", every_kind(), ids=lambda kind: kind.__name__)
def test_an_error_stays_itself_when_pickled_and_copied(kind: type[HeadraceError]) -> None:
    error = made(kind)
    for other in (
        *(pickle.loads(pickle.dumps(error, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)),
        copy.copy(error),
        copy.deepcopy(error),
    ):
        assert type(other) is kind
        assert str(other) == str(error)
        assert other.args == error.args
        assert vars(other) == vars(error)
        assert (other.code, other.retryable) == (error.code, error.retryable)


def test_an_error_of_an_unknown_code_stays_itself_too() -> None:
    error = error_of("from_the_future", "something new", True, {"at": 3})
    other = pickle.loads(pickle.dumps(error))
    assert (other.code, other.retryable, other.details, str(other)) == (
        "from_the_future",
        True,
        {"at": 3},
        "something new",
    )


def test_an_error_without_a_text_keeps_its_own() -> None:
    error = pickle.loads(pickle.dumps(OffsetOutOfRange()))
    assert str(error) == "The log has no message at that offset: it was truncated, or not written yet."


def test_errors_can_be_imported_by_their_public_name() -> None:
    public = importlib.import_module("headrace.errors")
    assert public is headrace.errors
    assert public.DiskFull is errors.DiskFull
    mine = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, HeadraceError)}
    assert set(public.__all__) == mine
    assert mine <= vars(public).keys()
