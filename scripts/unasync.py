"""Make the client for threads from the one for asyncio.

`scripts/unasync.py` writes `src/headrace/client/_sync`; with `--check` it only says whether something there differs.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parent.parent / "src" / "headrace" / "client"
BY_HAND = {"__init__.py", "concurrency.py", "connection/connection.py"}
"""Written for each side: these touch the world."""

RULES = [
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\b__a(enter|exit|iter|next)__\b", r"__\1__"),
    (r"\bStopAsyncIteration\b", "StopIteration"),
    (r"\bAsync(?=[A-Z])", ""),
    (r"\b(connect|open|attach)_async\b", r"\1"),
    (r"\bclient\._async\b", "client._sync"),
    (r"\baiter\(", "iter("),
    (r"\banext\(", "next("),
]


def translated(text: str) -> str:
    """The same for threads."""
    for pattern, replacement in RULES:
        text = re.sub(pattern, replacement, text)
    return text


def formatted(text: str, name: str) -> str:
    """With imports in order and lines as the house wants them: they have become shorter."""
    for command in (["check", "--select", "I", "--fix-only", "--quiet"], ["format", "--quiet"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(CLIENT / "_sync" / name), "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


def modules(folder: Path) -> dict[str, Path]:
    """The generated modules of a folder and the folders in it, by their path below it."""
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.py"))}
    return {name: path for name, path in found.items() if name not in BY_HAND}


def main() -> int:
    """Write the files, or tell which differ."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--check", action="store_true", help="change nothing; fail if something differs")
    check = arguments.parse_args().check
    wanted = {
        name: formatted(translated(path.read_text(encoding="utf-8")), name)
        for name, path in modules(CLIENT / "_async").items()
    }
    existing = modules(CLIENT / "_sync")
    differing = [name for name, text in wanted.items() if name not in existing or existing[name].read_text() != text]
    leftover = sorted(existing.keys() - wanted.keys())
    for name in differing if not check else ():
        (CLIENT / "_sync" / name).parent.mkdir(exist_ok=True)
        (CLIENT / "_sync" / name).write_text(wanted[name], encoding="utf-8")
    for name in leftover if not check else ():
        existing[name].unlink()
    for name in [*differing, *leftover]:
        sys.stdout.write(f"{'differs' if check else 'written'}: src/headrace/client/_sync/{name}\n")
    return 1 if check and (differing or leftover) else 0


if __name__ == "__main__":
    raise SystemExit(main())
