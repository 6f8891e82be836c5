"""Packages with plug-ins for tests: folders on the path with metadata, as pip leaves them."""

import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from headrace.plugins import forget_plugins


def write_package(folder: Path, name: str, groups: Mapping[str, Mapping[str, str]], source: str = "") -> Path:
    """A folder that holds the package, version 1.0, whose module has this source; returns the folder."""
    module = name.replace("-", "_")
    metadata = folder / f"{module}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / f"{module}.py").write_text(source)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines: list[str] = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{entry} = {target}" for entry, target in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


@contextmanager
def on_path(*folders: Path) -> Iterator[None]:
    """While it lasts, packages of these folders are installed."""
    before, modules = list(sys.path), set(sys.modules)
    sys.path[:0] = map(str, folders)
    forget_plugins()
    try:
        yield
    finally:
        sys.path[:] = before
        for name in set(sys.modules) - modules:
            if any(str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)) for folder in folders):
                del sys.modules[name]
        forget_plugins()


EXAMPLE = Path(__file__).parents[1] / "examples" / "plugin"
_BUILDER = Path(__file__).parent / "plugins" / "wheel_builder.py"
_BACKEND = """[build-system]
requires = []
build-backend = "wheel_builder"
backend-path = ["."]

[project]"""


def install_example(folder: Path) -> Path:
    """Install the example of plug-ins with pip, without the network; returns the folder that has it."""
    copy, target = folder / "example", folder / "installed"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(_BUILDER, copy)
    project = copy / "pyproject.toml"
    _, _, rest = project.read_text().partition("[project]")
    project.write_text(_BACKEND + rest)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    command += ["--no-deps", "--no-build-isolation", "--target", str(target), str(copy)]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return target
