"""Headers: a mapping for most people, all pairs for whoever wants them, and their bytes."""

import copy
import pickle
from collections.abc import Mapping

import msgspec
import pytest

from headrace.model.batch import Columns, encode, received
from headrace.model.errors import InvalidArgument
from headrace.model.headers import (
    RepeatedHeaders,
    checked_headers,
    header_bytes,
    header_count,
    header_pairs,
    headers_from_pairs,
    replaced_headers,
    without_headers,
)
from headrace.model.message import Message

PAIRS = [("a", b"1"), ("ü", None), ("a", None)]


def test_repeated_headers_are_a_mapping_with_the_last_values() -> None:
    headers = headers_from_pairs(PAIRS)
    assert isinstance(headers, RepeatedHeaders)
    assert isinstance(headers, Mapping)
    assert dict(headers) == {**headers} == {"a": None, "ü": None} == headers
    assert (list(headers), len(headers), bool(headers)) == (["a", "ü"], 2, True)
    assert ("a" in headers, "b" in headers) == (True, False)
    assert (headers["a"], headers.get("b"), headers.get("b", b"x")) == (None, None, b"x")
    assert list(headers.items()) == [("a", None), ("ü", None)]
    with pytest.raises(KeyError):
        headers["b"]
    with pytest.raises(TypeError):
        hash(headers)


def test_repeated_headers_are_equal_if_all_pairs_are() -> None:
    headers = headers_from_pairs(PAIRS)
    for other in (copy.deepcopy(headers), pickle.loads(pickle.dumps(headers)), headers_from_pairs(list(PAIRS))):
        assert headers == other
    assert headers != headers_from_pairs([PAIRS[2], PAIRS[1], PAIRS[0]])
    assert Message(0, b"", 0, headers=headers) != Message(0, b"", 0, headers=headers_from_pairs([*PAIRS, ("a", None)]))


def test_a_message_lists_its_headers() -> None:
    assert Message(0, b"", 0).header_list == []
    assert Message(0, b"", 0, headers={"a": b"1"}).header_list == [("a", b"1")]
    assert Message(0, b"", 0, headers=headers_from_pairs(PAIRS)).header_list == PAIRS


def test_the_bytes_are_those_of_the_format() -> None:
    """A map as it always was, with nil; names and values where a name repeats."""
    column = [{"a": b"1"}, {"a": None}, headers_from_pairs(PAIRS), None]
    batch = encode(Columns([b""] * 4, headers=column), 0)
    raw = bytes.fromhex("94 81a161c40131 81a161c0 92 93a161a2c3bca161 93c40131c0c0 c0")
    assert bytes(batch.raw_columns().headers) == raw
    found = received(bytearray(batch.data)).columns().headers
    assert found is not None
    assert list(map(header_pairs, found)) == [[("a", b"1")], [("a", None)], PAIRS, []]
    assert [type(each) for each in found] == [dict, dict, RepeatedHeaders, type(None)]


def test_pairs_of_which_none_repeats_are_a_dictionary() -> None:
    assert checked_headers([("b", "1"), ["a", bytearray(b"2")]]) == {"b": b"1", "a": b"2"}
    assert checked_headers([]) is None
    assert checked_headers({}) is None
    with pytest.raises(InvalidArgument, match="UTF-8"):
        checked_headers([("a", "\ud800"), ("a", b"")])


def test_headers_are_replaced_and_left_out_by_name() -> None:
    headers = headers_from_pairs(PAIRS)
    assert header_pairs(replaced_headers(headers, {"ü": b"2"})) == [("a", b"1"), ("a", None), ("ü", b"2")]
    assert replaced_headers(headers, {"a": b"2"}) == {"ü": None, "a": b"2"}
    assert replaced_headers(None, {"a": b"2"}) == {"a": b"2"}
    assert without_headers(headers, lambda name: name == "a") == {"ü": None}
    assert without_headers(None, lambda _name: False) == {}


def test_sizes_count_all_pairs_and_the_bytes_of_names() -> None:
    assert (header_bytes(headers_from_pairs(PAIRS)), header_count(headers_from_pairs(PAIRS))) == (5, 3)
    assert (header_bytes({"ü": b"12", "": None}), header_count({"ü": b"12", "": None})) == (4, 2)
    assert (header_bytes(None), header_count(None)) == (0, 0)


def test_names_and_values_are_of_one_length() -> None:
    with pytest.raises(ValueError, match="1 values for 2 names"):
        RepeatedHeaders(["a", "b"], [b""])
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode([["a"], []]), type=RepeatedHeaders)
