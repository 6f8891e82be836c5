"""The driver of a pipeline: runs all queries of a file in one process and one Spark application."""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from headrace.client._sync.bus import Bus
from headrace.model.errors import HeadraceError, InvalidArgument, TopicNotFound
from headrace.spark.errors import SessionNeeded
from headrace.spark.pipelines.definition import Definition
from headrace.spark.pipelines.failures import is_permanent
from headrace.spark.pipelines.loader import load, settings_of
from headrace.spark.pipelines.paths import DriverProcess, Folder, is_local_path, this_driver
from headrace.spark.pipelines.progress import QueryProgress
from headrace.spark.pipelines.records import FAILED, FINISHED, RUNNING, STOPPED, STOPPING
from headrace.spark.pipelines.reporter import Reporter
from headrace.spark.pipelines.sessions import has_session, local_cores, open_session, session_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from headrace.spark.pipelines.application import Application

logger = logging.getLogger("headrace.pipelines")

LOOK_EVERY_S = 0.25
LOCK_S = 60.0
"""How long a supervised driver waits for the processes of the previous driver to end."""


@dataclass(frozen=True)
class RunRequest:
    """The settings of a pipeline's run."""

    name: str
    file: str
    address: str
    """The broker's address."""
    master: str
    conf: Mapping[str, str] = field(default_factory=dict)
    checkpoints: str = ""
    """Directory of the checkpoints; empty for the pipeline's own."""
    once: bool = False
    quick: bool = False
    supervised: bool = False


class DriverRegistration:
    """Registers this process as the driver: holds the pipeline's lock, and writes the driver's status file."""

    def __init__(self, folder: Folder, *, supervised: bool, check: Callable[[], None]) -> None:
        self.folder = folder
        self._lock = folder.lock(LOCK_S if supervised else 0.0, check)
        self._driver = this_driver()
        self._driver.supervised = supervised
        folder.write_driver(self._driver)

    def __enter__(self) -> "DriverRegistration":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, HeadraceError):
            self.update(phase=FAILED, error=str(error), permanent=is_permanent(error))
        elif isinstance(error, Exception):
            self.update(phase=FAILED, error=f"{type(error).__name__}: {error}")
        self._lock.release()

    @property
    def lock_fd(self) -> int:
        """The lock's file descriptor, for child processes of the driver."""
        return self._lock.fd

    @property
    def driver(self) -> DriverProcess:
        """The current content of the status file."""
        return self._driver

    def update(self, **changes: object) -> None:
        """Change fields of the status file."""
        for name, value in changes.items():
            setattr(self._driver, name, value)
        self.folder.write_driver(self._driver)


def definitions_of(request: RunRequest) -> list[Definition] | None:
    """Return the queries of a file; None if the file can only be loaded with a session."""
    try:
        return load(request.file)
    except SessionNeeded:
        if has_session():
            raise
        return None


def drive(
    request: RunRequest,
    definitions: Sequence[Definition] | None,
    bus: Bus,
    registration: DriverRegistration,
    *,
    on_progress: Callable[[QueryProgress], None],
    on_started: Callable[[DriverProcess], None],
    should_stop: Callable[[], bool],
    on_step: Callable[[str], None] = lambda _: None,
    log_fd: int | None = None,
) -> None:
    """Run the queries until all have ended, one has failed, or a stop was requested.

    Parameters:
        request: the settings of the run.
        definitions: the queries, as returned by `definitions_of`.
        bus: the broker to which progress is published.
        registration: the driver's lock and status file.
        on_progress: called with the progress of queries.
        on_started: called when all queries have fixed their start offsets and finished a batch, or take long for it.
        should_stop: returns whether a stop was requested.
        on_step: called with a text at each step before that.
        log_fd: the file descriptor of Java's log; by default standard error.
    """
    ours = not has_session()

    def tell(doing: str) -> None:
        registration.update(doing=doing)
        on_step(doing)

    tell("starting Spark")
    session = _session(request, definitions, registration, log_fd)
    from headrace.spark.pipelines.application import Application

    reporter = Reporter(bus)

    def hear(progress: QueryProgress) -> None:
        reporter.add(progress)
        on_progress(progress)

    application = Application(session, request.name, hear)
    with _Closing(application, reporter, session if ours else None):
        known = _loaded_now(session, request) if definitions is None else definitions
        checkpoints = request.checkpoints or str(registration.folder.checkpoints)
        make_topics(bus, known)
        names = [definition.name for definition in known]
        registration.update(queries=names, checkpoints=checkpoints, ui=_ui(session))
        application.start(
            known,
            address=request.address,
            checkpoints=checkpoints,
            once=request.once,
            tell=tell,
            should_stop=should_stop,
        )
        if not should_stop():
            registration.update(phase=RUNNING, doing="")
            on_started(registration.driver)
        registration.update(phase=_watch(application, registration, should_stop))


class _Closing:
    """Closes application, session and reporter, except on a second interrupt, which ends the process at once."""

    def __init__(self, application: "Application", reporter: Reporter, session: "SparkSession | None") -> None:
        self._application = application
        self._reporter = reporter
        self._session = session

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None or issubclass(kind, Exception):
            self._application.close()
            if self._session is not None:
                self._session.stop()
            self._reporter.close()


def _session(
    request: RunRequest, definitions: Sequence[Definition] | None, registration: DriverRegistration, log_fd: int | None
) -> "SparkSession":
    settings = session_settings(
        request.name,
        request.master,
        {**settings_of(definitions or ()), **request.conf},
        quick=request.quick,
        quiet=log_fd is None and not request.supervised,
    )
    folder = os.path.dirname(os.path.abspath(request.file))
    return open_session(request.master, settings, lock_fd=registration.lock_fd, folder=folder, log_fd=log_fd)


def make_topics(bus: Bus, definitions: Sequence[Definition]) -> None:
    """Create missing topics of the queries, if the broker may create topics automatically."""
    names = {name for each in definitions for source in each.sources for name in source.topics}
    names |= {name for each in definitions for name in each.sink.topics}
    for name in sorted(names):
        try:
            bus.describe_topic(name)
        except TopicNotFound:
            with suppress(TopicNotFound):  # the broker may not; then Spark reports the missing source
                bus.describe_topic(name, create=True)
                logger.info("created topic %s, which a query names", name)


def _watch(application: "Application", registration: DriverRegistration, should_stop: Callable[[], bool]) -> str:
    """Wait for the queries to end; returns the final phase."""
    while application.running():
        if should_stop():
            registration.update(phase=STOPPING)
            application.stop()
            return STOPPED
        time.sleep(LOOK_EVERY_S)
    return FINISHED


def _loaded_now(session: "SparkSession", request: RunRequest) -> list[Definition]:
    """Load a file that needs a session, and apply its settings that Spark still accepts."""
    definitions = load(request.file)
    for name, value in settings_of(definitions).items():
        if name not in request.conf:
            try:
                session.conf.set(name, value)
            except Exception as error:
                raise InvalidArgument(
                    f"{request.file}: {name} must be known before Spark starts, and this file can be read only then, "
                    f"as it uses Spark outside of its functions: give --conf {name}={value}"
                ) from error
    return definitions


def warnings_of(request: RunRequest) -> list[str]:
    """Return warnings about settings that do not work on a cluster."""
    found = []
    if local_cores(request.master) is None:
        if not request.checkpoints or is_local_path(request.checkpoints):
            found.append(
                "the checkpoints are in a directory, which all executors must see: give --checkpoints a URL otherwise"
            )
        if (
            request.address.startswith(("headrace+unix:", "unix:"))
            or "://127." in request.address
            or "://localhost" in request.address
        ):
            found.append(f"executors on other machines cannot reach a broker at {request.address}")
    return found


def _ui(session: object) -> str:
    """Return the address of Spark's web UI, if this process has a context that knows it."""
    context = getattr(session, "_sc", None)
    return str(getattr(context, "uiWebUrl", None) or "")
