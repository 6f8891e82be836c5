"""The built-in roles. They cannot be changed; a role of one's own with other grants takes another name."""

from typing import NamedTuple

from headrace.model.job_requests import RESULTS_TOPIC
from headrace.model.request import Resource
from headrace.model.security_requests import ANY, Grant
from headrace.model.system_topics import ARCHIVE_TOPIC, AUDIT_TOPIC, ERRORS_TOPIC, EVENTS_TOPIC, INGRESS_TOPIC

ADMINISTRATOR = "administrator"
_EVERY_NAME = [ANY, "headrace.*", "$*"]
_CLIENTS_TOPICS = [ANY, INGRESS_TOPIC]
_SHARED_RESOURCES = (Resource.BROKER, Resource.SECURITY, Resource.CLUSTER)
_TENANTS_RESOURCES = tuple(one.value for one in Resource if one not in _SHARED_RESOURCES)
"""Kinds of resources that belong to a tenant: all but the broker, the security definitions and the cluster."""
_STRUCTURE_VERBS = ["describe", "create", "alter", "delete", "route", "schedule"]
_MESSAGE_VERBS = ["publish", "consume", "lease", "edit-own", "edit-any", "serve", "request"]


class BuiltInRole(NamedTuple):
    """A role that every broker has."""

    description: str
    grants: tuple[Grant, ...]


BUILT_IN_ROLES: dict[str, BuiltInRole] = {
    ADMINISTRATOR: BuiltInRole(
        "Everything; bound in all tenants, also roles, bindings, tokens and tenants.",
        (Grant([ANY], ANY, _EVERY_NAME),),
    ),
    "operator": BuiltInRole(
        "Creates, alters and deletes topics and whatever belongs to them, and sees events and errors; reads and "
        "publishes no messages.",
        (
            *(Grant(_STRUCTURE_VERBS, one, [ANY]) for one in _TENANTS_RESOURCES),
            Grant(["describe", "administer"], "broker", [ANY]),
            Grant(["describe", "administer"], "cluster", [ANY]),
            Grant(["consume"], "topic", [EVENTS_TOPIC, ERRORS_TOPIC]),
            Grant(["consume"], "subject", ["$events.*"]),
        ),
    ),
    "developer": BuiltInRole(
        "All that applications do, and creating, altering and deleting what they need; administers nothing.",
        (
            *(Grant(_STRUCTURE_VERBS + _MESSAGE_VERBS, one, _CLIENTS_TOPICS) for one in _TENANTS_RESOURCES),
            Grant(["describe"], "broker", [ANY]),
            Grant(["consume"], "topic", [EVENTS_TOPIC, ERRORS_TOPIC, RESULTS_TOPIC, ARCHIVE_TOPIC]),
            Grant(["consume"], "subject", ["$events.*"]),
        ),
    ),
    "publisher": BuiltInRole(
        "Publishes to topics that exist and to subjects, in transactions too; edits messages that it owns, sends "
        "requests, and reads results of jobs.",
        (
            Grant(["publish", "edit-own"], "topic", _CLIENTS_TOPICS),
            Grant(["consume"], "topic", [RESULTS_TOPIC]),
            Grant(["publish"], "transaction", [ANY]),
            Grant(["publish", "request"], "subject", [ANY]),
        ),
    ),
    "consumer": BuiltInRole(
        "Reads topics, with what is archived of them, and subjects, as a member of groups or alone.",
        (
            Grant(["consume"], "topic", [ANY, ARCHIVE_TOPIC]),
            Grant(["consume"], "group", [ANY]),
            Grant(["consume"], "subject", [ANY]),
        ),
    ),
    "worker": BuiltInRole(
        "Leases messages of subscriptions that exist and settles them, and reports errors as a service.",
        (
            Grant(["describe"], "topic", [ANY]),
            Grant(["lease"], "subscription", [ANY]),
            Grant(["serve"], "service", [ANY]),
        ),
    ),
    "service": BuiltInRole(
        "Registers as a service, answers requests and sends them, publishes to subjects and reads them.",
        (
            Grant(["serve"], "service", [ANY]),
            Grant(["serve", "request", "publish", "consume"], "subject", [ANY]),
        ),
    ),
    "observer": BuiltInRole(
        "Sees what there is, events and errors; reads no messages of applications, and changes nothing.",
        (
            Grant(["describe"], ANY, _EVERY_NAME),
            Grant(["consume"], "topic", [EVENTS_TOPIC, ERRORS_TOPIC]),
            Grant(["consume"], "subject", ["$events.*"]),
        ),
    ),
    "auditor": BuiltInRole(
        "Reads the audit trail and sees what there is; reads no messages of applications, and changes nothing.",
        (
            Grant(["describe"], ANY, _EVERY_NAME),
            Grant(["consume"], "topic", [AUDIT_TOPIC]),
        ),
    ),
    "node": BuiltInRole(
        "Follows the shards of the cluster as one of its nodes, and sees its state; reads and changes nothing else.",
        (Grant(["describe", "follow"], "cluster", [ANY]),),
    ),
}
"""By name."""
