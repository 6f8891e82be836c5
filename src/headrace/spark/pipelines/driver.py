"""Drives a pipeline: one process, one Spark application, all queries of a file, until it ends or is asked to."""

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
"""How long a driver that a supervisor has started waits until what the last one has left is gone."""


@dataclass(frozen=True)
class Order:
    """How a pipeline is to run."""

    name: str
    file: str
    address: str
    """Of the broker."""
    master: str
    conf: Mapping[str, str] = field(default_factory=dict)
    checkpoints: str = ""
    """Empty: in the pipeline's own directory."""
    once: bool = False
    quick: bool = False
    supervised: bool = False


class Post:
    """A driver's place: its lock, and what others read of it."""

    def __init__(self, folder: Folder, *, supervised: bool, check: Callable[[], None]) -> None:
        self.folder = folder
        self._lock = folder.lock(LOCK_S if supervised else 0.0, check)
        self._driver = this_driver()
        self._driver.supervised = supervised
        folder.write_driver(self._driver)

    def __enter__(self) -> "Post":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, HeadraceError):
            self.tell(phase=FAILED, error=str(error), permanent=is_permanent(error))
        elif isinstance(error, Exception):
            self.tell(phase=FAILED, error=f"{type(error).__name__}: {error}")
        self._lock.release()

    @property
    def lock_fd(self) -> int:
        """The lock, for what works for this driver."""
        return self._lock.fd

    @property
    def driver(self) -> DriverProcess:
        """What is written now."""
        return self._driver

    def tell(self, **changes: object) -> None:
        """Let others know."""
        for name, value in changes.items():
            setattr(self._driver, name, value)
        self.folder.write_driver(self._driver)


def definitions_of(order: Order) -> list[Definition] | None:
    """The queries of a file; None if it can be read only when there is a session."""
    try:
        return load(order.file)
    except SessionNeeded:
        if has_session():
            raise
        return None


def drive(
    order: Order,
    definitions: Sequence[Definition] | None,
    bus: Bus,
    post: Post,
    *,
    heard: Callable[[QueryProgress], None],
    started: Callable[[DriverProcess], None],
    asked: Callable[[], bool],
    told: Callable[[str], None] = lambda _: None,
    log_fd: int | None = None,
) -> None:
    """Run the queries until all have ended, one has failed, or `asked` says so.

    Parameters:
        order: how.
        definitions: the queries, as `definitions_of` has found them.
        bus: where progress is published.
        post: the driver's place.
        heard: told how the queries get on.
        started: told when each has begun: where it begins to read is fixed, and its first batch is done or takes long.
        asked: whether somebody wants it to end.
        told: told what is going on before that.
        log_fd: where Java's log goes; by default to standard error.
    """
    ours = not has_session()

    def tell(doing: str) -> None:
        post.tell(doing=doing)
        told(doing)

    tell("starting Spark")
    session = _session(order, definitions, post, log_fd)
    from headrace.spark.pipelines.application import Application

    reporter = Reporter(bus)

    def hear(progress: QueryProgress) -> None:
        reporter.add(progress)
        heard(progress)

    application = Application(session, order.name, hear)
    with _Closing(application, reporter, session if ours else None):
        known = _loaded_now(session, order) if definitions is None else definitions
        checkpoints = order.checkpoints or str(post.folder.checkpoints)
        make_topics(bus, known)
        names = [definition.name for definition in known]
        post.tell(queries=names, checkpoints=checkpoints, ui=_ui(session))
        application.start(
            known, address=order.address, checkpoints=checkpoints, once=order.once, tell=tell, asked=asked
        )
        if not asked():
            post.tell(phase=RUNNING, doing="")
            started(post.driver)
        post.tell(phase=_watch(application, post, asked))


class _Closing:
    """Closes all that was opened; but who has asked twice for the end does not want to wait for that."""

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


def _session(order: Order, definitions: Sequence[Definition] | None, post: Post, log_fd: int | None) -> "SparkSession":
    settings = session_settings(
        order.name,
        order.master,
        {**settings_of(definitions or ()), **order.conf},
        quick=order.quick,
        quiet=log_fd is None and not order.supervised,
    )
    folder = os.path.dirname(os.path.abspath(order.file))
    return open_session(order.master, settings, lock_fd=post.lock_fd, folder=folder, log_fd=log_fd)


def make_topics(bus: Bus, definitions: Sequence[Definition]) -> None:
    """See that the topics of queries are there before they begin, if the broker may make topics by itself."""
    names = {name for each in definitions for source in each.sources for name in source.topics}
    names |= {name for each in definitions for name in each.sink.topics}
    for name in sorted(names):
        try:
            bus.describe_topic(name)
        except TopicNotFound:
            with suppress(TopicNotFound):  # it may not, and then Spark says so of a source
                bus.describe_topic(name, create=True)
                logger.info("created topic %s, which a query names", name)


def _watch(application: "Application", post: Post, asked: Callable[[], bool]) -> str:
    """Wait for the end, and say how it came."""
    while application.running():
        if asked():
            post.tell(phase=STOPPING)
            application.stop()
            return STOPPED
        time.sleep(LOOK_EVERY_S)
    return FINISHED


def _loaded_now(session: "SparkSession", order: Order) -> list[Definition]:
    """The queries of a file that could not be read before; its settings come late for some."""
    definitions = load(order.file)
    for name, value in settings_of(definitions).items():
        if name not in order.conf:
            try:
                session.conf.set(name, value)
            except Exception as error:
                raise InvalidArgument(
                    f"{order.file}: {name} must be known before Spark starts, and this file can be read only then, as "
                    f"it uses Spark outside of its functions: give --conf {name}={value}"
                ) from error
    return definitions


def warnings_of(order: Order) -> list[str]:
    """What may not be as the user thinks."""
    found = []
    if local_cores(order.master) is None:
        if not order.checkpoints or is_local_path(order.checkpoints):
            found.append(
                "the checkpoints are in a directory, which all executors must see: give --checkpoints a URL otherwise"
            )
        if (
            order.address.startswith(("headrace+unix:", "unix:"))
            or "://127." in order.address
            or "://localhost" in order.address
        ):
            found.append(f"executors on other machines cannot reach a broker at {order.address}")
    return found


def _ui(session: object) -> str:
    """Where Spark's pages are, if this process has a context that tells."""
    context = getattr(session, "_sc", None)
    return str(getattr(context, "uiWebUrl", None) or "")
