"""Makes the middleware of topics, and applies it to their partitions."""

from headrace.broker.active_partition import ActivePartition
from headrace.broker.delivery_middleware import DeliveryMiddleware
from headrace.broker.middleware_chain import MiddlewareChain, make_chain
from headrace.engines.api import DeliveredPartition, DerivedCache
from headrace.model.errors import InvalidArgument
from headrace.model.middleware import LoadMiddleware, MiddlewareContext, MiddlewareFactory
from headrace.model.topic import TopicName, TopicSettings


def load_nothing(name: str) -> MiddlewareFactory:
    """The loader of a broker without middleware."""
    raise InvalidArgument(f"this broker loads no middleware, and so not {name!r} either")


class TopicMiddleware:
    """Makes middleware of the settings of topics."""

    def __init__(self, load: LoadMiddleware, cache: DerivedCache) -> None:
        """The cache is for what was read of partitions whose deliveries are changed."""
        self._load = load
        self._cache = cache

    def make(self, settings: TopicSettings) -> MiddlewareChain | None:
        """The middleware that settings name; raises if it cannot be had."""
        if not settings.middleware:
            return None
        return make_chain(settings.middleware, self._load, round(settings.middleware_seconds * 1e6))

    def alter(
        self, chain: MiddlewareChain | None, before: TopicSettings, after: TopicSettings, *, anew: bool
    ) -> MiddlewareChain | None:
        """The middleware of other settings; the same object, which may have state, if that is not made `anew`."""
        unchanged = before.middleware == after.middleware and before.middleware_seconds == after.middleware_seconds
        if unchanged and not anew:
            return chain
        made = self.make(after)
        # An empty chain follows one that batches may still be on their way through: they keep their order.
        return MiddlewareChain() if made is None and chain is not None else made

    def apply(self, name: TopicName, chain: MiddlewareChain | None, active: ActivePartition) -> None:
        """Let a partition compress and deliver as the middleware says."""
        active.codec = None if chain is None else chain.codec
        if chain is None or (not chain.delivering and active.delivered is active.partition):
            return
        delivery = DeliveryMiddleware(chain.delivering, MiddlewareContext(name.topic, name.tenant, active.number, 0))
        if isinstance(active.delivered, DeliveredPartition):
            active.delivered.use(delivery)
        else:
            active.delivered = DeliveredPartition(active.partition, delivery, self._cache)
