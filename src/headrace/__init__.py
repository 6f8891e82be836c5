"""Headrace: a messaging platform in Python in which every topic is a durable log."""

from headrace.embedded.cursor import Cursor
from headrace.embedded.log import Log
from headrace.embedded.repair import repair
from headrace.model.batch import Batch
from headrace.model.errors import HeadraceError
from headrace.model.message import Message

__version__ = "0.1.0"

__all__ = ["Batch", "Cursor", "HeadraceError", "Log", "Message", "__version__", "repair"]
