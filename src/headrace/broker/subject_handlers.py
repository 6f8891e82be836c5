"""The handlers of requests about subjects."""

from collections.abc import Callable
from typing import Any

from headrace.broker.ports import Session
from headrace.broker.request_dispatcher import RequestDispatcher
from headrace.broker.switchboard import Switchboard
from headrace.model.request import Request
from headrace.model.subject_requests import (
    ReplySend,
    RequestSend,
    ServeClose,
    ServeOpen,
    SubjectPublish,
    SubjectSubscribe,
    SubjectUnsubscribe,
    SwitchboardDescribe,
)

SubjectHandler = Callable[[Session, Any, memoryview, int], Any]


def subject_handlers(switchboard: Switchboard, requests: RequestDispatcher) -> dict[type[Request[Any]], SubjectHandler]:
    """What answers each request about subjects."""
    return {
        SubjectPublish: switchboard.publish,
        SubjectSubscribe: lambda session, ask, _, __: switchboard.subscribe(session, ask),
        SubjectUnsubscribe: lambda session, ask, _, __: switchboard.unsubscribe(session, ask),
        SwitchboardDescribe: lambda session, _, __, ___: requests.describe(session, switchboard.describe(session)),
        RequestSend: requests.send,
        ReplySend: requests.reply,
        ServeOpen: lambda session, ask, _, now: requests.open(session, ask, now),
        ServeClose: lambda session, ask, _, __: requests.close(session, ask),
    }
