"""Receivers of HTTP for tests of what the broker sends: scripts that answer each connection, on the running loop."""

import asyncio
import datetime
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

Script = Callable[["Arrived", asyncio.StreamWriter], Awaitable[bool]]
"""Answers a request; whether the connection stays open."""


class Arrived(NamedTuple):
    """A request as it came in."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    connection: asyncio.StreamReader

    async def gone(self) -> None:
        """Wait until the client closes the connection."""
        await self.connection.read()


class Receiver:
    """A server whose script answers, with what it has received."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.requests: list[Arrived] = []
        self.connections = 0
        self.open: set[asyncio.StreamWriter] = set()
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection."""
        self.connections += 1
        self.open.add(writer)
        try:
            while (request := await _arrived(reader)) is not None:
                self.requests.append(request)
                if not await self._script(request, writer):
                    break
        except (ConnectionError, ssl.SSLError):
            pass  # the client has gone
        finally:
            self.open.discard(writer)
            writer.close()


@asynccontextmanager
async def receiver(
    script: Script, *, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
) -> AsyncIterator[Receiver]:
    """A receiver that listens while the block runs."""
    served = Receiver(script)
    server = await asyncio.start_server(served.serve, host, port, ssl=tls)
    served.port = server.sockets[0].getsockname()[1]
    try:
        yield served
    finally:
        server.close()
        for writer in list(served.open):
            writer.transport.abort()
        await asyncio.sleep(0)


async def answer_ok(_request: Arrived, writer: asyncio.StreamWriter) -> bool:
    """200 with a short body; the connection stays."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-A: 1\r\nX-A: 2\r\n\r\nok")
    await writer.drain()
    return True


async def _arrived(reader: asyncio.StreamReader) -> Arrived | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.rstrip("\r\n").split("\r\n")
        method, target, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None  # the client has gone
    return Arrived(method, target, headers, body, reader)


class Certificates(NamedTuple):
    """A certificate for a server, and who trusts it."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def certificates(folder: Path, *names: str) -> Certificates:
    """A certificate for these names and addresses, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "receiver")])
    now = datetime.datetime.now(datetime.UTC)
    alternatives = [x509.IPAddress(ip_address(each)) if each[0].isdigit() else x509.DNSName(each) for each in names]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = folder / "receiver.pem"
    private = serialization.PrivateFormat.PKCS8
    pem.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, private, serialization.NoEncryption())
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(pem)
    return Certificates(server, ssl.create_default_context(cafile=str(pem)))
