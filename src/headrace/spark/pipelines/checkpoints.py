"""Moves the checkpoints of a pipeline's queries aside, so that the queries start over."""

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from headrace.model.errors import InvalidArgument
from headrace.spark.pipelines.paths import Folder, is_local_path


def set_aside(folder: Folder, checkpoints: str, queries: Iterable[str]) -> list[Path]:
    """Rename the checkpoints of these queries; returns their new paths.

    Parameters:
        folder: the pipeline's directory, whose lock the caller holds.
        checkpoints: the checkpoints' directory, if not in the pipeline's own.
        queries: their names.
    """
    if not is_local_path(checkpoints):
        raise InvalidArgument(
            f"the checkpoints are in {checkpoints}, which is no directory of this machine: delete there what is called "
            "as the query, or give another place with --checkpoints"
        )
    place = Path(checkpoints.removeprefix("file:").replace("///", "/", 1)) if checkpoints else folder.checkpoints
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    renamed = []
    for path in (place / query for query in queries):
        if path.exists():
            renamed.append(path.rename(path.with_name(f"{path.name}.before-{stamp}")))
    return renamed
