"""The licences of everything that an installation with all extras brings along; and what is known of its weaknesses."""

import importlib.metadata
import re
import shutil
import subprocess
import sys

import pytest

ACCEPTED = re.compile(
    r"\b(MIT(-0)?|BSD|0BSD|Apache|PSF|Python Software Foundation|ISC|MPL|Mozilla Public License|Zlib|Unlicense|CC0)\b",
    re.IGNORECASE,
)
REFUSED = re.compile(r"\b(AGPL|GPL|Affero|SSPL|BUSL|Commons Clause|proprietary)\b", re.IGNORECASE)
"""Licences that would bind those who use Headrace; the LGPL would need a look at how it is used."""
WEAK_COPYLEFT = {
    "crc32c": "an extension module that is loaded at run time: whoever wants can replace it",
    "psycopg": "Python modules that are loaded at run time for PostgreSQL: whoever wants can replace them",
    "psycopg-binary": "extension modules that psycopg loads at run time: whoever wants can replace them",
}
"""Packages under the LGPL, and why that binds nobody who uses Headrace."""


def closure(extra: str) -> dict[str, importlib.metadata.Distribution]:
    """All installed distributions that an installation with an extra needs, by normalised name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = [("headrace", frozenset({extra}))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # for another platform, or another Python
        found[name] = distribution
        for requirement in distribution.requires or ():
            parsed = re.match(r"([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?", requirement)
            assert parsed is not None, requirement
            wanted = re.findall(r"""extra\s*==\s*["']([^"']+)["']""", requirement)
            if not wanted or extras & set(wanted):
                more = frozenset(part.strip() for part in (parsed[2] or "").split(",") if part.strip())
                waiting.append((re.sub(r"[-_.]+", "-", parsed[1]).lower(), more))
    return found


def licence(distribution: importlib.metadata.Distribution) -> str:
    """What a distribution says of its licence."""
    told = distribution.metadata
    classifiers = [one for one in told.get_all("Classifier") or () if one.startswith("License ::")]
    lines = (told.get("License-Expression") or "", (told.get("License") or "")[:200], *classifiers)
    return "; ".join(line for line in lines if line)


def test_every_dependency_has_an_accepted_licence() -> None:
    found = closure("all")
    found.pop("headrace", None)
    assert {"msgspec", "joserfc", "uvicorn"} <= found.keys(), "the closure was not found: is headrace installed?"
    told = {name: licence(distribution) for name, distribution in sorted(found.items())}
    assert {name: text for name, text in told.items() if not ACCEPTED.search(text)}.keys() <= WEAK_COPYLEFT.keys()
    assert {name: text for name, text in told.items() if REFUSED.search(text)} == {}


@pytest.mark.long
def test_no_dependency_has_a_known_weakness() -> None:
    if shutil.which("pip-audit") is None:
        pytest.skip("pip-audit is not installed: no dependency was checked for known weaknesses")
    names = [f"{name}=={one.version}" for name, one in sorted(closure("all").items()) if name != "headrace"]
    command = [sys.executable, "-m", "pip_audit", "--no-deps", "--disable-pip", "--requirement", "/dev/stdin"]
    done = subprocess.run(command, input="\n".join(names), capture_output=True, text=True, timeout=300, check=False)
    if done.returncode and ("ConnectionError" in done.stderr or "Max retries" in done.stderr):
        pytest.skip("pip-audit reached no index: no dependency was checked for known weaknesses")
    assert done.returncode == 0, done.stdout + done.stderr
