"""A shared store in a bucket: S3 and servers that are compatible with it, Google Cloud Storage, Azure Blob Storage.

An object begins with 16 bytes of its own, `HRO1` and 12 random ones: the ETag of S3 is a hash of the content, and
would otherwise be the same again after a change to the same bytes.
"""

import secrets
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError, PreconditionError
from obstore.store import AzureStore, GCSStore, S3Store

from headrace.model.errors import InvalidArgument, StoreUnavailable
from headrace.storage.stores.address import StoreAddress
from headrace.storage.stores.advice import with_advice
from headrace.storage.stores.store import (
    KeyExists,
    SharedStore,
    StoredObject,
    VersionMismatch,
    check_object,
)

MAGIC = b"HRO1"
_NONCE_BYTES = 12
_HEADER_BYTES = len(MAGIC) + _NONCE_BYTES
_READS_RETRIED = 2
_LISTED_AT_ONCE = 1000
_BEFORE_ALL = "!"
"""A character that sorts before all that keys may have."""

_MISSING = (NotFoundError, FileNotFoundError)  # obstore raises either

T = TypeVar("T")
Bucket = S3Store | GCSStore | AzureStore


class BucketStore(SharedStore):
    """A store below a prefix of a bucket.

    Changes are tried once, since whoever repeats one must know that it does; reads are tried three times.
    """

    def __init__(self, location: str, make: Callable[[int], Bucket], *, deletes_missing: bool) -> None:
        """Keep the bucket that `make` makes for so many retries; the first request connects.

        `deletes_missing`: whether the deletion of what is not there succeeds.
        """
        self._location = location
        self._changing = make(0)
        self._reading = make(_READS_RETRIED)
        self._deletes_missing = deletes_missing
        self._closed = False

    @property
    def location(self) -> str:
        """Where it is."""
        return self._location

    def put_new(self, key: str, data: bytes) -> None:
        """Create an object; raises KeyExists if there is one."""
        check_object(key, data)
        try:
            self._run(lambda: obstore.put(self._changing, key, _stored(data), mode="create", use_multipart=False))
        except _MISSING as error:
            raise self._no_bucket() from error
        except AlreadyExistsError as error:
            # The answer 409 means a conflict with another request, which may have failed since.
            if self._run(lambda: _exists(self._reading, key)):
                raise KeyExists(key) from error
            raise StoreUnavailable(f"the store {self._location} had a conflict about {key}; try again") from error

    def replace(self, key: str, data: bytes, version: str) -> str:
        """Replace an object if it has this version; returns the new version."""
        check_object(key, data)
        e_tag, _, number = version.partition("\n")
        mode: Any = {name: value for name, value in (("e_tag", e_tag), ("version", number)) if value}
        try:
            put = self._run(lambda: obstore.put(self._changing, key, _stored(data), mode=mode, use_multipart=False))
        except (PreconditionError, AlreadyExistsError, *_MISSING) as error:
            raise VersionMismatch(key) from error
        return _version(put)

    def get(self, key: str) -> StoredObject | None:
        """Read an object; None if there is none."""

        def read() -> tuple[Any, bytes]:
            found = obstore.get(self._reading, key)
            return found.meta, found.bytes().to_bytes()

        try:
            meta, data = self._run(read)
        except _MISSING:
            return None
        if not data.startswith(MAGIC) or len(data) < _HEADER_BYTES:
            raise StoreUnavailable(f"{key} in {self._location} is no object of a cluster: remove it, or give a prefix")
        return StoredObject(data[_HEADER_BYTES:], _version(meta))

    def names(self, prefix: str, after: str = "", count_max: int = 1000) -> list[str]:
        """The first keys with a prefix behind `after`."""
        try:
            return self._run(lambda: self._list(prefix, after, count_max))
        except _MISSING as error:
            raise self._no_bucket() from error

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects."""
        if not keys:
            return
        if self._deletes_missing:
            try:
                self._run(lambda: obstore.delete(self._changing, list(keys)))
            except _MISSING as error:  # of a bucket: objects may be missing
                raise self._no_bucket() from error
            return
        for key in keys:
            try:
                self._run(partial(obstore.delete, self._changing, key))
            except _MISSING:
                continue

    def close(self) -> None:
        """Refuse later requests; connections close by themselves."""
        self._closed = True

    def _list(self, prefix: str, after: str, count_max: int) -> list[str]:
        directory = prefix.rpartition("/")[0]
        found: list[str] = []
        # obstore leaves a slash at the end out, and SeaweedFS would leave all of that directory out.
        offset = f"{after}{_BEFORE_ALL}" if after.endswith("/") else after or None
        chunk_size = min(_LISTED_AT_ONCE, count_max)
        for page in obstore.list(self._reading, directory or None, offset=offset, chunk_size=chunk_size):
            found += [entry["path"] for entry in page if entry["path"].startswith(prefix) and entry["path"] > after]
            if len(found) >= count_max:
                break
        return sorted(found)[:count_max]

    def _no_bucket(self) -> StoreUnavailable:
        return StoreUnavailable(f"the store {self._location} failed: {with_advice('NoSuchBucket')}")

    def _run(self, call: Callable[[], T]) -> T:
        if self._closed:
            raise StoreUnavailable(f"the store {self._location} is closed")
        try:
            return call()
        except (AlreadyExistsError, PreconditionError, *_MISSING):
            raise
        except (BaseError, OSError, ValueError) as error:
            raise StoreUnavailable(f"the store {self._location} failed: {_told(error)}") from error


def open_s3(address: StoreAddress) -> BucketStore:
    """The store in a bucket of S3, or of a server that is compatible with it."""
    address.check_options("endpoint", "region", "timeout", "virtual_hosted_style")
    config: Any = _from_options(address, {"endpoint": "endpoint", "region": "region"})
    for name in ("access_key_id", "secret_access_key", "session_token", "region", "endpoint_url"):
        if (value := address.secrets.get(f"AWS_{name.upper()}")) and name.removesuffix("_url") not in config:
            config[name.removesuffix("_url")] = value
    if address.flag("virtual_hosted_style"):
        config["virtual_hosted_style_request"] = True
    return _open(address, lambda **named: S3Store(address.host, config=config, **named), config.get("endpoint"), True)


def open_gcs(address: StoreAddress) -> BucketStore:
    """The store in a bucket of Google Cloud Storage."""
    address.check_options("endpoint", "timeout")
    config: Any = _from_options(address, {"endpoint": "base_url"})
    for variable, name in (
        ("GOOGLE_SERVICE_ACCOUNT", "service_account"),
        ("GOOGLE_SERVICE_ACCOUNT_KEY", "service_account_key"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "application_credentials"),
    ):
        if value := address.secrets.get(variable):
            config[name] = value
    return _open(address, lambda **named: GCSStore(address.host, config=config, **named), config.get("base_url"), False)


def open_azure(address: StoreAddress) -> BucketStore:
    """The store in a container of Azure Blob Storage."""
    address.check_options("endpoint", "account", "timeout")
    config: Any = _from_options(address, {"endpoint": "endpoint", "account": "account_name"})
    for name in ("account_name", "account_key", "client_id", "client_secret", "tenant_id", "sas_key"):
        if (value := address.secrets.get(f"AZURE_STORAGE_{name.upper()}")) and name not in config:
            config[name] = value
    return _open(
        address, lambda **named: AzureStore(address.host, config=config, **named), config.get("endpoint"), False
    )


for _open_bucket in (open_s3, open_gcs, open_azure):
    _open_bucket.api = 1  # type: ignore[attr-defined]


def _open(
    address: StoreAddress, make: Callable[..., Bucket], endpoint: str | None, deletes_missing: bool
) -> BucketStore:
    if not address.host:
        raise InvalidArgument(f"a store in a bucket is {address.scheme}://bucket/prefix: name the bucket")
    timeout = timedelta(seconds=address.seconds())

    def make_bucket(retries: int) -> Bucket:
        try:
            return make(
                prefix=address.path.strip("/") or None,
                client_options={
                    "timeout": timeout,
                    "connect_timeout": min(timeout, timedelta(seconds=5)),
                    "allow_http": (endpoint or "").startswith("http://"),
                },
                retry_config={"max_retries": retries, "retry_timeout": timeout},
            )
        except BaseError as error:
            raise InvalidArgument(f"the store {address.location} cannot be used: {_told(error)}") from error

    return BucketStore(address.location, make_bucket, deletes_missing=deletes_missing)


def _from_options(address: StoreAddress, names: dict[str, str]) -> dict[str, Any]:
    return {names[option]: value for option, value in address.options.items() if option in names}


def _stored(data: bytes) -> bytes:
    return b"".join((MAGIC, secrets.token_bytes(_NONCE_BYTES), data))


def _exists(bucket: Bucket, key: str) -> bool:
    try:
        obstore.head(bucket, key)
    except _MISSING:
        return False
    return True


def _told(error: Exception) -> str:
    """The text of an error without the structure of Rust that follows it."""
    return with_advice(str(error).partition("Debug source:")[0] or type(error).__name__)


def _version(told: Any) -> str:
    return f"{told['e_tag'] or ''}\n{told['version'] or ''}"
