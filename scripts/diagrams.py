"""Draw the pictures of the documentation: docs/images/*.svg.

`scripts/diagrams.py` writes them; with `--check` it only says which are out of date.
"""

import argparse
import sys
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


PICTURES = {"model.svg": model}


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
