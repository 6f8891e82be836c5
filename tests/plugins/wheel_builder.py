"""A build backend that needs nothing but Python: it puts the package and its metadata into a wheel.

Tests use it instead of the example's own backend, which would have to be downloaded.
"""

import tomllib
import zipfile
from pathlib import Path
from typing import Any


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: Any = None) -> str:  # noqa: ARG001
    """Write the wheel; returns its name."""
    about = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    name = about["name"].replace("-", "_")
    stem = f"{name}-{about['version']}"
    entry_points = ""
    for group, entries in about["entry-points"].items():
        entry_points += f"[{group}]\n" + "".join(f"{entry} = {target}\n" for entry, target in entries.items())
    sources = sorted(Path("src").rglob("*.py"))
    files = {path.relative_to("src").as_posix(): path.read_text(encoding="utf-8") for path in sources}
    files |= {
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n",
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{stem}.dist-info/entry_points.txt": entry_points,
    }
    files[f"{stem}.dist-info/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{stem}.dist-info/RECORD"])
    wheel = f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(Path(wheel_directory, wheel), "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return wheel
