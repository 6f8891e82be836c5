"""What to do about errors of stores that only a person can mend."""

import re

from headrace.model.arguments import shortened

_ADVICE = (
    (
        r"169\.254\.169\.254|InstanceProfile",
        "no credentials were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment or in "
        "--store-credentials-file, or run on a machine that has a role",
    ),
    (
        r"NoSuchBucket|bucket does not exist",
        "there is no such bucket: create it, or check its name, the region and the endpoint",
    ),
    (
        r"InvalidAccessKeyId|SignatureDoesNotMatch|AccessDenied|403 Forbidden",
        "the credentials are refused: check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, and what they may do there",
    ),
    (
        r"password authentication failed|no password supplied",
        "set PGPASSWORD in the environment or in --store-credentials-file, or write ~/.pgpass",
    ),
    (r'role "[^"]*" does not exist', "create the user: createuser NAME --pwprompt"),
    (r'database "[^"]*" does not exist', "create the database: createdb NAME --owner USER"),
    (
        r"Authentication required|already authenticated|NOAUTH|WRONGPASS|invalid username-password|AUTH <password>",
        "set REDIS_PASSWORD in the environment or in --store-credentials-file",
    ),
    (r"DB index is out of range", "the server has fewer databases, usually 0 to 15: give another number"),
)
"""Patterns of what drivers say, and what to do."""


def with_advice(told: str) -> str:
    """What a driver has said, in one line, with what to do about it if that is known.

    >>> with_advice('database "trading" does not exist')
    'database "trading" does not exist; create the database: createdb NAME --owner USER'
    """
    line = " ".join(told.split())
    advice = next((text for pattern, text in _ADVICE if re.search(pattern, line)), "")
    if not advice:
        return shortened(line)
    if "://" in line:
        return advice  # what went where inside of the driver helps nobody
    return f"{shortened(line)}; {advice}"
