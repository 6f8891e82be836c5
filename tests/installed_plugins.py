"""Packages with plug-ins for tests: folders on the path with metadata, as pip leaves them."""

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
