"""Headrace: a messaging platform in Python in which every topic is a durable log."""

import importlib
import os
from typing import TYPE_CHECKING, Any

from headrace import errors
from headrace.embedded.cursor import Cursor
from headrace.embedded.log import Log
from headrace.embedded.repair import repair
from headrace.model.batch import Batch
from headrace.model.durability import Durability
from headrace.model.errors import HeadraceError
from headrace.model.message import Message

if TYPE_CHECKING:
    from headrace.client._async.admin.audit import AsyncAudit
    from headrace.client._async.admin.auth import AsyncAuth
    from headrace.client._async.admin.cluster import AsyncClusterAdmin
    from headrace.client._async.admin.events import AsyncEventFeed
    from headrace.client._async.admin.log_levels import AsyncLogLevelAdmin
    from headrace.client._async.admin.routes import AsyncRoutes
    from headrace.client._async.admin.services import AsyncServices
    from headrace.client._async.admin.tenants import AsyncTenants
    from headrace.client._async.admin.webhooks import AsyncWebhooks
    from headrace.client._async.app.app import AsyncApp
    from headrace.client._async.app.task import AsyncAppTask
    from headrace.client._async.bus import AsyncBus
    from headrace.client._async.consumer.subscription import AsyncSubscription
    from headrace.client._async.leasing.jobs import AsyncJobs
    from headrace.client._async.leasing.queue import AsyncQueue
    from headrace.client._async.leasing.scheduled import AsyncScheduled
    from headrace.client._async.producer.producer import AsyncProducer
    from headrace.client._async.producer.sent import AsyncSent, AsyncSentMany
    from headrace.client._async.producer.transaction import AsyncTransaction
    from headrace.client._async.projection.projection import AsyncProjection
    from headrace.client._async.projection.repository import AsyncRepository
    from headrace.client._async.results.job_handle import AsyncJobHandle
    from headrace.client._async.subjects.live_subscription import AsyncLiveSubscription
    from headrace.client._async.subjects.subjects import AsyncSubjects
    from headrace.client._sync.admin.audit import Audit
    from headrace.client._sync.admin.auth import Auth
    from headrace.client._sync.admin.cluster import ClusterAdmin
    from headrace.client._sync.admin.events import EventFeed
    from headrace.client._sync.admin.log_levels import LogLevelAdmin
    from headrace.client._sync.admin.routes import Routes
    from headrace.client._sync.admin.services import Services
    from headrace.client._sync.admin.tenants import Tenants
    from headrace.client._sync.admin.webhooks import Webhooks
    from headrace.client._sync.app.app import App
    from headrace.client._sync.app.task import AppTask
    from headrace.client._sync.bus import Bus
    from headrace.client._sync.consumer.subscription import Subscription
    from headrace.client._sync.leasing.jobs import Jobs
    from headrace.client._sync.leasing.queue import Queue
    from headrace.client._sync.leasing.scheduled import Scheduled
    from headrace.client._sync.producer.producer import Producer
    from headrace.client._sync.producer.sent import Sent, SentMany
    from headrace.client._sync.producer.transaction import Transaction
    from headrace.client._sync.projection.projection import Projection
    from headrace.client._sync.projection.repository import Repository
    from headrace.client._sync.results.job_handle import JobHandle
    from headrace.client._sync.subjects.live_subscription import LiveSubscription
    from headrace.client._sync.subjects.subjects import Subjects
    from headrace.client.app.handler_results import Reject, Retry
    from headrace.client.connection.clock import Clock
    from headrace.client.connection.tls_options import GivenPath
    from headrace.client.leasing.jobs import Job, PendingMessage
    from headrace.client.producer.pending_batch import OutgoingMessage
    from headrace.client.producer.producer_errors import Undelivered
    from headrace.client.producer.serializing import CannotDeserialize, CannotSerialize
    from headrace.client.projection.aggregate import Aggregate
    from headrace.client.projection.postgres_store import PostgresStore
    from headrace.client.projection.sqlite_store import SqliteStore
    from headrace.client.results import DamagedRange, Receipt, Received, ReceivedBatch
    from headrace.client.subjects.messages import IncomingRequest, Reply, SubjectMessage
    from headrace.model.bus_event import BusEvent
    from headrace.model.cluster_requests import ClusterStatus, ClusterUpgraded, NodeStatus, ShardStatus
    from headrace.model.error_object import ErrorObject
    from headrace.model.leasing import EditOutcome, Forecasted, Refusal, SubscriptionInfo
    from headrace.model.log_level_requests import LogLevelRule
    from headrace.model.requests import BrokerInfo, GroupInfo, GroupSummary, TopicInfo
    from headrace.model.route_requests import RouteDefinition, RouteExplained, RouteInfo, RouteVerdict
    from headrace.model.schedule_requests import ScheduleDefinition, ScheduleInfo
    from headrace.model.security_requests import (
        AccessExplained,
        Binding,
        Grant,
        RoleInfo,
        SecurityInfo,
        SessionIdentity,
        TokenCreated,
        TokenInfo,
    )
    from headrace.model.service_requests import ErrorSummary, ServiceError, ServiceInfo, ServiceInstance
    from headrace.model.subject_requests import SubjectPublished, SwitchboardInfo
    from headrace.model.subscription import SubscriptionSettings
    from headrace.model.tenant import TenantQuotas, TenantUsage
    from headrace.model.tenant_requests import TenantInfo, TenantSummary, TenantUsageFound
    from headrace.model.topic import TopicSettings
    from headrace.model.webhook_requests import WebhookDefinition, WebhookDelivery, WebhookInfo

__version__ = "0.1.0"

__all__ = [
    "AccessExplained",
    "Aggregate",
    "App",
    "AppTask",
    "AsyncApp",
    "AsyncAppTask",
    "AsyncAudit",
    "AsyncAuth",
    "AsyncBus",
    "AsyncClusterAdmin",
    "AsyncEventFeed",
    "AsyncJobHandle",
    "AsyncJobs",
    "AsyncLiveSubscription",
    "AsyncLogLevelAdmin",
    "AsyncProducer",
    "AsyncProjection",
    "AsyncQueue",
    "AsyncRepository",
    "AsyncRoutes",
    "AsyncScheduled",
    "AsyncSent",
    "AsyncSentMany",
    "AsyncServices",
    "AsyncSubjects",
    "AsyncSubscription",
    "AsyncTenants",
    "AsyncTransaction",
    "AsyncWebhooks",
    "Audit",
    "Auth",
    "Batch",
    "Binding",
    "BrokerInfo",
    "Bus",
    "BusEvent",
    "CannotDeserialize",
    "CannotSerialize",
    "Clock",
    "ClusterAdmin",
    "ClusterStatus",
    "ClusterUpgraded",
    "Cursor",
    "DamagedRange",
    "Durability",
    "EditOutcome",
    "ErrorObject",
    "ErrorSummary",
    "EventFeed",
    "Forecasted",
    "Grant",
    "GroupInfo",
    "GroupSummary",
    "HeadraceError",
    "IncomingRequest",
    "Job",
    "JobHandle",
    "Jobs",
    "LiveSubscription",
    "Log",
    "LogLevelAdmin",
    "LogLevelRule",
    "Message",
    "NodeStatus",
    "OutgoingMessage",
    "PendingMessage",
    "PostgresStore",
    "Producer",
    "Projection",
    "Queue",
    "Receipt",
    "Received",
    "ReceivedBatch",
    "Refusal",
    "Reject",
    "Reply",
    "Repository",
    "Retry",
    "RoleInfo",
    "RouteDefinition",
    "RouteExplained",
    "RouteInfo",
    "RouteVerdict",
    "Routes",
    "ScheduleDefinition",
    "ScheduleInfo",
    "Scheduled",
    "SecurityInfo",
    "Sent",
    "SentMany",
    "ServiceError",
    "ServiceInfo",
    "ServiceInstance",
    "Services",
    "SessionIdentity",
    "ShardStatus",
    "SqliteStore",
    "SubjectMessage",
    "SubjectPublished",
    "Subjects",
    "Subscription",
    "SubscriptionInfo",
    "SubscriptionSettings",
    "SwitchboardInfo",
    "TenantInfo",
    "TenantQuotas",
    "TenantSummary",
    "TenantUsage",
    "TenantUsageFound",
    "Tenants",
    "TokenCreated",
    "TokenInfo",
    "TopicInfo",
    "TopicSettings",
    "Transaction",
    "Undelivered",
    "WebhookDefinition",
    "WebhookDelivery",
    "WebhookInfo",
    "Webhooks",
    "__version__",
    "connect",
    "connect_async",
    "errors",
    "open",
    "open_async",
    "repair",
]

# Where to find what is imported only when it is used: a program that only wants a log waits for nothing else.
_LATER = {
    "AccessExplained": "model.security_requests",
    "Binding": "model.security_requests",
    "Grant": "model.security_requests",
    "RoleInfo": "model.security_requests",
    "SecurityInfo": "model.security_requests",
    "SessionIdentity": "model.security_requests",
    "TokenCreated": "model.security_requests",
    "TokenInfo": "model.security_requests",
    "Audit": "client._sync.admin.audit",
    "Auth": "client._sync.admin.auth",
    "AsyncAudit": "client._async.admin.audit",
    "AsyncAuth": "client._async.admin.auth",
    "Aggregate": "client.projection.aggregate",
    "AsyncProjection": "client._async.projection.projection",
    "AsyncRepository": "client._async.projection.repository",
    "PostgresStore": "client.projection.postgres_store",
    "Projection": "client._sync.projection.projection",
    "Repository": "client._sync.projection.repository",
    "SqliteStore": "client.projection.sqlite_store",
    "AsyncEventFeed": "client._async.admin.events",
    "EventFeed": "client._sync.admin.events",
    "AsyncServices": "client._async.admin.services",
    "Services": "client._sync.admin.services",
    "AsyncLogLevelAdmin": "client._async.admin.log_levels",
    "LogLevelAdmin": "client._sync.admin.log_levels",
    "BusEvent": "model.bus_event",
    "ServiceInfo": "model.service_requests",
    "ServiceInstance": "model.service_requests",
    "ServiceError": "model.service_requests",
    "ErrorSummary": "model.service_requests",
    "LogLevelRule": "model.log_level_requests",
    "App": "client._sync.app.app",
    "AsyncApp": "client._async.app.app",
    "AsyncBus": "client._async.bus",
    "AsyncJobHandle": "client._async.results.job_handle",
    "AsyncJobs": "client._async.leasing.jobs",
    "AsyncProducer": "client._async.producer.producer",
    "AsyncQueue": "client._async.leasing.queue",
    "AsyncScheduled": "client._async.leasing.scheduled",
    "AsyncSent": "client._async.producer.sent",
    "AsyncSentMany": "client._async.producer.sent",
    "AsyncSubscription": "client._async.consumer.subscription",
    "AsyncAppTask": "client._async.app.task",
    "AsyncTransaction": "client._async.producer.transaction",
    "BrokerInfo": "model.requests",
    "Bus": "client._sync.bus",
    "CannotDeserialize": "client.producer.serializing",
    "CannotSerialize": "client.producer.serializing",
    "Clock": "client.connection.clock",
    "ScheduleInfo": "model.schedule_requests",
    "DamagedRange": "client.results",
    "Forecasted": "model.leasing",
    "GroupInfo": "model.requests",
    "GroupSummary": "model.requests",
    "Job": "client.leasing.jobs",
    "JobHandle": "client._sync.results.job_handle",
    "Jobs": "client._sync.leasing.jobs",
    "EditOutcome": "model.leasing",
    "OutgoingMessage": "client.producer.pending_batch",
    "PendingMessage": "client.leasing.jobs",
    "Producer": "client._sync.producer.producer",
    "Queue": "client._sync.leasing.queue",
    "Receipt": "client.results",
    "Received": "client.results",
    "ReceivedBatch": "client.results",
    "ScheduleDefinition": "model.schedule_requests",
    "Refusal": "model.leasing",
    "Reject": "client.app.handler_results",
    "Retry": "client.app.handler_results",
    "Scheduled": "client._sync.leasing.scheduled",
    "Sent": "client._sync.producer.sent",
    "SentMany": "client._sync.producer.sent",
    "Subscription": "client._sync.consumer.subscription",
    "SubscriptionInfo": "model.leasing",
    "SubscriptionSettings": "model.subscription",
    "AppTask": "client._sync.app.task",
    "TopicInfo": "model.requests",
    "TopicSettings": "model.topic",
    "Transaction": "client._sync.producer.transaction",
    "Undelivered": "client.producer.producer_errors",
    "AsyncClusterAdmin": "client._async.admin.cluster",
    "ClusterAdmin": "client._sync.admin.cluster",
    "ClusterStatus": "model.cluster_requests",
    "ClusterUpgraded": "model.cluster_requests",
    "NodeStatus": "model.cluster_requests",
    "ShardStatus": "model.cluster_requests",
    "AsyncTenants": "client._async.admin.tenants",
    "TenantInfo": "model.tenant_requests",
    "TenantQuotas": "model.tenant",
    "TenantSummary": "model.tenant_requests",
    "TenantUsage": "model.tenant",
    "TenantUsageFound": "model.tenant_requests",
    "Tenants": "client._sync.admin.tenants",
    "AsyncRoutes": "client._async.admin.routes",
    "AsyncWebhooks": "client._async.admin.webhooks",
    "WebhookDefinition": "model.webhook_requests",
    "WebhookDelivery": "model.webhook_requests",
    "WebhookInfo": "model.webhook_requests",
    "Webhooks": "client._sync.admin.webhooks",
    "RouteDefinition": "model.route_requests",
    "RouteExplained": "model.route_requests",
    "RouteInfo": "model.route_requests",
    "RouteVerdict": "model.route_requests",
    "Routes": "client._sync.admin.routes",
    "AsyncLiveSubscription": "client._async.subjects.live_subscription",
    "AsyncSubjects": "client._async.subjects.subjects",
    "ErrorObject": "model.error_object",
    "IncomingRequest": "client.subjects.messages",
    "LiveSubscription": "client._sync.subjects.live_subscription",
    "Reply": "client.subjects.messages",
    "SubjectMessage": "client.subjects.messages",
    "SubjectPublished": "model.subject_requests",
    "Subjects": "client._sync.subjects.subjects",
    "SwitchboardInfo": "model.subject_requests",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"headrace.{_LATER[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


def connect(
    address: str | None = None,
    *,
    name: str = "",
    timeout: float = 30.0,
    wait: float = 0.0,
    tenant: str = "",
    ca: "GivenPath" = None,
    certificate: "GivenPath" = None,
    key: "GivenPath" = None,
    server_name: str | None = None,
    token: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
) -> "Bus":
    """Connect to a broker.

    Parameters:
        address: `headrace://host:port`, `headraces://host:port` for TLS, or `headrace+unix:///path/to/headrace.sock`,
            optionally with `?tenant=NAME`; by default $HEADRACE_URL, or else `headrace://127.0.0.1:7390`. Of a cluster,
            the hosts of some or all nodes: `headrace://a:7390,b:7390,c:7390`.
        name: the name of this client in the broker's lists and logs; by default host, process and a number.
        timeout: how many seconds a request may take, including reconnecting and retries.
        wait: for how many seconds to retry if the broker cannot be reached yet. While no node of a cluster serves,
            0 means `timeout`.
        tenant: the tenant whose topics, groups and schedules the names mean; by default the address's, or `default`.
        ca: for TLS, the file of the CAs to trust; by default $HEADRACE_CA, or else the system's CAs.
        certificate: for TLS, the file of this client's certificate; by default $HEADRACE_CERTIFICATE, or else none.
        key: the file of its private key; by default $HEADRACE_KEY, or else the file of the certificate.
        server_name: for TLS, the name that the broker's certificate must have; by default the host of the address.
        token: the token to authenticate with; by default $HEADRACE_TOKEN. It is never in the address.
        token_file: the file that the token is read from, for every new connection; by default $HEADRACE_TOKEN_FILE.

    Returns:
        The bus; close it, or use `with`.

    Raises:
        ConnectionFailed: if the broker cannot be reached.
        TlsFailed: if the TLS handshake fails.
        NotAuthenticated: if the broker needs a token, or does not accept the one that is given.
        InvalidArgument: if the address or another argument is wrong.
        UnsupportedVersion: if client and broker have no version of the protocol in common.

    Example:
        >>> with headrace.connect("headrace://127.0.0.1:7390") as bus:  # doctest: +SKIP
        ...     receipt = bus.publish("orders", b"3 apples")
    """
    from headrace.client._sync.connecting import connect as connect_bus

    return connect_bus(
        address,
        name=name,
        timeout=timeout,
        wait=wait,
        tenant=tenant,
        ca=ca,
        certificate=certificate,
        key=key,
        server_name=server_name,
        token=token,
        token_file=token_file,
    )


async def connect_async(
    address: str | None = None,
    *,
    name: str = "",
    timeout: float = 30.0,
    wait: float = 0.0,
    tenant: str = "",
    ca: "GivenPath" = None,
    certificate: "GivenPath" = None,
    key: "GivenPath" = None,
    server_name: str | None = None,
    token: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
) -> "AsyncBus":
    """Connect to a broker, for asyncio; all as in `connect`."""
    from headrace.client._async.connecting import connect_async as connect_bus

    return await connect_bus(
        address,
        name=name,
        timeout=timeout,
        wait=wait,
        tenant=tenant,
        ca=ca,
        certificate=certificate,
        key=key,
        server_name=server_name,
        token=token,
        token_file=token_file,
    )


def open(
    path: str | os.PathLike[str], *, name: str = "", timeout: float = 30.0, tenant: str = "", **settings: Any
) -> "Bus":
    """Run a broker in this process, with its data in a directory; closing the bus stops it.

    Parameters:
        path: the directory, created if it does not exist; or `:memory:`, where nothing outlives the bus.
        name: the name of this client in the broker's lists and logs; by default host, process and a number.
        timeout: how many seconds a request may take.
        tenant: the tenant whose topics, groups and schedules the names mean; by default `default`.
        settings: settings of the broker, by the names that `headrace serve --print-config` shows. With `store` and
            `cluster` the broker is a node of a cluster, and its data are replicated to the shared store.

    Returns:
        The bus; close it, or use `with`.

    Raises:
        LogInUse: if another process has the directory open, or serves the cluster.
        NotADataDirectory: if the directory has other files in it.
        DataDirectoryDamaged: if its journal is missing or damaged.
        InvalidArgument: if a setting is wrong.

    Example:
        >>> with headrace.open(":memory:") as bus:
        ...     bus.publish("orders", b"3 apples").offset
        0
    """
    from headrace.client._sync.connecting import attach
    from headrace.model.arguments import check_path
    from headrace.server import EmbeddedServer

    check_path(path, "a broker's data")
    server = EmbeddedServer(path, **settings)
    try:
        return attach(server, server.close, name=name, timeout=timeout, tenant=tenant)
    except BaseException:
        server.close()
        raise


async def open_async(
    path: str | os.PathLike[str], *, name: str = "", timeout: float = 30.0, tenant: str = "", **settings: Any
) -> "AsyncBus":
    """Open a broker in this process, for asyncio; all as in `open`."""
    import asyncio

    from headrace.client._async.connecting import attach_async
    from headrace.model.arguments import check_path
    from headrace.server import EmbeddedServer

    check_path(path, "a broker's data")
    # Opening and closing wait for the disk, and must not keep the loop waiting with them.
    opening = asyncio.ensure_future(asyncio.to_thread(EmbeddedServer, path, **settings))
    try:
        server = await asyncio.shield(opening)
    except asyncio.CancelledError:
        await asyncio.wait([opening])  # a thread cannot be interrupted: what it opens is closed again
        if opening.exception() is None:
            await asyncio.to_thread(opening.result().close)
        raise
    try:
        return await attach_async(server, server.close, name=name, timeout=timeout, tenant=tenant)
    except BaseException:
        await asyncio.to_thread(server.close)
        raise
