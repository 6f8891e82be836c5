"""Signatures, by Standard Webhooks and by WebSub: the receiver checks that a request is the broker's, and unaltered."""

import base64
import hmac
from collections.abc import Iterable
from hashlib import sha256

from headrace.model.webhook import secret_key
from headrace.model.websub import WebSubTerms, content_signature, link_header

ID_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER = "webhook-id", "webhook-timestamp", "webhook-signature"
HUB_SIGNATURE_HEADER = "x-hub-signature"


def signature_headers(secrets: Iterable[str], message_id: str, time_us: int, body: bytes) -> dict[str, str]:
    """The headers of a signed request: one signature for each secret, so that a receiver needs only one of them.

    >>> headers = signature_headers(["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"], "msg_p5jXN8AQM9LWM0D4loKWxJek",
    ...                             1614265330_000_000, b'{"test": 2432232314}')
    >>> headers["webhook-signature"]
    'v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE='
    """
    timestamp = str(time_us // 1_000_000)
    signed = b"%s.%s.%s" % (message_id.encode(), timestamp.encode(), body)
    digests = (hmac.new(secret_key(secret), signed, sha256).digest() for secret in secrets)
    signatures = " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests)
    return {ID_HEADER: message_id, TIMESTAMP_HEADER: timestamp, SIGNATURE_HEADER: signatures}


def hub_headers(terms: WebSubTerms, secrets: Iterable[str], message_id: str, body: bytes) -> dict[str, str]:
    """The headers of content that a WebSub hub distributes, signed if the subscriber gave a secret."""
    headers = {ID_HEADER: message_id, "link": link_header(terms.hub_url, terms.topic_url)}
    for secret in secrets:
        headers[HUB_SIGNATURE_HEADER] = content_signature(secret, body)
    return headers
