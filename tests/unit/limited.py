"""A process that may open few files, and ends with an error if that hurts: limited.py ROLE DIRECTORY."""

import os
import resource
import sys
from contextlib import ExitStack, suppress

import headrace
from headrace.errors import TooManyFiles

LIMIT = 64
TOPICS = 150


def broker(path: str) -> None:
    """A broker has many more topics than files may be open."""
    with headrace.open(path) as bus:
        for turn in range(2):
            for number in range(TOPICS):
                assert bus.publish(f"t{number}", b"%d" % number).offset == turn
        for number in range(TOPICS):
            with bus.subscribe(f"t{number}", start="earliest", timeout=30) as messages:
                assert next(iter(messages)).value == b"%d" % number
    with headrace.open(path) as bus:
        assert bus.publish("t0", b"again").offset == 2


def log(path: str) -> None:
    """Logs are written, rolled and read while others take every descriptor there is, and again when there are some."""
    logs = [headrace.Log(f"{path}/{number}", segment_bytes=4096, sync_every=None) for number in range(10)]
    for each in logs:
        for number in range(30):
            each.append(b"%d" % number * 100)
            each.flush()
    with ExitStack() as taken:
        take_all(taken)
        for each in logs:
            with suppress(TooManyFiles):
                each.append(b"x" * 5000)
                each.flush()
    for each in logs:
        each.flush()
        each.append(b"after")
        each.flush()
        values = [message.value for message in each]
        assert values[:30] == [b"%d" % number * 100 for number in range(30)]
        assert values[-1] == b"after"
        each.close()
    with headrace.Log(f"{path}/0") as again:
        assert again.recovery.sound


def take_all(taken: ExitStack) -> None:
    while True:
        try:
            file = os.open("/dev/null", os.O_RDONLY)
        except OSError:
            return
        taken.callback(os.close, file)


def serve(path: str) -> None:
    """Be a broker that listens."""
    from headrace.cli.main import main

    raise SystemExit(main(["serve", "--data", path, "--host", "", "--json"]))


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    {role.__name__: role for role in (broker, log, serve)}[sys.argv[1]](sys.argv[2])
