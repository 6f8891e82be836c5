"""Routes of a bus: adds, lists, explains and removes them."""

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.client._sync.connection.reconnecting import ReconnectingConnection
from headrace.client.routes import given_query
from headrace.model.errors import InvalidArgument
from headrace.model.headers import GivenHeaders, checked_headers
from headrace.model.route_requests import (
    SUBJECT_HEADER,
    RouteDefinition,
    RouteExplain,
    RouteExplained,
    RouteInfo,
    RouteList,
    RouteRemove,
    RouteSet,
)

RouteInfos = list[RouteInfo]


class Routes:
    """Carries messages from topics to other topics by key, pattern, header or content. It is `bus.routes`.

    A route is a durable definition. Each message that is published to its source is stored there, and then in all
    topics that the routes which it takes name: in order, each message exactly once, also across a crash of the broker.

    Example:
        >>> info = bus.routes.add("paid", source="orders", pattern="*.paid", to=["billing", "shipping"])
        >>> receipt = bus.publish("orders", b"3 apples", key="eu.paid")
        >>> (bus.routes.explain(source="orders", key="eu.paid")).targets
        ['billing', 'shipping']
    """

    def __init__(self, bus: object, broker: ReconnectingConnection) -> None:
        self._bus = bus  # it closes its connections when nobody holds it
        self._broker = broker

    def add(
        self,
        name: str,
        *,
        to: str | Sequence[str],
        source: str | None = None,
        key: str | None = None,
        pattern: str | None = None,
        all: bool = False,
        headers: Mapping[str, str | bytes | None] | None = None,
        headers_match: str = "all",
        content: Mapping[str, Any] | None = None,
        unmatched: bool = False,
        error_topic: str | None = None,
        replace: bool = False,
        exist_ok: bool = False,
    ) -> RouteInfo:
        """Add a route, which applies to messages that are published from now on.

        Give exactly one condition: `key`, `pattern`, `all`, `headers`, `content` or `unmatched`. The subject of a
        message is its header `headrace-subject`, or else its key.

        Parameters:
            name: the route's name.
            to: the topics that messages go to, which the broker creates if it permits that (`auto_create_topics`).
            source: the topic that messages come from; by default the ingress, which has messages that were published
                without a topic, or to a subject that a route takes.
            key: take messages with this subject.
            pattern: take messages whose subject matches: `*` stands for one token, `#` for any number of tokens, and
                `>` at the end for one or more.
            all: take every message.
            headers: take messages with these headers; None stands for any value.
            headers_match: whether `all` of the headers are needed, or `any` of them is enough.
            content: take messages whose value a query selects: `{"jsonpath": "$.items[?@.price > 10]"}`,
                `{"regex": "^ERROR"}`, `{"partial": {"country": "CH"}}` or `{"exact": 17}`.
            unmatched: take messages that no other route of the source takes.
            error_topic: where messages go that cannot be decided about or delivered; by default the source's name and
                `.errors`.
            replace: replace the route of that name, if there is one.
            exist_ok: accept a route of that name that says the same.

        Returns:
            The route.

        Raises:
            InvalidArgument: if an argument is wrong, or there is not exactly one condition.
            InvalidContentQuery: if the query cannot be used.
            RouteLoop: if messages could come back to the source.
            RouteExists: if there is a route of that name.
            TopicNotFound: if a topic does not exist and the broker does not create topics.
            LimitExceeded: if there are as many routes as there may be.

        Example:
            >>> info = bus.routes.add("big", source="orders", content={"jsonpath": "$[?@ > 100]"}, to="audit")
            >>> info.definition.error_topic
            'orders.errors'
        """
        checked = checked_headers(headers)
        definition = RouteDefinition(
            name,
            [to] if isinstance(to, str) else list(to),
            source or "",
            key,
            pattern,
            all,
            None if headers is None else dict(checked or {}),
            headers_match,
            None if content is None else given_query(content),
            unmatched,
            error_topic or "",
        )
        return self._broker.request(RouteSet(definition, replace, exist_ok), repeat=replace or exist_ok)

    def list(self, topic: str | None = None) -> RouteInfos:
        """List routes by name.

        `behind` counts the messages of the source that are not yet in all their targets, synced there; `error` tells
        why, if a target takes none at the moment.

        Parameters:
            topic: only routes from this topic or to it; by default all.

        Returns:
            The routes.

        Raises:
            Timeout: if the broker does not answer in time.

        Example:
            >>> info = bus.routes.add("copy", source="orders", all=True, to="archive")
            >>> [info.definition.name for info in bus.routes.list("archive")]
            ['copy']
        """
        return (self._broker.request(RouteList(topic or ""))).routes

    def explain(
        self,
        *,
        source: str | None = None,
        value: bytes | None = b"",
        key: bytes | str | None = None,
        subject: str | None = None,
        headers: GivenHeaders | None = None,
    ) -> RouteExplained:
        """Tell which routes a message would take, and why; publishes nothing.

        Routes see what consumers of the source see. So the message is judged as it is after the middleware of the
        source, which is not applied to it here.

        Parameters:
            source: the topic that it would be published to; by default the ingress.
            value: the message's value.
            key: the message's key.
            subject: the message's subject, the header `headrace-subject`.
            headers: the message's headers.

        Returns:
            What each route of the topic does with the message, and the topics that it would be stored in.

        Raises:
            TopicNotFound: if there is no such topic.

        Example:
            >>> info = bus.routes.add("eu", key="orders.eu", to="europe")
            >>> (bus.routes.explain(subject="orders.us")).routes[0].reason
            "its header headrace-subject 'orders.us' is not orders.eu"
        """
        given = dict(checked_headers(headers) or {})
        if subject is not None:
            if SUBJECT_HEADER in given:
                raise InvalidArgument(f"give the subject or the header {SUBJECT_HEADER}, not both")
            given[SUBJECT_HEADER] = subject.encode()
        raw_key = key.encode() if isinstance(key, str) else key
        return self._broker.request(RouteExplain(source or "", value, raw_key, given))

    def remove(self, name: str) -> None:
        """Remove a route. Messages that were published before are still forwarded, and nothing is removed from topics.

        Parameters:
            name: the route's name.

        Raises:
            RouteNotFound: if there is no such route.

        Example:
            >>> info = bus.routes.add("copy", source="orders", all=True, to="archive")
            >>> bus.routes.remove("copy")
        """
        self._broker.request(RouteRemove(name), repeat=False)
