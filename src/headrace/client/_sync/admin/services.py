"""Services of the bus: registers this program as one, and finds others."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.client._sync.admin.service_registrations import ServiceRegistrations
from headrace.client.times import check_name, checked_seconds
from headrace.model.arguments import shown
from headrace.model.errors import InvalidArgument
from headrace.model.limits import SERVICE_TTL_MS_MAX, SERVICE_TTL_MS_MIN
from headrace.model.service_requests import (
    ErrorList,
    ErrorReport,
    ErrorSummary,
    ServiceDefinition,
    ServiceDescribe,
    ServiceError,
    ServiceInfo,
    ServiceList,
    ServicePolicyAlter,
    ServiceRegister,
)

ServiceInfos = list[ServiceInfo]
ErrorSummaries = list[ErrorSummary]


class Services:
    """Registers this program as a service, and finds others; `bus.services`.

    The bus keeps a registered service alive, registers it again after a reconnect, and deregisters it when it is
    closed.

    Example:
        >>> instance = bus.services.register("billing", version="1.2", consumes=["orders"])
        >>> [info.name for info in bus.services.find(consumes="orders")]
        ['billing']
    """

    def __init__(self, bus: object, registrations: ServiceRegistrations) -> None:
        self._bus = bus  # it closes its connections when nobody holds it
        self._registrations = registrations
        self._broker = registrations.broker

    def register(
        self,
        name: str,
        *,
        version: str = "",
        instance: str | None = None,
        metadata: Mapping[str, str] | None = None,
        produces: Sequence[str] = (),
        consumes: Sequence[str] = (),
        serves: Sequence[str] = (),
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        ttl: float = 30.0,
    ) -> str:
        """Register this program as an instance of a service.

        Parameters:
            name: the service's name.
            version: its version.
            instance: tells this instance from others of the service; by default a random one. Registering the same
                instance again replaces what it said of itself.
            metadata: anything that others may want to know.
            produces: topics that it publishes to.
            consumes: topics that it reads.
            serves: subjects on which it answers requests.
            schemas: JSON Schemas of messages, by topic or subject.
            ttl: for how many seconds the broker keeps the instance without a sign of life.

        Returns:
            The instance.

        Raises:
            InvalidArgument: if a name is wrong, or all of it together is too large.
            LimitExceeded: if the broker has as many instances as it may have.
            Timeout: if the broker does not answer in time.

        Example:
            >>> bus.services.register("billing", instance="a", metadata={"region": "eu"})
            'a'
        """
        check_name(name, "a service")
        definition = ServiceDefinition(
            name,
            uuid.uuid4().hex[:16] if instance is None else instance,
            version,
            dict(metadata or {}),
            _checked_names(produces, "produces"),
            _checked_names(consumes, "consumes"),
            _checked_names(serves, "serves"),
            {topic: _checked_schema(topic, schema) for topic, schema in (schemas or {}).items()},
        )
        checked_seconds(ttl, "ttl", SERVICE_TTL_MS_MIN / 1000, SERVICE_TTL_MS_MAX / 1000)
        request = ServiceRegister(definition, round(ttl * 1000))
        self._registrations.add(request)
        return definition.instance

    def deregister(self, name: str) -> None:
        """Tell the broker that this program is no instance of a service any more; without effect if it is none.

        Parameters:
            name: the service's name.

        Raises:
            Timeout: if the broker does not answer in time.

        Example:
            >>> instance = bus.services.register("billing")
            >>> bus.services.deregister("billing")
            >>> bus.services.list()
            []
        """
        self._registrations.remove(name)

    def list(self) -> ServiceInfos:
        """List the services that are registered, by name.

        Returns:
            The services, as from `find`.

        Raises:
            Timeout: if the broker does not answer in time.

        Example:
            >>> instance = bus.services.register("billing")
            >>> [(info.name, len(info.instances)) for info in bus.services.list()]
            [('billing', 1)]
        """
        return self.find()

    def find(self, name: str = "", *, produces: str = "", consumes: str = "", serves: str = "") -> ServiceInfos:
        """Find services by what they do; those that match all that is given.

        Parameters:
            name: the service's name.
            produces: a topic that it publishes to.
            consumes: a topic that it reads.
            serves: a subject on which it answers requests.

        Returns:
            The services, by name, without their schemas and metadata, and with up to 100 instances each:
            `instances_total` says how many there are, and `describe` all of a service.

        Raises:
            Timeout: if the broker does not answer in time.

        Example:
            >>> instance = bus.services.register("shop", produces=["orders"])
            >>> [info.name for info in bus.services.find(produces="orders")]
            ['shop']
        """
        found: ServiceInfos = []
        after: str | None = ""
        while after is not None:
            answer = self._broker.request(ServiceList(name, produces, consumes, serves, after))
            found += answer.services
            after = answer.next or None
        return found

    def describe(self, name: str) -> ServiceInfo:
        """Describe a service: its instances, topics, subjects and schemas.

        Parameters:
            name: the service's name.

        Returns:
            The service; `truncated` if it has more than fits into an answer.

        Raises:
            ServiceNotFound: if no instance of it is registered.
            Timeout: if the broker does not answer in time.

        Example:
            >>> schema = {"type": "object"}
            >>> instance = bus.services.register("shop", produces=["orders"], schemas={"orders": schema})
            >>> (bus.services.describe("shop")).schemas
            {'orders': {'type': 'object'}}
        """
        return self._broker.request(ServiceDescribe(name))

    def report(self, service: str, errors: Sequence[ServiceError], *, instance: str = "") -> None:
        """Report failures of a service; the broker counts them and stores them in the topic `headrace.errors`.

        An app with a `service` reports the failures of its handlers by itself.

        Parameters:
            service: the service's name.
            errors: up to 100 errors.
            instance: the instance that failed; by default the one that this program has registered.

        Raises:
            InvalidArgument: if there are too many, or one of them is too large.
            Timeout: if the broker does not answer in time.

        Example:
            >>> error = headrace.ServiceError(code="no_stock", message="there are no apples")
            >>> bus.services.report("shop", [error])
        """
        instance = instance or self._registrations.instance(service)
        self._broker.request(ErrorReport(service, instance, [*errors]), repeat=False)

    def errors(self, service: str = "", *, last: int = 10) -> ErrorSummaries:
        """Count the errors of services since the broker was started, and return the newest.

        The broker keeps excerpts of the newest errors, as far as memory for them reaches, and counts at most 500
        services of a tenant apart, the rest as `others`. The topic `headrace.errors` has all of every error.

        Parameters:
            service: the service's name; by default all services.
            last: how many of the newest errors of each service to return, up to 50.

        Returns:
            The errors by service.

        Raises:
            Timeout: if the broker does not answer in time.

        Example:
            >>> error = headrace.ServiceError(code="no_stock", message="there are no apples")
            >>> bus.services.report("shop", [error])
            >>> [(one.service, one.codes) for one in bus.services.errors()]
            [('shop', {'no_stock': 1})]
        """
        answer = self._broker.request(ErrorList(service, last))
        return answer.services

    def require_registration(self, required: bool) -> None:
        """Set whether only registered services may use the bus in this tenant; the broker remembers it.

        Everybody may still look at the bus and register. On the broker's machine it can be administered, too.

        Parameters:
            required: whether they must be registered.

        Raises:
            Timeout: if the broker does not answer in time.

        Example:
            >>> bus.services.require_registration(False)
        """
        self._broker.request(ServicePolicyAlter(required))

    def is_registration_required(self) -> bool:
        """Return whether only registered services may use the bus in this tenant.

        Returns:
            Whether they must be registered.

        Raises:
            Timeout: if the broker does not answer in time.

        Example:
            >>> bus.services.is_registration_required()
            False
        """
        answer = self._broker.request(ServiceList("-"))
        return answer.require_registration


def _checked_schema(topic: str, schema: object) -> dict[str, Any]:
    if not isinstance(schema, Mapping):
        raise InvalidArgument(
            f"the schema of {topic} is a JSON object, such as {{'type': 'object'}}, not {shown(schema)}"
        )
    return dict(schema)


def _checked_names(names: Sequence[str], what: str) -> list[str]:
    if isinstance(names, str):
        raise InvalidArgument(f"{what} are several names, such as [{names!r}], not {names!r}")
    return [*names]
