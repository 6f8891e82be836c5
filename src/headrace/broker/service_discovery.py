"""Lists and describes registered services: in slices, and in answers of bounded size whatever services say."""

from collections.abc import Generator, Iterable, Mapping

import msgspec

from headrace.broker.live_instance import LiveInstance
from headrace.broker.slices import Steps
from headrace.broker.subject_trie import SubjectTrie
from headrace.broker.switchboard import parse_pattern, parse_subject
from headrace.model.service_requests import ServiceInfo, ServiceList, ServicesFound
from headrace.model.topic import parse_topic

_LISTED_INSTANCES_MAX = 100
_LISTED_NAMES_MAX = 100
"""Instances of a service, and topics or subjects of it, in lists."""
_PAGE_BYTES = 512 << 10
"""A page of a list ends after this."""
_DESCRIBED_NAMES_MAX = 1000
_DESCRIBED_BYTES_MAX = 1 << 20
"""Instances of a described service together, and so much of its schemas."""
_WORK_TOGETHER = 1000
"""Instances, topics and subjects that are looked at per slice."""

InfoSteps = Generator[None, None, ServiceInfo]


def list_services(services: Mapping[str, Mapping[str, LiveInstance]], names: list[str], request: ServiceList) -> Steps:
    """Collect a page of the services of these names that match."""
    wanted = _WantedService(request)
    found, size_bytes, work = list[ServiceInfo](), 0, 0
    for name in names:
        lives = list(services.get(name, {}).values())
        if not lives:
            continue
        matches = yield from wanted.is_in(lives)
        if matches:
            info = yield from _summarize(name, lives)
            found.append(info)
            size_bytes += len(msgspec.msgpack.encode(info))
            if size_bytes >= _PAGE_BYTES:
                return ServicesFound(found, next="" if name == names[-1] else name)
        work += len(lives)
        if work >= _WORK_TOGETHER:
            work = 0
            yield
    return ServicesFound(found)


def describe_service(name: str, lives: list[LiveInstance]) -> InfoSteps:
    """All that instances say of a service, as far as it fits."""
    info, size_bytes = ServiceInfo(name, instances_total=len(lives)), 0
    for number, live in enumerate(lives, 1):
        one = live.info()
        size_bytes += len(msgspec.msgpack.encode(one))
        if size_bytes > _DESCRIBED_BYTES_MAX:
            info.truncated = True
            break
        info.instances.append(one)
        if number % 100 == 0:
            yield
    yield from _collect_names(info, lives, _DESCRIBED_NAMES_MAX)
    yield from _collect_schemas(info, lives)
    return info


def _summarize(name: str, lives: list[LiveInstance]) -> InfoSteps:
    """A service as in a list: without schemas and metadata, and with the first of its instances only."""
    info = ServiceInfo(name, instances_total=len(lives), truncated=len(lives) > _LISTED_INSTANCES_MAX)
    info.instances = [live.info(metadata=False) for live in lives[:_LISTED_INSTANCES_MAX]]
    yield from _collect_names(info, lives, _LISTED_NAMES_MAX)
    return info


def _collect_names(info: ServiceInfo, lives: list[LiveInstance], most: int) -> Steps:
    """Fill in topics and subjects of all instances together, so many at most."""
    for field in ("produces", "consumes", "serves"):
        names: set[str] = set()
        work = 0
        for live in lives:
            said: list[str] = getattr(live.definition, field)
            names.update(said)
            if len(names) > most:
                info.truncated = True
                break
            work += 1 + len(said)
            if work >= _WORK_TOGETHER:
                work = 0
                yield
        setattr(info, field, sorted(names)[:most])


def _collect_schemas(info: ServiceInfo, lives: list[LiveInstance]) -> Steps:
    """Fill in schemas, each as the instance says that registered last."""
    size_bytes = 0
    for number, live in enumerate(sorted(lives, key=lambda live: live.registered_us, reverse=True), 1):
        for topic, schema in live.definition.schemas.items():
            if topic in info.schemas:
                continue
            size_bytes += len(topic) + len(msgspec.msgpack.encode(schema))
            if size_bytes > _DESCRIBED_BYTES_MAX:
                info.truncated = True
                return
            info.schemas[topic] = schema
        if number % 100 == 0:
            yield


class _WantedService:
    """What a request for a list asks for."""

    def __init__(self, request: ServiceList) -> None:
        self._produces = str(parse_topic(request.produces)) if request.produces else ""
        self._consumes = str(parse_topic(request.consumes)) if request.consumes else ""
        self._serves = str(parse_subject(request.serves)) if request.serves else ""

    def is_in(self, lives: list[LiveInstance]) -> Generator[None, None, bool]:
        """Whether these instances together do all of it."""
        missing = {field for field in ("_produces", "_consumes", "_serves") if getattr(self, field)}
        work = 0
        for live in lives if missing else ():
            said = live.definition
            if "_produces" in missing and self._produces in said.produces:
                missing.discard("_produces")
            if "_consumes" in missing and self._consumes in said.consumes:
                missing.discard("_consumes")
            if "_serves" in missing and _serves(said.serves, self._serves):
                missing.discard("_serves")
            if not missing:
                break
            work += 1 + len(said.produces) + len(said.consumes) + len(said.serves)
            if work >= _WORK_TOGETHER:
                work = 0
                yield
        return not missing


def _serves(patterns: Iterable[str], subject: str) -> bool:
    """Whether a subject matches one of the patterns."""
    tenant, bare = parse_subject(subject)
    trie = SubjectTrie[str]()
    for pattern in map(parse_pattern, patterns):
        if pattern.tenant == tenant:
            trie.add(pattern.subject, pattern.subject, limited=False)  # checked when the service was registered
    return bool(trie.match(bare))
