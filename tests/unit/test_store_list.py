"""Stores by URL: which there are, what is refused, and that no credentials are seen."""

import builtins
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.cluster.store_list import open_store, read_credentials
from headrace.model.errors import InvalidArgument
from headrace.storage.stores.address import StoreAddress
from headrace.storage.stores.directory import DirectoryStore
from headrace.testing import MemoryDisk


def test_a_name_in_memory_is_one_store() -> None:
    store = open_store("memory:test-list")
    store.put_new("a", b"1")
    assert open_store("memory:test-list") is store
    assert open_store("memory:another").get("a") is None
    assert store.location == "memory:test-list"
    assert store.remarks()


def test_a_directory_is_on_the_disk_that_is_given(tmp_path: Path) -> None:
    disk = MemoryDisk()
    store = open_store(f"directory://{tmp_path}/a%20b", disk=disk)
    assert isinstance(store, DirectoryStore)
    store.put_new("x/y", b"1")
    assert store.names("x/") == ["x/y"]
    assert not list(tmp_path.iterdir())
    assert disk.exists(f"{tmp_path}/a b/x/y#")
    assert repr(store) == f"<DirectoryStore directory://{tmp_path}/a b>"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("", "a store is a URL such as postgresql://"),
        ("/srv/store", "a store is a URL such as"),
        (5, "a store is a URL such as"),
        ("mysql://db/x", r"no store for 'mysql://db/x'; there are those for az, directory, gs, memory, postgres, .*s3"),
        ("directory://srv/store", "with three slashes"),
        ("directory:store", "with three slashes"),
        ("directory:///srv?mode=x", "have no option 'mode'; it has none"),
        ("postgresql://db/x?tabel=a", "have no option 'tabel'; there are .*table"),
        ("postgresql://db/x?timeout=soon", "number of seconds"),
        ("postgresql://db/x?connections=0", "whole number, 1 to 100"),
        ("postgresql://db:port/x", "is not a URL"),
        ("postgresql://db/x#y", "has a #"),
        ("s3:///prefix", "name the bucket"),
        ("redis://host/name", "NUMBER of the database"),
        ("redis://host/0?check=perhaps", "true or false"),
    ],
)
def test_what_no_store_understands_is_refused(url: Any, told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        open_store(url, environment={})


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://ann:hunter2@db/x",
        "postgresql://db/x?password=hunter2",
        "s3://bucket/x?endpoint=http://root:hunter2@127.0.0.1:8333",
        "s3://bucket/x?secret_access_key=hunter2",
        "redis://:hunter2@host/0",
        "mysql://ann:hunter2@db/x",
    ],
)
def test_a_password_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        open_store(url, environment={})
    assert "hunter2" not in str(refused.value)
    if not url.startswith("mysql"):
        assert "credentials file" in str(refused.value)
        assert "PGPASSWORD" in str(refused.value)


def test_locations_have_neither_users_nor_options() -> None:
    environment = {"PGPASSWORD": "hunter2", "AWS_SECRET_ACCESS_KEY": "hunter2", "AWS_ACCESS_KEY_ID": "k"}
    for url, location in [
        ("postgresql://ann@db:5433/x?table=t", "postgresql://db:5433/x"),
        ("postgresql://ann@a,b/x?target_session_attrs=read-write", "postgresql://a,b/x"),
        ("s3://bucket/some/prefix?region=eu-west-1", "s3://bucket/some/prefix"),
        ("redis://ann@[::1]:7000/2", "redis://[::1]:7000/2"),
    ]:
        store = open_store(url, environment=environment)
        assert store.location == location
        assert "hunter2" not in repr(store)
        store.close()
    assert "hunter2" not in repr(StoreAddress("s3", secrets=environment))


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **named: Any) -> Any:
        if name.split(".")[0] in ("psycopg", "obstore", "redis"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *arguments, **named)

    for scheme, extra in (("postgresql", "postgres"), ("s3", "s3"), ("redis", "redis")):
        for name in [name for name in sys.modules if name.split(".")[0] in ("psycopg", "obstore", "redis")]:
            monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setattr(builtins, "__import__", without)
        with pytest.raises(InvalidArgument, match=rf"pip install 'headrace\[{extra}\]'"):
            open_store(f"{scheme}://host/0", environment={})


def test_credentials_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "credentials"
    file.write_text("# of the store\n\nPGPASSWORD=a=b 'c'\nexport AWS_ACCESS_KEY_ID = \"key\"\nEMPTY=\n")
    assert read_credentials(str(file)) == {"PGPASSWORD": "a=b 'c'", "AWS_ACCESS_KEY_ID": "key", "EMPTY": ""}
    file.write_text("hunter2\n")
    with pytest.raises(InvalidArgument, match=r"line 1 of .* is not NAME=value") as refused:
        open_store("memory:x", credentials_file=str(file))
    assert "hunter2" not in str(refused.value)
    with pytest.raises(InvalidArgument, match="No such file"):
        read_credentials(f"{file}.none")
