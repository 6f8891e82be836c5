"""Every error Headrace raises: one tree, each with a stable code and a word on whether trying again can help."""

import shlex  # noqa: I001
from typing import Any

from headrace.model.cluster_errors import (
    Fenced as Fenced,
    NotServing as NotServing,
    StoreUnavailable as StoreUnavailable,
    StoreUnqualified as StoreUnqualified,
    StoreWentBack as StoreWentBack,
)
from headrace.model.headrace_error import HeadraceError as HeadraceError
from headrace.model.headrace_error import restored_error
from headrace.model.limit_errors import (
    LimitExceeded as LimitExceeded,
    QuotaExceeded as QuotaExceeded,
    TenantExists as TenantExists,
    TenantNotEmpty as TenantNotEmpty,
    TenantNotFound as TenantNotFound,
    Throttled as Throttled,
)
from headrace.model.limits import MESSAGE_BYTES_MAX
from headrace.model.storage_errors import (
    CorruptBatch as CorruptBatch,
    CorruptFile as CorruptFile,
    UnsupportedFormat as UnsupportedFormat,
    DataDirectoryDamaged as DataDirectoryDamaged,
    NotADataDirectory as NotADataDirectory,
    OffsetOutOfRange as OffsetOutOfRange,
    MessageGone as MessageGone,
    LogNotFound as LogNotFound,
    LogClosed as LogClosed,
    LogReadOnly as LogReadOnly,
    LogInUse as LogInUse,
    LogOwned as LogOwned,
    CursorInUse as CursorInUse,
    LogFailed as LogFailed,
    DiskFull as DiskFull,
    DiskFailed as DiskFailed,
    TooManyFiles as TooManyFiles,
    DurabilityUnavailable as DurabilityUnavailable,
)


class InvalidArgument(HeadraceError):
    """An argument or a setting has a value that cannot be used."""

    code = "invalid_argument"


class InvalidEvent(InvalidArgument):
    """The message is no CloudEvent: an attribute is missing or wrong, or its data is; the text never repeats them."""

    code = "invalid_event"


class MessageTooLarge(InvalidArgument):
    """The message is larger than a message may be."""

    code = "message_too_large"

    @classmethod
    def of(cls, size: int, bytes_max: int, topic: str = "") -> "MessageTooLarge":
        """The error about a message of a size that is more than a limit, with what can be done about it."""
        if bytes_max >= MESSAGE_BYTES_MAX or size > MESSAGE_BYTES_MAX:
            text = f"a message has {size} bytes, and {MESSAGE_BYTES_MAX} are the most: divide it, or store it elsewhere"
        else:
            quoted = shlex.quote(topic) if topic else "TOPIC"
            text = (
                f"a message for {topic or 'this topic'} has {size} bytes, and the topic takes {bytes_max} at most: "
                f"`headrace topic alter {quoted} --message-bytes-max {size}` lets it take more"
            )
        return cls(text, bytes=size, bytes_max=bytes_max)


class BatchTooLarge(InvalidArgument):
    """The batch has more messages or bytes than a batch may have."""

    code = "batch_too_large"


class InvalidBatch(HeadraceError):
    """The bytes are not a batch: a checksum, a length or a field is wrong."""

    code = "invalid_batch"


class Timeout(HeadraceError, TimeoutError):
    """It did not happen in time; it may still happen."""

    code = "timeout"
    retryable = True


class TopicNotFound(HeadraceError, LookupError):
    """There is no topic of that name."""

    code = "topic_not_found"


class TopicExists(HeadraceError):
    """There is already a topic of that name."""

    code = "topic_exists"


class TopicFailed(HeadraceError):
    """The topic could not be opened; put its settings right, or delete it."""

    code = "topic_failed"


class PartitionNotFound(HeadraceError, LookupError):
    """The topic has no partition of that number."""

    code = "partition_not_found"


class GroupNotFound(HeadraceError, LookupError):
    """There is no group of that name."""

    code = "group_not_found"


class GroupInUse(HeadraceError):
    """The group has members at work; end them first."""

    code = "group_in_use"
    retryable = True


class MemberFenced(HeadraceError):
    """The partition belongs to another member of the group by now, or to none; what this one says of it is refused."""

    code = "member_fenced"


class UnknownMember(HeadraceError):
    """The group does not know this member, or has given it up for dead: join again."""

    code = "unknown_member"
    retryable = True


class UnexpectedOffset(HeadraceError):
    """The partition does not end where the publisher expected; nothing was appended."""

    code = "unexpected_offset"


class OutOfOrderSequence(HeadraceError):
    """A batch of this producer is missing before this one; nothing was appended."""

    code = "out_of_order_sequence"


class UnknownProducer(HeadraceError):
    """The partition does not know this producer, or has forgotten it: go on with a new epoch."""

    code = "unknown_producer"


class ProducerFenced(HeadraceError):
    """A newer producer of the same name has taken over."""

    code = "producer_fenced"


class TransactionNotFound(HeadraceError, LookupError):
    """There is no such open transaction: it was never begun, was aborted, or took too long."""

    code = "transaction_not_found"


class TransactionFenced(HeadraceError):
    """The transaction was begun anew by another process, which has taken over."""

    code = "transaction_fenced"


class SubscriptionNotFound(HeadraceError, LookupError):
    """The topic has no subscription of that name."""

    code = "subscription_not_found"


class SubscriptionExists(HeadraceError):
    """The topic already has a subscription of that name."""

    code = "subscription_exists"


class SubscriptionFailed(HeadraceError):
    """The leased subscription could not be opened; reset it, or delete it."""

    code = "subscription_failed"


class SubscriptionFull(HeadraceError):
    """A leased subscription of the topic has as many unsettled messages as it may have; publish again later."""

    code = "subscription_full"
    retryable = True


class SubscriptionReopened(HeadraceError):
    """The leased subscription was reset, and its leases are over; open the standing lease request again."""

    code = "subscription_reopened"
    retryable = True


class LeaseExpired(HeadraceError):
    """The lease is over, and the message has gone to another holder since, or may have."""

    code = "lease_expired"


class NotLeaseHolder(HeadraceError):
    """The message is not leased under that token."""

    code = "not_lease_holder"


class StaleVersion(HeadraceError):
    """The message was edited by somebody else since it was looked at; nothing was changed."""

    code = "stale_version"


class MessageLeased(HeadraceError):
    """A consumer has the message in hand; nothing was changed."""

    code = "message_leased"
    retryable = True


class NotOwner(HeadraceError):
    """The message belongs to another owner; nothing was changed."""

    code = "not_owner"


class ScheduleNotFound(HeadraceError, LookupError):
    """There is no schedule of that name."""

    code = "schedule_not_found"


class ScheduleExists(HeadraceError):
    """There is already a schedule of that name."""

    code = "schedule_exists"


class Busy(HeadraceError):
    """There is more to do than there is room for; try again in a moment."""

    code = "busy"
    retryable = True


class Draining(HeadraceError):
    """The broker is shutting down and takes nothing new; try again when it is back."""

    code = "draining"
    retryable = True


class Cancelled(HeadraceError):
    """The request was cancelled before it was answered."""

    code = "cancelled"


class ListenFailed(HeadraceError):
    """The broker cannot listen at that address; the text says why, and what to do."""

    code = "listen_failed"


class GatewayUnavailable(HeadraceError):
    """The broker has no gateway for the scheme of an address; the text says why, and what to do."""

    code = "gateway_unavailable"


class ProtocolError(HeadraceError):
    """The other side did not follow the protocol; the connection is closed."""

    code = "protocol_error"


class UnsupportedVersion(HeadraceError):
    """The two sides have no version of the protocol in common."""

    code = "unsupported_version"


class UnsupportedOperation(HeadraceError):
    """The broker does not know this operation."""

    code = "unsupported_operation"


class ConnectionFailed(HeadraceError, ConnectionError):
    """The broker cannot be reached, or the connection to it broke."""

    code = "connection_failed"
    retryable = True


class TlsFailed(ConnectionFailed):
    """The TLS handshake failed: a certificate is not accepted, or only one side speaks TLS."""

    code = "tls_failed"
    retryable = False


class Closed(HeadraceError):
    """It is closed."""

    code = "closed"


class Forked(HeadraceError):
    """It belongs to the process that this one was forked off; make a new one in this process."""

    code = "forked"


class IdempotencyKeyReused(HeadraceError):
    """The idempotency key was used for another request; use a new key for each request."""

    code = "idempotency_key_reused"


class IdempotencyTableFull(HeadraceError):
    """As many idempotency keys as may be are remembered; publish without a key, or again when some have expired."""

    code = "idempotency_table_full"
    retryable = True


class InternalError(HeadraceError):
    """The broker failed in a way that nobody foresaw; its log has the details."""

    code = "internal_error"


class MessageRefused(HeadraceError):
    """The topic's middleware refuses messages of the batch; nothing was stored."""

    code = "message_refused"


class MiddlewareFailed(HeadraceError):
    """A middleware of the topic failed; nothing was stored."""

    code = "middleware_failed"


class MiddlewareTimeout(HeadraceError):
    """A middleware of the topic does not return, or has not returned in time; nothing was stored."""

    code = "middleware_timeout"
    retryable = True


class NoResponders(HeadraceError):
    """Nobody serves the subject; nothing was sent."""

    code = "no_responders"
    retryable = True


class ResponderLost(HeadraceError):
    """The responder's connection ended before it answered; it may have handled the request."""

    code = "responder_lost"
    retryable = True


class ServiceFailed(HeadraceError):
    """The handler of a request has failed."""

    code = "service_failed"

    def __init__(
        self,
        text: str | None = None,
        *,
        error_code: str = "error",
        retryable: bool = False,
        error_details: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        details = {"error_code": error_code, "retryable": retryable, "error_details": error_details or {}}
        super().__init__(text, **details, **more)
        self.__dict__.update(details)

    error_code: str
    """The code of the handler's error."""
    error_details: dict[str, Any]
    """The details of the handler's error."""


class ServiceNotFound(HeadraceError, LookupError):
    """No instance of that service is registered."""

    code = "service_not_found"


class NotRegistered(HeadraceError):
    """The tenant admits registered services only, and this client has registered none."""

    code = "not_registered"


class NotAuthenticated(HeadraceError):
    """The client gave no credentials, or they are wrong or of a kind that this broker does not know."""

    code = "not_authenticated"


class TokenExpired(NotAuthenticated):
    """The token has expired: create another."""

    code = "token_expired"


class TokenRevoked(NotAuthenticated):
    """The token was revoked."""

    code = "token_revoked"


class Forbidden(HeadraceError):
    """No role of the identity allows this; whether the named thing exists is not told."""

    code = "forbidden"


class SecurityRequired(HeadraceError):
    """The broker would serve an address of the network without security: enable it, or say that it is intended."""

    code = "security_required"


class RoleNotFound(HeadraceError, LookupError):
    """There is no role of that name."""

    code = "role_not_found"


class BindingNotFound(HeadraceError, LookupError):
    """There is no such binding of a role."""

    code = "binding_not_found"


class TokenNotFound(HeadraceError, LookupError):
    """There is no token with that id."""

    code = "token_not_found"


class VersionConflict(HeadraceError):
    """The security definitions were changed since they were read; nothing was changed."""

    code = "version_conflict"


class UnexpectedVersion(HeadraceError):
    """The key has another number of messages than the publisher expected; nothing was appended."""

    code = "unexpected_version"


class EventsMissing(HeadraceError):
    """Events of the aggregate are missing: compaction or damage removed them, and its state cannot be computed."""

    code = "events_missing"


class TopicChanged(HeadraceError):
    """The topic was deleted and created again since a projection applied its messages; rebuild the projection."""

    code = "topic_changed"


class HandlerEndedTransaction(HeadraceError):
    """A projection's handler has ended the database transaction, which belongs to the projection; remove the commit."""

    code = "handler_ended_transaction"


class InvalidContentQuery(InvalidArgument):
    """The content query cannot be used: it is malformed, too large, or asks for what it may not."""

    code = "invalid_content_query"


class ContentSupportMissing(HeadraceError):
    """Content queries need packages that are not installed here: run `pip install 'headrace[content]'`."""

    code = "content_support_missing"


class TopicIsView(HeadraceError):
    """The topic is a virtual topic (view), which stores nothing itself: use its source topic."""

    code = "topic_is_view"


class TopicHasViews(HeadraceError):
    """Virtual topics (views) read from the topic; delete them first."""

    code = "topic_has_views"


class RouteNotFound(HeadraceError, LookupError):
    """There is no route of that name."""

    code = "route_not_found"


class RouteExists(HeadraceError):
    """There is already a route of that name."""

    code = "route_exists"


class WebhookNotFound(HeadraceError, LookupError):
    """There is no webhook of that name."""

    code = "webhook_not_found"


class WebhookExists(HeadraceError):
    """There is already a webhook of that name."""

    code = "webhook_exists"


class RouteLoop(InvalidArgument):
    """The route would carry messages back to where they come from."""

    code = "route_loop"


class PluginUnavailable(HeadraceError):
    """A plug-in that is asked for is not installed or cannot be used; the text says why, and what to do."""

    code = "plugin_unavailable"


class DeliveryRefused(HeadraceError):
    """The receiver of a sink did not take a message."""

    code = "delivery_refused"
    retryable = True

    def __init__(self, text: str | None = None, *, retryable: bool = True, **details: Any) -> None:
        super().__init__(text, retryable=retryable, **details)
        self.__dict__["retryable"] = retryable


class DeliveryFailed(HeadraceError):
    """A request to a receiver got no answer."""

    code = "delivery_failed"
    retryable = True

    def __init__(self, text: str | None = None, *, retryable: bool = True, **details: Any) -> None:
        super().__init__(text, retryable=retryable, **details)
        self.__dict__["retryable"] = retryable


class AddressRefused(HeadraceError):
    """The broker does not connect to this address, which is not of the public internet."""

    code = "address_refused"


class JobFailed(HeadraceError):
    """The job failed for good: it was rejected, it expired, or it was delivered as often as it may be."""

    code = "job_failed"

    def __init__(
        self,
        text: str | None = None,
        *,
        error_code: str = "error",
        retryable: bool = False,
        error_details: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        details = {"error_code": error_code, "retryable": retryable, "error_details": error_details or {}}
        super().__init__(text, **details, **more)
        self.__dict__.update(details)

    error_code: str
    """Why: `job_rejected`, `deliveries_exhausted`, `lease_expired`, `message_expired`, or the code of another error."""
    error_details: dict[str, Any]
    """Topic, partition, offset, subscription and deliveries of the job."""


def error_of(code: str, text: str, retryable: bool, details: dict[str, Any] | None = None) -> HeadraceError:
    """The error with this code, as another process told it; a plain HeadraceError of an unknown code keeps its code."""
    kind = _BY_CODE.get(code, HeadraceError)
    error = restored_error(kind, (text,))
    HeadraceError.__init__(error, text, **(details or {}))
    error.__dict__.update(details or {})
    if kind is HeadraceError:
        error.__dict__.update(code=code, retryable=retryable)
    return error


def _tree(kind: type[HeadraceError]) -> list[type[HeadraceError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in _tree(child))]


_BY_CODE = {kind.code: kind for kind in _tree(HeadraceError)}
