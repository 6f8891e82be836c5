"""The audit trail: who did what, or tried to, recorded where requests are admitted and answered.

Administrative requests are answered when their record is stored. Publishing, reading and leasing pay nothing: only the
handlers of administrative requests are wrapped, and refusals pass an exception handler anyway.
"""

from collections.abc import Callable, Iterable
from typing import Any

from headrace.broker.audit_limits import RecentLogins, RecordLimit
from headrace.broker.audit_rules import is_audited, named_resources, request_details, resource_texts
from headrace.broker.audit_writer import AuditWriter
from headrace.broker.ledger import Ledger
from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.ports import Session
from headrace.broker.topics import TopicRegistry
from headrace.broker.turns import Turns
from headrace.engines.api import as_headrace_error
from headrace.model.audit import DONE, LOGIN, SUMMARY, AuditDescribe, AuditInfo
from headrace.model.errors import (
    Forbidden,
    HeadraceError,
    InvalidArgument,
    NotAuthenticated,
)
from headrace.model.request import Request
from headrace.model.requests import Done
from headrace.model.system_topics import AUDIT_TOPIC
from headrace.model.topic import DEFAULT_TENANT, tenant_of
from headrace.security.definitions import DefinitionsStore, SecurityDefinitions

Handler = Callable[[Session, Any, memoryview, int], Any]

_REFUSED_PER_MINUTE = 60
_LOGINS_PER_MINUTE = 300
"""Records of each tenant; what is more is summarised."""
_LOGIN_PERIOD_US = 300_000_000
"""How often logins of the same identity from the same host are recorded."""
_TEXT_CHARS = 300
REFUSALS = Forbidden, NotAuthenticated
"""Errors that are recorded of every request."""


class AuditTrail:
    """Records administrative actions, refused attempts and logins, while security or the setting `audit` is on."""

    def __init__(
        self, topics: TopicRegistry, ledger: Ledger, turns: Turns, definitions: DefinitionsStore, *, always: bool
    ) -> None:
        self._writer = AuditWriter(topics, ledger, turns)
        self._turns = turns
        self._always = always
        self.is_on = always or definitions.load().enabled
        self._limits: dict[tuple[str, str], RecordLimit] = {}
        """By tenant, and whether it is about logins or refused attempts."""
        self._recent = RecentLogins(_LOGIN_PERIOD_US)
        definitions.on_change(self._definitions_changed)
        topics.changed.connect(self._topic_changed)
        self._topics = topics
        self.mute, self.unmute = self._writer.mute, self._writer.unmute

    def requests(self) -> dict[type[Request[Any]], Handler]:
        """The handlers of its requests."""
        return {AuditDescribe: lambda session, _, __, ___: self._describe(session)}

    @property
    def idle(self) -> bool:
        """Whether all records are stored."""
        return self._writer.idle

    def tick(self, now_us: int) -> None:
        """Write summaries that are due, and checkpoints."""
        for (tenant, what), limit in list(self._limits.items()):
            self._summarise(tenant, what, limit.summary(now_us), now_us)
        self._writer.tick(now_us)

    def flush(self, now_us: int) -> None:
        """Append what is pending, with the summaries so far."""
        for (tenant, what), limit in list(self._limits.items()):
            self._summarise(tenant, what, limit.take(), now_us)
        self._writer.flush(now_us)

    def close(self, now_us: int) -> None:
        """Note the ends of the trails in the journal."""
        self._writer.checkpoint(now_us)

    def check_delete(self, topic: str) -> None:
        """Refuse to delete a trail that is being written."""
        if self.is_on and topic.rpartition("/")[2] == AUDIT_TOPIC:
            raise InvalidArgument(
                f"{topic} cannot be deleted while actions are recorded there: trim it, or set its retain_seconds"
            )

    # Recording.

    def audited(self, handlers: dict[type[Request[Any]], Handler]) -> dict[type[Request[Any]], Handler]:
        """The handlers, of which administrative ones record what they did before they answer."""
        return {kind: self._audited(handler) if is_audited(kind) else handler for kind, handler in handlers.items()}

    def _audited(self, handler: Handler) -> Handler:
        def handle(session: Session, request: Any, body: memoryview, now_us: int) -> Any:
            if session.is_internal:
                return handler(session, request, body, now_us)
            was_on = self.is_on
            try:
                outcome = handler(session, request, body, now_us)
            except REFUSALS:
                raise  # whoever asked for the handler records it
            except (HeadraceError, OSError) as error:
                if was_on:
                    self._record(session, request, error, now_us)
                raise
            if not was_on and not self.is_on:
                return outcome
            answer: PendingAnswer[Any] = PendingAnswer()

            def done(result: Any) -> None:
                if not was_on and not self.is_on:  # as when the change that would have enabled it failed
                    answer.resolve(result)
                else:
                    stored = self._record(session, request, result, self._turns.now_us)
                    stored.then(lambda _: answer.resolve(result))

            if isinstance(outcome, PendingAnswer):
                outcome.then(done)  # also when `answer` is cancelled: what is under way is done all the same
            else:
                done(outcome)
            return answer

        return handle

    def refused(self, session: Session, request: Request[Any], error: HeadraceError, now_us: int) -> None:
        """Record that a session may not do what it asked for."""
        if not self.is_on or not isinstance(error, REFUSALS):
            return
        tenant = session.tenant if session.is_counted else DEFAULT_TENANT
        if self._limit(tenant, "refused").admit(error.code, _who(session.identity.name, session.address), now_us):
            self._record(session, request, error, now_us, tenants=(tenant,))

    def opened(self, session: Session, now_us: int) -> None:
        """Record that a client has opened a session."""
        if not self.is_on or session.is_internal or not session.is_counted:
            return
        identity, who = session.identity, _who(session.identity.name, session.address)
        limit = self._limit(session.tenant, "logins")
        key = session.tenant, identity.name, identity.token_id, session.gateway, _host(session.address)
        if not self._recent.is_new(key, now_us):
            limit.count(DONE, who, now_us)
        elif limit.admit(DONE, who, now_us):
            self._writer.write(session.tenant, {**_origin(session, now_us), "action": LOGIN})

    def login_refused(self, gateway: str, address: str, mechanism: str, error: HeadraceError, now_us: int) -> None:
        """Record that a client was not let in."""
        if not self.is_on:
            return
        if self._limit(DEFAULT_TENANT, "refused").admit(error.code, _who(f"({mechanism})", address), now_us):
            fields = {
                "time_us": now_us,
                "action": LOGIN,
                "outcome": error.code,
                "gateway": gateway,
                "address": address,
                "details": {"mechanism": mechanism[:_TEXT_CHARS]},
            }
            self._writer.write(DEFAULT_TENANT, fields)

    def session_refused(self, session: Session, error: HeadraceError, now_us: int) -> None:
        """Record that a client was authenticated and got no session all the same."""
        if not self.is_on or session.is_internal:
            return
        who = _who(session.identity.name, session.address)
        if self._limit(DEFAULT_TENANT, "refused").admit(error.code, who, now_us):
            self._writer.write(DEFAULT_TENANT, {**_origin(session, now_us), "action": LOGIN, "outcome": error.code})

    def _record(
        self, session: Session, request: Request[Any], outcome: object, now_us: int, tenants: Iterable[str] = ()
    ) -> PendingAnswer[Done]:
        """Record a request in the trail of the session's tenant, and of those whose things it has changed."""
        named = named_resources(request)
        fields = {**_origin(session, now_us), "action": type(request).__name__}
        if isinstance(outcome, OSError):
            outcome = as_headrace_error(outcome)
        if isinstance(outcome, HeadraceError):
            fields["outcome"] = outcome.code
            tenants = tenants or (session.tenant,)
        else:
            touched = (tenant_of(one.names[0]) for one in named if one.names and "/" in one.names[0])
            tenants = dict.fromkeys((session.tenant, *touched))
        fields["details"] = request_details(request, outcome)
        stored: PendingAnswer[Done] = PendingAnswer()
        for tenant in reversed(tuple(tenants)):  # the session's own is the last one
            stored = self._writer.write(tenant, {**fields, "resources": resource_texts(named, tenant)})
        return stored

    def _describe(self, session: Session) -> AuditInfo:
        head, lost = self._writer.head(session.tenant)
        return AuditInfo(self.is_on, head.number, head.digest, head.offset, lost)

    def _limit(self, tenant: str, what: str) -> RecordLimit:
        found = self._limits.get((tenant, what))
        if found is None:
            found = RecordLimit(_REFUSED_PER_MINUTE if what == "refused" else _LOGINS_PER_MINUTE)
            self._limits[tenant, what] = found
        return found

    def _summarise(self, tenant: str, what: str, told: dict[str, Any] | None, now_us: int) -> None:
        if told is not None:
            fields = {"time_us": now_us, "action": SUMMARY, "tenant": tenant, "details": {"what": what, **told}}
            self._writer.write(tenant, fields)

    def _definitions_changed(self, document: SecurityDefinitions) -> None:
        self.is_on = self._always or document.enabled

    def _topic_changed(self, topic: Any, now_us: int) -> None:  # noqa: ARG002
        if topic.name.topic == AUDIT_TOPIC and topic.id not in self._topics.by_id:
            self._writer.forget_head(topic.name.tenant)

    def forget_tenant(self, tenant: str) -> None:
        """Forget the limits of a tenant that was deleted."""
        self._limits = {key: limit for key, limit in self._limits.items() if key[0] != tenant}


def _origin(session: Session, now_us: int) -> dict[str, Any]:
    """What a record tells of who asked."""
    identity = session.identity
    return {
        "time_us": now_us,
        "identity": identity.name,
        "token_id": identity.token_id,
        "tenant": session.tenant,
        "gateway": session.gateway,
        "address": session.address,
        "client": session.client[:_TEXT_CHARS],
    }


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def _who(name: str, address: str) -> str:
    return f"{name[:_TEXT_CHARS]} at {_host(address) or 'a local socket'}"
