"""What all tests share."""

import gc
import os
import signal
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "default",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    report_multiple_bugs=False,  # the first one tells enough, and its name is in pytest's summary
)
settings.register_profile("thorough", parent=settings.get_profile("default"), max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

SPARK = "tests/spark/"
"""Where tests share a session of Spark."""
BY_ITSELF = ("test_sink_kill", "test_declarative")
"""Those of them that do not, and may run beside it."""
FIRST = ("tests/spark/", "tests/faults/", "tests/scenarios/", "tests/acceptance/")
"""Folders whose files take long. When files are shared among processes these go first, so that none is left alone
with one of them in the end."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes long, unless it is asked for; have the rest in the order in which processes take it."""
    if not config.getoption("--long"):
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="takes long: bin/test --long runs it, too"))
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: [not item.nodeid.startswith(folder) for folder in FIRST])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each process whole files, and one of them all that shares a session of Spark."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if any(word in nodeid for word in BY_ITSELF):
                return nodeid
            return SPARK if nodeid.startswith(SPARK) else super()._split_scope(nodeid)

    config.option.loadscopereorder = False  # the order is ours
    return Scheduling(config, log)


@pytest.fixture(scope="module", autouse=True)
def _light_heap() -> None:
    """Let the garbage collector pass over what there is already, above all the tests themselves: it stays."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what tests want to be read even though they passed, in whichever process they ran."""
    for report in terminalreporter.getreports("passed"):
        for title, lines in report.user_properties:
            if lines:
                terminalreporter.section(title)
                terminalreporter.write_line("\n".join(lines))


# What a shell runs in the background ignores Ctrl-C, and under nohup also SIGHUP: so would all that tests start.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)
