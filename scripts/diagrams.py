"""Draw the pictures of the documentation: docs/images/*.svg.

`scripts/diagrams.py` writes them; with `--check` it only says which are out of date.
"""

import argparse
import sys
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

IMAGES = Path(__file__).parent.parent / "docs" / "images"

INK, PAPER, FAINT = "#1f2933", "#ffffff", "#627d98"
TEAL, SAND, ROSE, SKY = "#d5efec", "#fdf1d6", "#fbe0e3", "#dcebfa"
EDGES = {TEAL: "#0f766e", SAND: "#b7791f", ROSE: "#be3144", SKY: "#2563a8", PAPER: "#9fb3c8"}


class Picture:
    """An SVG picture, drawn from top to bottom in the order of the calls."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            f' font-family="Helvetica, Arial, sans-serif" font-size="14" fill="{INK}" role="img">',
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7"'
            f' orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="{FAINT}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="10" fill="{PAPER}"/>',
        ]

    def box(self, x: int, y: int, width: int, height: int, colour: str = PAPER) -> None:
        """Draw a rounded box."""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="7" fill="{colour}" stroke="{EDGES[colour]}"/>'
        )

    def text(self, x: int, y: int, words: str, *, size: int = 14, bold: bool = False, faint: bool = False) -> None:
        """Write a line that begins at x; `y` is its base line."""
        self._write(x, y, words, "start", size, bold, faint)

    def centred(self, x: int, y: int, words: str, *, size: int = 14, bold: bool = False, faint: bool = False) -> None:
        """Write a line around x."""
        self._write(x, y, words, "middle", size, bold, faint)

    def card(self, x: int, y: int, width: int, colour: str, heading: str, *lines: str) -> None:
        """Draw a box with a heading and some smaller lines."""
        self.box(x, y, width, 32 + 18 * len(lines), colour)
        self.text(x + 12, y + 22, heading, bold=True)
        for number, line in enumerate(lines):
            self.text(x + 12, y + 42 + 18 * number, line, size=12)

    def step(self, x: int, y: int, width: int, colour: str, heading: str, files: tuple[str, ...]) -> None:
        """Draw a box with a heading and the files that do what it says."""
        self.box(x, y, width, 28 + 15 * len(files), colour)
        self.text(x + 10, y + 20, heading, size=13, bold=True)
        for number, file in enumerate(files):
            self._parts.append(
                f'<text x="{x + 10}" y="{y + 36 + 15 * number}" font-size="10.5"'
                f' font-family="DejaVu Sans Mono, Consolas, monospace">{escape(file)}</text>'
            )

    def arrow(self, *points: tuple[int, int], dashed: bool = False) -> None:
        """Draw a line through the points, with a tip at the last one."""
        path = " ".join(f"{x},{y}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{FAINT}" stroke-width="1.6"{dash} marker-end="url(#tip)"/>'
        )

    def svg(self) -> str:
        """Return the whole picture."""
        return "\n".join([*self._parts, "</svg>", ""])

    def _write(self, x: int, y: int, words: str, anchor: str, size: int, bold: bool, faint: bool) -> None:
        style = f' font-size="{size}"' if size != 14 else ""
        style += ' font-weight="bold"' if bold else ""
        style += f' fill="{FAINT}"' if faint else ""
        self._parts.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}"{style}>{escape(words)}</text>')


def model() -> str:
    """Draw what a topic is, who writes to it, and the ways in which it is read."""
    picture = Picture(
        960, 470, "A topic is a partitioned log; groups, leased subscriptions, replay and Spark are ways to read it"
    )
    picture.text(24, 34, "Publish", size=16, bold=True)
    picture.text(312, 34, "Topic: a durable log", size=16, bold=True)
    picture.text(660, 34, "Consume: indexes over the log", size=16, bold=True)

    writers = (
        ("Python client, CLI", "idempotent, batched, acknowledged"),
        ("Scheduled message", "due at a time, editable until then"),
        ("Schedule (cron)", "the broker publishes each run once"),
        ("Transaction, Spark sink", "several topics together or not at all"),
    )
    for number, (heading, line) in enumerate(writers):
        top = 54 + 82 * number
        picture.card(24, top, 240, SKY, heading, line)
        picture.arrow((264, top + 25), (308, top + 25))

    picture.box(312, 54, 296, 296, TEAL)
    picture.text(326, 78, "orders", bold=True)
    picture.text(382, 78, "3 partitions, by key", size=12, faint=True)
    for partition, count in enumerate((6, 4, 5)):
        top = 94 + 66 * partition
        picture.text(326, top + 12, f"partition {partition}", size=12, faint=True)
        for offset in range(count):
            left = 326 + 42 * offset
            picture.box(left, top + 18, 38, 28)
            picture.centred(left + 19, top + 37, str(offset), size=12)
    picture.text(326, 306, "Messages keep their offset for good.", size=12)
    picture.text(326, 324, "Retention: by time, by size, until consumed,", size=12)
    picture.text(326, 340, "by time to live, or the last of each key.", size=12)

    readers = (
        (SAND, "Group", "partitions divided among its members;", "one committed offset per partition"),
        (
            ROSE,
            "Leased subscription: a queue",
            "lease, then ack, extend, release or reject;",
            "fifo, lifo, priority or deadline; dead letters",
        ),
        (SAND, "Replay", "from an offset or a time,", "as long as messages are kept"),
        (SKY, "Spark", "topics as tables and streams;", "the archive in Parquet is part of them"),
    )
    for number, (colour, heading, *lines) in enumerate(readers):
        top = 54 + 76 * number
        picture.card(660, top, 276, colour, heading, *lines)
        picture.arrow((608, top + 34), (656, top + 34))

    picture.box(24, 380, 912, 66)
    picture.text(38, 404, "Journal", bold=True)
    picture.text(
        104,
        404,
        "what the broker has decided: topics, committed offsets, leases and acknowledgements, edits, schedules",
        size=12,
    )
    picture.text(
        38,
        430,
        "It is a log of the same storage engine. After a crash the broker replays it: nothing acknowledged is lost.",
        size=12,
        faint=True,
    )
    return picture.svg()


COLUMNS = ("Program: client, Spark", "Gateway, event loop", "Broker", "Engines", "Storage")
COLOURS = (SKY, PAPER, TEAL, SAND, ROSE)

FLOWS: tuple[tuple[str, tuple[tuple[int, str, tuple[str, ...]], ...]], ...] = (
    (
        "Publish, until the receipt says synced",
        (
            (
                0,
                "collect a batch, send it",
                ("client/_async/producer/accumulator.py", "client/_async/producer/sender.py"),
            ),
            (1, "read the frame", ("gateways/native/connection.py",)),
            (2, "route it; merge small batches", ("broker/broker.py", "broker/active_partition.py")),
            (3, "recognise retries; append", ("engines/producers.py", "engines/partition.py")),
            (4, "write to the segment", ("storage/log.py", "storage/segment.py")),
            (
                4,
                "fsync, once for all that wait",
                ("storage/group_commit.py", "storage/inline_sync.py", "storage/disk.py"),
            ),
            (2, "answer what is synced", ("broker/sync_waiters.py",)),
            (1, "write the answer", ("gateways/native/frame_writer.py",)),
            (0, "resolve the receipt", ("client/connection/request_router.py",)),
        ),
    ),
    (
        "Synced messages, until a group has committed them",
        (
            (4, "find the byte range", ("storage/reader.py", "storage/lookups.py")),
            (2, "wake the waiting streams", ("broker/active_partition.py", "broker/streams.py")),
            (
                1,
                "deliver, within the credit",
                ("gateways/native/delivery_queue.py", "gateways/native/stream_pump.py"),
            ),
            (
                0,
                "buffer, decode, iterate",
                ("client/_async/consumer/fetcher.py", "client/_async/consumer/subscription.py"),
            ),
            (0, "commit the offset", ("client/_async/consumer/group_membership.py",)),
            (2, "check the assignment, record", ("broker/group_coordinator.py", "broker/ledger.py")),
            (3, "append the fact, synced", ("engines/journal.py",)),
        ),
    ),
    (
        "Lease, until the acknowledgement is synced",
        (
            (0, "request a lease", ("client/_async/leasing/lease_requester.py",)),
            (2, "choose; or wait for a message", ("broker/leasing.py", "broker/message_taker.py", "broker/waiters.py")),
            (3, "take messages, in order", ("engines/leased/index.py", "engines/leased/contents.py")),
            (2, "record the lease, written", ("broker/ledger.py",)),
            (
                0,
                "hand the job to the handler",
                ("client/leasing/prefetch_buffer.py", "client/_async/app/handler_workers.py"),
            ),
            (0, "acknowledge, in batches", ("client/_async/leasing/acknowledger.py",)),
            (2, "check the token; settle", ("broker/lease_checks.py", "broker/leasing.py")),
            (3, "append the fact, synced", ("engines/journal.py",)),
        ),
    ),
    (
        "A message with a due time, until it is delivered",
        (
            (3, "index it by its due time", ("engines/leased/log_scanner.py", "engines/leased/pending.py")),
            (2, "know the next due time", ("broker/partition_schedule.py",)),
            (1, "tick at that time", ("runtime/broker_ticker.py", "runtime/broker_clock.py")),
            (2, "lease it, up to 0.5 s ahead", ("broker/leasing.py",)),
            (0, "hold it until it is due", ("client/leasing/prefetch_buffer.py", "client/connection/clock.py")),
        ),
    ),
    (
        "A schedule (cron), until its run is a message",
        (
            (2, "next run by the wall clock", ("broker/schedules.py", "model/schedule.py")),
            (2, "stage it; one fact commits it", ("broker/staging.py", "broker/ledger.py")),
            (2, "append it to its topic", ("broker/commit_applier.py",)),
        ),
    ),
    (
        "Spark reads a topic",
        (
            (0, "plan offset ranges (driver)", ("spark/datasource.py", "spark/source/planning.py")),
            (0, "read a range (task)", ("spark/source/reader.py", "spark/source/message_source.py")),
            (2, "fetch whole batches", ("broker/streams.py",)),
            (4, "as byte ranges of files", ("storage/reader.py",)),
            (0, "columns to Arrow", ("spark/source/arrow.py",)),
        ),
    ),
    (
        "Spark writes to topics, exactly once",
        (
            (0, "Arrow to batches (task)", ("spark/sink/topic_batches.py", "spark/sink/packed_columns.py")),
            (2, "stage in a shared transaction", ("broker/transactions.py", "broker/staging.py")),
            (0, "commit (driver)", ("spark/sink/writer.py",)),
            (2, "one fact commits all of it", ("broker/ledger.py",)),
            (3, "append the fact, synced", ("engines/journal.py",)),
            (2, "append to the partitions", ("broker/commit_applier.py", "broker/active_partition.py")),
        ),
    ),
)
"""What happens to data, step by step: the column, what is done, and the files below src/headrace that do it."""

_COLUMN, _WIDTH, _ROW = 312, 282, 84


def flow() -> str:
    """Draw how data flows from a publish to a consumer, and in and out of Spark, with the file of each step."""
    picture = Picture(24 + _COLUMN * len(COLUMNS), _flow_height(), "How data flows, and the file of each step")
    for number, title in enumerate(COLUMNS):
        picture.text(20 + _COLUMN * number, 32, title, size=17, bold=True)
    top = 50
    for letter, (title, steps) in zip("ABCDEFG", FLOWS, strict=True):
        picture.text(20, top + 20, f"{letter}  {title}", size=15, bold=True)
        placed = [(column, top + 34 + _ROW * row) for (column, _, _), row in zip(steps, _rows(steps), strict=True)]
        for (_, _, files), here, there in zip(steps, placed, placed[1:], strict=False):
            picture.arrow(*_between(here, there, 28 + 15 * len(files)))
        for step, ((column, heading, files), (_, y)) in enumerate(zip(steps, placed, strict=True), 1):
            picture.step(20 + _COLUMN * column, y, _WIDTH, COLOURS[column], f"{letter}{step} {heading}", files)
        top = placed[-1][1] + _ROW + 8
    return picture.svg()


def _rows(steps: tuple[tuple[int, str, tuple[str, ...]], ...]) -> list[int]:
    """The row of each step: a step goes below the one before where the direction changes."""
    rows, row, direction = [0], 0, 0
    for (before, _, _), (column, _, _) in pairwise(steps):
        turn = (column > before) - (column < before)
        if turn == 0 or (direction and turn != direction):
            row += 1
        direction = turn
        rows.append(row)
    return rows


def _between(here: tuple[int, int], there: tuple[int, int], height: int) -> tuple[tuple[int, int], ...]:
    """The points of the arrow from one step, whose box has that height, to the next."""
    (column, y), (next_column, next_y) = here, there
    left, next_left = 20 + _COLUMN * column, 20 + _COLUMN * next_column
    if column == next_column:
        return (left + 30, y + height), (left + 30, next_y)
    begin, end = (left + _WIDTH, next_left) if next_column > column else (left, next_left + _WIDTH)
    if y == next_y:
        return (begin, y + 16), (end, y + 16)
    # Down from below the box, then across: no arrow passes through another box of its own row.
    middle = left + _WIDTH // 2
    return (middle, y + height), (middle, next_y + 16), (end, next_y + 16)


def _flow_height() -> int:
    return 60 + sum(42 + _ROW * (1 + max(_rows(steps))) for _, steps in FLOWS)


PICTURES = {"model.svg": model, "flow.svg": flow}


def main() -> int:
    """Write the pictures, or tell which differ."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--check", action="store_true", help="change nothing; fail if something differs")
    check = arguments.parse_args().check
    differing = []
    for name, draw in PICTURES.items():
        path, drawn = IMAGES / name, draw()
        if not path.exists() or path.read_text(encoding="utf-8") != drawn:
            differing.append(name)
            if not check:
                IMAGES.mkdir(exist_ok=True)
                path.write_text(drawn, encoding="utf-8")
    for name in differing:
        sys.stdout.write(f"{'differs' if check else 'written'}: docs/images/{name}\n")
    return 1 if check and differing else 0


if __name__ == "__main__":
    raise SystemExit(main())
