"""The facts about webhooks, and the state that they add up to."""

from collections.abc import Iterator

from headrace.broker.fact import Fact
from headrace.model.webhook_requests import WebhookDefinition


class WebhookStored(Fact, tag=130):
    """A webhook was made, or its definition or its secrets were changed."""

    definition: WebhookDefinition
    topic_id: int
    subscription_id: int
    created_us: int
    secrets: list[str]
    state: str = "active"
    reason: str = ""

    def __repr__(self) -> str:
        return f"WebhookStored({self.definition!r}, state={self.state!r})"


class WebhookDeleted(Fact, tag=131):
    """A webhook was deleted."""

    name: str


class WebhookStateSet(Fact, tag=132):
    """A webhook was paused, disabled or resumed."""

    name: str
    state: str
    reason: str


WebhookFact = WebhookStored | WebhookDeleted | WebhookStateSet


class WebhooksState:
    """All webhooks, as far as the journal's facts reach."""

    def __init__(self) -> None:
        self.by_name: dict[str, WebhookStored] = {}

    def apply(self, fact: WebhookFact) -> None:
        """Apply a fact."""
        match fact:
            case WebhookStored():
                self.by_name[fact.definition.name] = fact
            case WebhookDeleted():
                self.by_name.pop(fact.name, None)
            case WebhookStateSet():
                known = self.by_name.get(fact.name)
                if known is not None:
                    self.by_name[fact.name] = WebhookStored(
                        known.definition,
                        known.topic_id,
                        known.subscription_id,
                        known.created_us,
                        known.secrets,
                        fact.state,
                        fact.reason,
                    )

    def facts(self) -> Iterator[Fact]:
        """The facts that tell all of it."""
        yield from self.by_name.values()

    def forget_topic(self, topic_id: int) -> None:
        """Forget the webhooks of a topic that was deleted."""
        for name in [name for name, fact in self.by_name.items() if fact.topic_id == topic_id]:
            del self.by_name[name]
