"""The decision: deny by default, patterns, tenants, scopes and claims; compared with a naive model."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.model.identity import ANONYMOUS, LOCAL, Identity
from headrace.model.request import Resource, Verb
from headrace.model.security_requests import Binding, Grant
from headrace.security.authorizer import Authorizer, ResourceName
from headrace.security.definitions import SecurityDefinitions, TokenDefinition, check_grants
from headrace.security.patterns import covering_name, covering_subject, matches
from headrace.security.roles import BUILT_IN_ROLES

ADA = Identity("ada")


def decides(definitions: SecurityDefinitions, identity: Identity, verb: str, resource: str, *names: str) -> bool:
    named = ResourceName.of(resource, *names) if names else ResourceName("default", "")
    return Authorizer(definitions, identity).decide(verb, resource, named).allowed


def bound(*bindings: Binding, **roles: list[Grant]) -> SecurityDefinitions:
    return SecurityDefinitions(version=1, enabled=True, roles=roles, bindings=list(bindings))


@pytest.mark.parametrize("verb", [verb.value for verb in Verb])
@pytest.mark.parametrize("resource", [resource.value for resource in Resource])
def test_nothing_is_allowed_by_default(verb: str, resource: str) -> None:
    for identity in (ADA, ANONYMOUS, Identity("ada", "acme")):
        assert not decides(SecurityDefinitions(), identity, verb, resource, "orders", "one")


def test_an_explanation_names_the_rule() -> None:
    decision = Authorizer(bound(Binding("publisher", "a*")), ADA).decide(
        "publish", "topic", ResourceName("default", "orders")
    )
    assert decision.allowed
    assert (
        decision.rule == "role publisher (bound to a* in all tenants): publish, edit-own on topic *, headrace.ingress"
    )
    refused = Authorizer(bound(Binding("publisher", "a*")), ADA).decide("delete", "topic", ResourceName("x", "orders"))
    assert refused.text == (
        "ada may not delete topic orders in the tenant x: none of its roles allows it (it has the roles publisher)"
    )


def test_a_binding_in_a_tenant_counts_there_only() -> None:
    definitions = bound(Binding("consumer", "ada", tenant="acme"))
    assert decides(definitions, ADA, "consume", "topic", "acme/orders")
    assert not decides(definitions, ADA, "consume", "topic", "orders")
    assert not decides(definitions, ADA, "consume", "topic", "zeta/orders")


def test_an_identity_of_a_tenant_stays_there_whatever_is_bound() -> None:
    definitions = bound(Binding("administrator", "ada"))
    theirs = Identity("ada", "acme")
    assert decides(definitions, theirs, "delete", "topic", "acme/orders")
    assert not decides(definitions, theirs, "delete", "topic", "orders")
    assert not decides(definitions, theirs, "administer", "security")
    assert decides(definitions, ADA, "administer", "security")


def test_an_administrator_of_one_tenant_does_not_change_definitions() -> None:
    definitions = bound(Binding("administrator", "ada", tenant="default"))
    assert decides(definitions, ADA, "administer", "broker")
    assert not decides(definitions, ADA, "administer", "security")


def test_who_is_not_authenticated_has_only_what_is_bound_to_that_name() -> None:
    assert not decides(bound(Binding("consumer", "*")), ANONYMOUS, "consume", "topic", "orders")
    assert decides(bound(Binding("consumer", "anonymous")), ANONYMOUS, "consume", "topic", "orders")


def test_the_local_user_is_an_administrator_without_a_binding() -> None:
    assert decides(SecurityDefinitions(), LOCAL, "administer", "security")
    assert decides(SecurityDefinitions(), LOCAL, "consume", "topic", "acme/headrace.events")


def test_claims_bind_roles() -> None:
    definitions = bound(Binding("operator", claims={"groups": "ops-*", "iss": "https://id.example.org"}))
    claims = {"groups": ["dev", "ops-eu"], "iss": "https://id.example.org"}
    assert decides(definitions, Identity("ada", claims=claims), "create", "topic", "orders")
    for wrong in ({"groups": ["dev"], "iss": claims["iss"]}, {"groups": ["ops-eu"]}, {"groups": 7, "iss": 1}, {}):
        assert not decides(definitions, Identity("ada", claims=wrong), "create", "topic", "orders")


def test_scopes_narrow_what_roles_allow() -> None:
    scopes = (Grant(["publish", "administer"], "topic", ["orders"]),)
    definitions = SecurityDefinitions(
        enabled=True,
        bindings=[Binding("publisher", "ada")],
        tokens={"t": TokenDefinition(hash=b"", identity="ada", scopes=scopes)},
    )
    limited = Identity("ada", token_id="t")
    assert decides(definitions, limited, "publish", "topic", "orders")
    assert not decides(definitions, limited, "publish", "topic", "bills")
    assert not decides(definitions, limited, "administer", "topic", "orders")  # no role has it


def test_describing_comes_with_any_other_verb_and_editing_all_with_editing_ones_own() -> None:
    definitions = bound(Binding("mine", "ada"), mine=[Grant(["edit-any"], "topic", ["orders"])])
    assert decides(definitions, ADA, "describe", "topic", "orders")
    assert decides(definitions, ADA, "edit-own", "topic", "orders")
    assert not decides(definitions, ADA, "describe", "topic", "bills")
    own = bound(Binding("mine", "ada"), mine=[Grant(["edit-own"], "topic", ["orders"])])
    assert not decides(own, ADA, "edit-any", "topic", "orders")


def test_a_subscription_is_covered_by_its_topic_or_by_both_names() -> None:
    grants = [Grant(["lease"], "subscription", ["orders", "bills/wor*"])]
    definitions = bound(Binding("mine", "ada"), mine=grants)
    assert decides(definitions, ADA, "lease", "subscription", "orders", "any")
    assert decides(definitions, ADA, "lease", "subscription", "bills", "workers")
    assert not decides(definitions, ADA, "lease", "subscription", "bills", "others")
    assert not decides(definitions, ADA, "lease", "subscription", "bills/wor", "x")  # a tenant of that name


@pytest.mark.parametrize(
    ("pattern", "name", "is_covered"),
    [
        ("*", "orders.eu", True),
        ("*", "headrace.events", False),
        ("?eadrace.events", "headrace.events", False),
        ("headrace.*", "headrace.events", True),
        ("orders.*", "orders.*", True),
        ("orders.*", "orders*", False),
        ("orders.?", "orders.*", False),
        ("orders.?", "orders.?", False),
        ("o*s", "o*e", False),
        ("", "", True),
    ],
)
def test_names_and_patterns_of_names(pattern: str, name: str, is_covered: bool) -> None:
    assert matches(pattern, covering_name(name)) is is_covered


@pytest.mark.parametrize(
    ("pattern", "subject", "is_covered"),
    [
        ("orders.*", "orders.eu.paid", True),
        ("orders.*", "orders.>", True),
        ("orders.*", "orders.*.paid", True),
        ("orders.*", "orders.#", False),  # it has `orders`, too
        ("orders*", "orders.#", True),
        ("*.paid", "#.paid", False),
        ("*paid", "#.paid", True),
        ("orders.*", "*.eu", False),
        ("orders.#", "orders.#", False),
        ("*", "$events.topic.created", False),
        ("$events.*", "$events.>", True),
    ],
)
def test_patterns_of_subjects(pattern: str, subject: str, is_covered: bool) -> None:
    assert matches(pattern, covering_subject(subject)) is is_covered


def test_a_pattern_with_many_wildcards_takes_little_time() -> None:
    assert not matches("*a" * 100 + "b", "a" * 249)


def test_built_in_roles_are_valid() -> None:
    for name, role in BUILT_IN_ROLES.items():
        check_grants(list(role.grants), name)
        assert role.description


NAMES = st.text("ab.", min_size=1, max_size=4).filter(lambda name: name[0] != "." != name[-1])
PATTERNS = st.text("ab.*?", min_size=1, max_size=4)
VERBS = st.lists(st.sampled_from(["publish", "consume", "describe", "edit-own", "edit-any", "*"]), min_size=1)
RESOURCES = st.sampled_from(["topic", "group", "*"])
GRANTS = st.builds(Grant, VERBS, RESOURCES, st.lists(PATTERNS, min_size=1, max_size=3))
BINDINGS = st.builds(
    Binding,
    st.sampled_from(["one", "two"]),
    st.sampled_from(["ada", "a*", "bob", "*"]),
    tenant=st.sampled_from(["*", "x"]),
)


def naive(
    definitions: SecurityDefinitions, identity: Identity, verb: str, resource: str, tenant: str, name: str
) -> bool:
    """The same decision, said in the shortest way."""

    def glob(pattern: str, text: str) -> bool:
        escaped = re.escape(pattern).replace(r"\*", "(?:.*)").replace(r"\?", ".")
        return re.fullmatch(escaped, text) is not None

    def allows(grant: Grant) -> bool:
        implied = {"describe": {"publish", "consume", "edit-own", "edit-any"}, "edit-own": {"edit-any"}}.get(
            verb, set()
        )
        return (
            grant.resource in ("*", resource)
            and bool({verb, "*", *implied} & set(grant.verbs))
            and any(glob(pattern, name) for pattern in grant.patterns)
        )

    granted = [
        grant
        for binding in definitions.bindings
        if glob(binding.identity, identity.name) and binding.tenant in ("*", tenant)
        for grant in definitions.roles.get(binding.role, [])
    ]
    return identity.tenant in ("", tenant) and any(map(allows, granted))


@given(
    roles=st.dictionaries(st.sampled_from(["one", "two"]), st.lists(GRANTS, max_size=3)),
    bindings=st.lists(BINDINGS, max_size=4),
    identity=st.sampled_from([Identity("ada"), Identity("bob", "x"), Identity("ada", "y")]),
    verb=st.sampled_from(["publish", "consume", "describe", "edit-own", "edit-any"]),
    resource=st.sampled_from(["topic", "group"]),
    tenant=st.sampled_from(["default", "x", "y"]),
    name=NAMES,
)
def test_decisions_are_those_of_a_naive_model(
    roles: dict[str, list[Grant]], bindings: list[Binding], name: str, **asked: Any
) -> None:
    definitions = SecurityDefinitions(enabled=True, roles=roles, bindings=bindings)
    identity, verb, resource, tenant = (asked[key] for key in ("identity", "verb", "resource", "tenant"))
    full = name if tenant == "default" else f"{tenant}/{name}"
    allowed = Authorizer(definitions, identity).decide(verb, resource, ResourceName.of(resource, full)).allowed
    assert allowed is naive(definitions, identity, verb, resource, tenant, name)


@given(grant=PATTERNS, asked=PATTERNS, name=NAMES)
def test_a_grant_that_covers_a_pattern_covers_all_that_it_matches(grant: str, asked: str, name: str) -> None:
    if matches(grant, covering_name(asked)) and matches(asked, name):
        assert matches(grant, name)
