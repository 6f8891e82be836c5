"""Others' servers: found, installed where that can be done, and how much room they take."""

import functools
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from headrace.bench.measure import Unavailable

_DEPENDS = ["apt-cache", "depends", "--recurse", "--installed"]
_DEPENDS += [f"--no-{kind}" for kind in ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")]


@functools.cache
def debian_program(program: str, package: str) -> str:
    """The path of a program; its Debian package is installed if need be, and if that is allowed."""
    found = shutil.which(program)
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        print(f"benchmarks: installing {package}", file=sys.stderr, flush=True)
        # No run level but 1: the package must not start a service of its own.
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", package]
        for command in (install, ["apt-get", "update", "-qq"], install):
            done = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
            )
            if done.returncode == 0 and (found := shutil.which(program)):
                break
    if found is None:
        raise Unavailable(f"{program} is not installed (Debian, Ubuntu: apt-get install {package})")
    return found


def need(module: str, distribution: str) -> None:
    """Fail unless a Python package is there."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise Unavailable(f"{distribution} is not installed: {error}") from error


@functools.cache
def wheel(module: str, distribution: str) -> None:
    """Get a Python package that is not made for every system, and so must not be needed to set up the others."""
    if importlib.util.find_spec(module) is None and sys.prefix != sys.base_prefix:
        print(f"benchmarks: installing {distribution}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
        subprocess.run(
            [*command, "--only-binary", ":all:", distribution],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        importlib.invalidate_caches()
    need(module, distribution)


def python_bytes(*distributions: str) -> int:
    """The size of what Python packages installed, without what they depend on."""
    total = 0
    for name in distributions:
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError as error:
            raise Unavailable(f"{name} is not installed") from error
        total += sum(Path(str(file.locate())).stat().st_size for file in files if Path(str(file.locate())).is_file())
    return total


def debian_bytes(package: str) -> int:
    """The installed size of a Debian package and what it depends on, without what every Debian system has."""
    if not shutil.which("apt-cache") or package not in _packages():
        raise Unavailable(f"{package} is not installed as a Debian package")
    everywhere = _closure(*(name for name, (_, priority) in _packages().items() if priority == "required"))
    return sum(_packages()[name][0] for name in _closure(package) - everywhere) * 1024


@functools.cache
def _packages() -> dict[str, tuple[int, str]]:
    """The size in KiB and the priority of each that is installed."""
    shown = "${binary:Package}\\t${Installed-Size}\\t${Priority}\\n"
    listed = subprocess.run(["dpkg-query", "-W", "-f", shown], check=True, capture_output=True, text=True).stdout
    rows = [line.split("\t") for line in listed.splitlines()]
    return {name.partition(":")[0]: (int(size or 0), priority) for name, size, priority in rows}


def _closure(*packages: str) -> set[str]:
    listed = subprocess.run([*_DEPENDS, *packages], check=True, capture_output=True, text=True).stdout
    names = {line.partition(":")[0] for line in listed.splitlines() if line[:1].strip()}
    return {name for name in names if name in _packages()}
