"""A sender of webhooks that sends nothing, for tests of the broker alone."""

from headrace.broker.pending_answer import PendingAnswer
from headrace.broker.webhook_facts import WebhookStored
from headrace.model.webhook_requests import WebhookDefinition, WebhookDelivery, WebhookInfo


class SilentSender:
    """Notes what the broker tells it."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        """Names of webhooks, with their states."""

    def check(self, definition: WebhookDefinition) -> None:
        """Accept every webhook."""

    def changed(self, name: str, fact: WebhookStored | None) -> None:
        self.told.append((name, "deleted" if fact is None else fact.state))

    def describe(self, info: WebhookInfo) -> None:
        """Know nothing more."""

    def test(self, fact: WebhookStored) -> PendingAnswer[WebhookDelivery]:
        pending: PendingAnswer[WebhookDelivery] = PendingAnswer()
        pending.resolve(WebhookDelivery(0, f"ping_{fact.subscription_id}"))
        return pending

    def deliveries(self, name: str) -> list[WebhookDelivery]:
        return [WebhookDelivery(1, f"msg_{name}", error="no"), WebhookDelivery(0, f"msg_{name}")]
