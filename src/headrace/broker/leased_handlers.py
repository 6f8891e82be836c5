"""The handlers of requests about leased subscriptions, their messages and the results of jobs."""

from collections.abc import Callable
from typing import Any

import msgspec

from headrace.broker.job_finisher import JobFinisher
from headrace.broker.leasing import LeaseDispatcher
from headrace.broker.ledger import Ledger
from headrace.broker.message_editor import MessageEditor
from headrace.broker.message_queries import MessageQueries
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Session
from headrace.broker.publisher import Publisher
from headrace.broker.result_topics import ResultTopics
from headrace.broker.standing_leases import StandingLeases
from headrace.broker.subscription_admin import SubscriptionAdmin
from headrace.model.batch import received
from headrace.model.errors import Forbidden
from headrace.model.job_requests import JobFinish, ResultsOpen
from headrace.model.leasing import (
    Ack,
    Edit,
    Edited,
    EditMatching,
    Extend,
    Find,
    Forecast,
    Lease,
    LeaseStop,
    Redrive,
    Reject,
    Release,
    Settlement,
    SubscriptionAlter,
    SubscriptionCreate,
    SubscriptionDelete,
    SubscriptionDescribe,
    SubscriptionList,
    SubscriptionReset,
)
from headrace.model.request import Request
from headrace.model.standing_lease import LeaseClose, LeaseCredit, LeaseOpen

LeasedHandler = Callable[[Session, Any, memoryview, int], Any]


def leased_handlers(
    admin: SubscriptionAdmin,
    leasing: LeaseDispatcher,
    standing: StandingLeases,
    queries: MessageQueries,
    editor: MessageEditor,
) -> dict[type[Request[Any]], LeasedHandler]:
    """What answers each request about leased subscriptions and their messages."""
    return {
        SubscriptionCreate: lambda _, ask, __, now: admin.create(ask, now),
        SubscriptionAlter: lambda _, ask, __, now: admin.alter(ask, now),
        SubscriptionReset: lambda _, ask, __, now: admin.reset(ask, now),
        SubscriptionDelete: lambda _, ask, __, now: admin.delete(ask, now),
        SubscriptionDescribe: lambda _, ask, __, now: admin.describe(ask, now),
        SubscriptionList: lambda session, ask, _, now: admin.listed(session, ask, now),
        Lease: lambda session, ask, _, now: leasing.lease(session, ask, now),
        LeaseOpen: lambda session, ask, _, now: standing.open(session, ask, now),
        LeaseCredit: lambda session, ask, _, __: standing.credit(session, ask),
        LeaseClose: lambda session, ask, _, now: standing.close(session, ask, now),
        LeaseStop: lambda session, ask, _, __: leasing.stop(session, ask),
        Ack: lambda _, ask, __, now: leasing.ack(ask, now),
        Extend: lambda _, ask, __, now: leasing.extend(ask, now),
        Release: lambda session, ask, _, now: leasing.release(session, ask, now),
        Reject: lambda _, ask, __, now: leasing.reject(ask, now),
        Find: lambda _, ask, __, now: queries.find(ask, now),
        Forecast: lambda _, ask, __, now: queries.forecast(ask, now),
        Edit: lambda session, ask, body, now: _owned(session, ask, editor.edit, body, now),
        EditMatching: lambda session, ask, body, now: _owned(session, ask, queries.edit_matching, body, now),
        Redrive: lambda session, ask, _, now: queries.redrive(session, ask, now),
    }


def _owned(
    session: Session,
    request: Edit | EditMatching,
    edit: Callable[..., PendingAnswer[Edited]],
    body: memoryview,
    now: int,
) -> PendingAnswer[Edited]:
    """Edit messages; an identity that may edit only its own does so in its own name."""
    access, name = session.access, session.identity.name
    if access is None or access.edits_any(request.topic):
        return edit(request, body, now)
    if request.owner not in ("", name):
        raise Forbidden(f"{name} may edit its own messages only, not those of {request.owner}: leave the owner out")
    return edit(msgspec.structs.replace(request, owner=name), body, now, owned_only=True)


def job_handlers(
    finisher: JobFinisher, results: ResultTopics, publisher: Publisher, ledger: Ledger
) -> dict[type[Request[Any]], LeasedHandler]:
    """What answers each request about the results of jobs."""

    def finish(_: Session, request: JobFinish, body: memoryview, now_us: int) -> Settlement | PendingAnswer[Settlement]:
        publisher.check_disk()
        return finisher.finish(request, received(body).copied(), now_us)  # it outlives this call

    return {
        ResultsOpen: lambda session, _, __, now: ledger.durably(results.open(session.tenant, now)),
        JobFinish: finish,
    }
