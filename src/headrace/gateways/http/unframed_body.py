"""Answers to clients of HTTP/1.0, who know no chunks: a body of unknown length ends with the connection."""

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from headrace.gateways.http.call import Message, Send

_LENGTH_UNKNOWN = 1 << 62


def unframed(cycle: RequestResponseCycle) -> Send:
    """What sends an answer without chunks; uvicorn closes the connection after it, as after all of HTTP/1.0."""

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            if all(name != b"content-length" for name, _ in message["headers"]):
                cycle.chunked_encoding = False
                cycle.expected_content_length = _LENGTH_UNKNOWN
        elif not message.get("more_body") and cycle.expected_content_length > len(message["body"]):
            cycle.expected_content_length = len(message["body"])
        await cycle.send(message)  # type: ignore[arg-type]  # uvicorn's type of the same

    return send
