"""Protection of a broker's logs from `headrace log`."""

import argparse
import functools

from headrace.cli.arguments import Command
from headrace.cli.terminal.interrupts import Interrupts
from headrace.cli.terminal.output import Output
from headrace.model.errors import LogOwned
from headrace.storage.disk import LocalDisk
from headrace.storage.ownership import data_directory


def outside_brokers(run: Command) -> Command:
    """Wrap a command so that it refuses a broker's data directory and the logs in it."""

    @functools.wraps(run)
    def checked(given: argparse.Namespace, out: Output, interrupts: Interrupts) -> int:
        data = None if given.directory is None else data_directory(LocalDisk(), given.directory)
        if data is not None:
            raise LogOwned(f"{given.directory} belongs to the broker whose data is in {data}", data=data)
        return run(given, out, interrupts)

    return checked
