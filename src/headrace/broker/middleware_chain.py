"""The middleware of a topic, in order: makes it of the topic's settings, and passes batches through it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.model.arguments import shortened
from headrace.model.batch import Batch, Columns
from headrace.model.batch_rewriting import (
    BatchRewriter,
    checked_columns,
    encode_like,
    encode_with_holes,
    joined_columns,
    recompressed,
)
from headrace.model.codec import Codec
from headrace.model.errors import HeadraceError, InvalidArgument, InvalidBatch, MessageRefused, MiddlewareFailed
from headrace.model.limits import BATCH_COUNT_MAX, INLINE_BYTES_MAX, INLINE_COUNT_MAX
from headrace.model.middleware import API, COLUMNS, LoadMiddleware, MiddlewareContext, RefusedMessages

_SMALL_BYTES = 4 << 10
"""Batches up to this size are not compressed one by one: the broker gathers them, and compresses them together."""
_INDEXES_MAX, _REASONS_MAX = 1000, 20
"""So many indexes and reasons of refused messages are told."""
_REASON_CHARS_MAX = 500


@dataclass(frozen=True)
class DeadMessages:
    """Messages that a middleware refused, to be stored as dead letters."""

    middleware: str
    columns: Columns
    indexes: Sequence[int]
    """Their indexes in the batch; after middleware that changed the number of messages, among those that it made."""
    reasons: Sequence[str]


@dataclass
class ProcessedBatch:
    """What the middleware made of a batch."""

    batch: Batch
    stored: int | None = None
    """How many messages it has now, without dead letters, if a middleware may have changed that."""
    dead: list[DeadMessages] = field(default_factory=list)

    def refusal(self, topic: str) -> MessageRefused:
        """The error about the dead messages, for those who cannot store them as dead letters."""
        found = [pair for part in self.dead for pair in zip(part.indexes, part.reasons, strict=True)]
        return message_refused(topic, self.dead[0].middleware, dict(sorted(found)))


@dataclass
class SiftedBatch:
    """What the middleware left of a batch."""

    batch: Batch | None
    """The messages that are left, without gaps, and of the same producer; None if there are none."""
    refused: dict[int, str]
    """Why messages were refused, by their indexes in the batch."""


class MiddlewareStep:
    """One middleware of a topic."""

    def __init__(self, name: str, middleware: Any) -> None:
        self.name = name
        self.on_publish = getattr(middleware, "on_publish", None)
        self.on_deliver = getattr(middleware, "on_deliver", None)
        self.changes_count = bool(getattr(middleware, "changes_count", False))
        self.inline = bool(getattr(middleware, "inline", False))
        self.codec: Codec | None = getattr(middleware, "codec", None)
        needs = frozenset(getattr(middleware, "needs", ("values",)))
        if unknown := needs.difference(COLUMNS):
            raise InvalidArgument(f"it needs the columns {', '.join(map(str, unknown))}, which messages do not have")
        self.needs = frozenset(COLUMNS) if self.changes_count else needs
        self.is_ours = type(middleware).__module__.startswith("headrace.middleware")
        """Whether what it returns needs no check."""
        if self.on_deliver is not None and not self.inline:
            raise InvalidArgument("it has on_deliver and is not inline: deliveries cannot wait for a thread")
        if not any(map(callable, (self.on_publish, self.on_deliver))) and self.codec is None:
            raise InvalidArgument("it has neither on_publish nor on_deliver")


class MiddlewareChain:
    """The middleware of a topic. Batches may be processed on any thread."""

    def __init__(self, steps: Sequence[MiddlewareStep] = (), timeout_us: int = 5_000_000) -> None:
        self.timeout_us = timeout_us
        """How long a thread may take for a batch."""
        self.publishing = [step for step in steps if step.on_publish is not None]
        self.delivering = [step for step in steps if step.on_deliver is not None]
        self.codec = next((step.codec for step in reversed(steps) if step.codec is not None), None)
        self.inline = all(step.inline for step in self.publishing)
        self.changes_count = any(step.changes_count for step in self.publishing)
        self.stuck = 0
        """Batches whose time is over, and whose threads have not returned: meanwhile others are refused."""
        self._needs = frozenset().union(*(step.needs for step in self.publishing))

    def runs_inline(self, batch: Batch) -> bool:
        """Whether a batch is processed on the event loop."""
        return self.inline and batch.raw_bytes <= INLINE_BYTES_MAX and batch.count <= INLINE_COUNT_MAX

    def process(self, batch: Batch, context: MiddlewareContext) -> ProcessedBatch:
        """Pass a published batch through all middleware; raises MessageRefused or MiddlewareFailed."""
        codec = self._codec_of(batch)
        if not self.publishing:
            return ProcessedBatch(batch if codec == batch.codec else recompressed(batch, codec))
        return _Passage(batch, context, self._needs).run(self.publishing, codec, counted=self.changes_count)

    def sift(self, batch: Batch, context: MiddlewareContext) -> SiftedBatch:
        """Pass a batch of the broker itself through all middleware, and leave out what any of it refuses.

        Where middleware changes the number of messages, each is processed alone, so that it is known what is refused.
        """
        codec = self._codec_of(batch)
        if not self.publishing:
            return SiftedBatch(self.process(batch, context).batch, {})
        if not self.changes_count:
            return _Passage(batch, context, self._needs, sifts=True).sift(self.publishing, codec)
        kept: list[Columns] = []
        refused: dict[int, str] = {}
        columns = batch.columns()
        for index in range(batch.count):
            one = _without_places(columns.picked([index], range(batch.count)))
            one.timestamps = one.timestamps or [batch.time_max]
            sifted = _Passage(encode_like(batch, one), context, self._needs, sifts=True)
            found = sifted.sift(self.publishing, Codec.NONE)
            if found.refused:
                refused[index] = next(iter(found.refused.values()))
            elif found.batch is not None:
                kept.append(found.batch.columns())
        if not kept:
            return SiftedBatch(None, refused)
        return SiftedBatch(encode_like(batch, joined_columns(kept), codec), refused)

    def _codec_of(self, batch: Batch) -> Codec:
        if self.codec is None or batch.length <= _SMALL_BYTES:
            return Codec(batch.codec)
        return self.codec


class _Passage:
    """A batch on its way through the middleware of its topic."""

    def __init__(self, batch: Batch, context: MiddlewareContext, needs: frozenset[str], *, sifts: bool = False) -> None:
        self._sifts = sifts
        self._batch = batch
        self._context = context
        self._rewriter = BatchRewriter(batch, needs)
        self._places: Sequence[int] = range(batch.count)
        """Where the messages are in the batch."""
        self._span = batch.count
        self._dead: list[DeadMessages] = []

    def run(self, steps: Sequence[MiddlewareStep], codec: Codec, *, counted: bool) -> ProcessedBatch:
        """Pass the batch through the steps."""
        for step in steps:
            if not self._places:
                break
            self._pass(step)
        if self._dead:
            columns = self._rewriter.decode_all()
            made = encode_with_holes(self._batch, columns, self._places, self._span, codec)
        else:
            made = self._rewriter.encoded(codec)
        return ProcessedBatch(made, len(self._places) if counted else None, self._dead)

    def sift(self, steps: Sequence[MiddlewareStep], codec: Codec) -> SiftedBatch:
        """Pass the batch through the steps without what they refuse; all of it, if one fails."""
        try:
            for step in steps:
                if self._places:
                    self._pass(step)
        except MiddlewareFailed as error:
            return SiftedBatch(None, dict.fromkeys(range(self._batch.count), str(error)))
        refused = dict(pair for part in self._dead for pair in zip(part.indexes, part.reasons, strict=True))
        return SiftedBatch(self._rewriter.encoded(codec) if self._places else None, refused)

    def _pass(self, step: MiddlewareStep) -> None:
        assert step.on_publish is not None
        outcome = call_step(step, step.on_publish, self._rewriter.columns, self._context)
        if isinstance(outcome, RefusedMessages):
            refused, outcome = outcome, outcome.columns or self._rewriter.columns
        else:
            refused = None
        columns = check_returned(step, outcome, self._rewriter.columns, self._context)
        count, given = len(columns.values), self._places
        if count != len(given):
            if not 0 < count <= BATCH_COUNT_MAX:
                raise failure(step.name, self._context, f"returned {count} messages; 1 to {BATCH_COUNT_MAX} can be")
            self._places, self._span = range(count), count
        self._rewriter.columns = columns
        if refused is not None:
            self._refuse(step, refused, given)

    def _refuse(self, step: MiddlewareStep, refusal: RefusedMessages, given: Sequence[int]) -> None:
        """Refuse the batch, or take messages out of it; `given` is where the messages were that the step was given."""
        count = len(self._places)
        reasons = {index: str(reason)[:_REASON_CHARS_MAX] for index, reason in refusal.reasons.items()}
        if not reasons:
            return
        if not all(type(index) is int and 0 <= index < count for index in reasons):
            raise failure(step.name, self._context, "refused messages that are not in the batch")
        sources = refusal.sources
        if sources is None:
            told = {index: self._places[index] for index in reasons}
        elif all(type(at := sources.get(index)) is int and 0 <= at < len(given) for index in reasons):
            told = {index: given[sources[index]] for index in reasons}
        else:
            raise failure(step.name, self._context, "refused messages of sources that are not in the batch")
        if not refusal.dead_letter and not self._sifts:
            raise message_refused(
                self._context.topic, step.name, {told[index]: reasons[index] for index in sorted(reasons)}
            )
        columns = self._rewriter.decode_all()
        if columns.timestamps is None:
            columns = msgspec.structs.replace(columns, timestamps=[self._batch.time_max] * count)
        dead = sorted(reasons)
        letters = _without_places(columns.picked(dead, range(count)))
        indexes, texts = [told[index] for index in dead], [reasons[index] for index in dead]
        self._dead.append(DeadMessages(step.name, letters, indexes, texts))
        left = [index for index in range(count) if index not in reasons]
        self._rewriter.columns = _without_places(columns.picked(left, range(count)))
        self._places = [self._places[index] for index in left]


def call_step(step: MiddlewareStep, hook: Any, columns: Columns, context: MiddlewareContext) -> Any:
    """Call a middleware; whatever it raises becomes MiddlewareFailed, without the text, which may have content."""
    try:
        return hook(columns, context)
    except HeadraceError as error:
        if isinstance(error, MiddlewareFailed | MessageRefused):
            raise
        raise failure(step.name, context, f"raised {type(error).__name__}") from error
    except Exception as error:
        raise failure(step.name, context, f"raised {type(error).__name__}") from error


def check_returned(step: MiddlewareStep, outcome: Any, given: Columns, context: MiddlewareContext) -> Columns:
    """What a middleware returned, if it is columns of messages; those that it does not need are as they were given."""
    if not isinstance(outcome, Columns):
        raise failure(step.name, context, f"returned {type(outcome).__name__} instead of columns")
    count = len(given.values)
    if len(outcome.values) != count and not step.changes_count:
        text = f"returned {len(outcome.values)} messages for {count}, and does not say changes_count"
        raise failure(step.name, context, text)
    if step.is_ours:
        return outcome
    try:
        returned = {name: getattr(outcome, name) for name in step.needs}
        checked = checked_columns(Columns(**{"values": [None] * count, **returned}))
    except InvalidBatch as error:
        raise failure(step.name, context, f"returned columns that cannot be stored: {error}") from error
    return msgspec.structs.replace(given, **{name: getattr(checked, name) for name in step.needs})


def failure(name: str, context: MiddlewareContext, text: str) -> MiddlewareFailed:
    """The error about a middleware that does not do what it must."""
    outcome = "nothing was stored" if context.time_us else "messages are delivered without their values"
    return MiddlewareFailed(
        f"the middleware {name} of the topic {context.topic} {text}; {outcome}: mend the middleware, or alter the "
        "topic",
        middleware=name,
        topic=context.topic,
    )


def message_refused(topic: str, name: str, reasons: Mapping[int, str]) -> MessageRefused:
    """The error about messages that a middleware refuses."""
    indexes = list(reasons)
    first = indexes[0]
    more = f", and {len(indexes) - 1} more" if len(indexes) > 1 else ""
    return MessageRefused(
        f"the middleware {name} of the topic {topic} refuses message {first} of the batch{more}: {reasons[first]}; "
        "nothing was stored",
        middleware=name,
        count=len(indexes),
        indexes=indexes[:_INDEXES_MAX],
        reasons=[reasons[index] for index in indexes[:_REASONS_MAX]],
    )


def make_chain(entries: Sequence[Mapping[str, Any]], load: LoadMiddleware, timeout_us: int) -> MiddlewareChain:
    """The middleware that a topic's settings name; raises InvalidArgument or PluginUnavailable, which say which."""
    return MiddlewareChain([_make_step(entry, load) for entry in entries], timeout_us)


def _make_step(entry: Mapping[str, Any], load: LoadMiddleware) -> MiddlewareStep:
    name = entry["name"]
    factory = load(name)
    options = {key: option for key, option in entry.items() if key != "name"}
    try:
        middleware = factory(options)
        if getattr(middleware, "api", API) != API:
            raise InvalidArgument(f"it is for version {middleware.api} of the interface, and this is {API}")
        return MiddlewareStep(name, middleware)
    except InvalidArgument as error:
        raise InvalidArgument(f"the middleware {name}: {error}") from error
    except HeadraceError:
        raise
    except Exception as error:
        text = shortened(f"{type(error).__name__}: {error}")
        raise InvalidArgument(f"the middleware {name} cannot be made with these options: {text}") from error


def _without_places(columns: Columns) -> Columns:
    columns.places = None
    return columns
