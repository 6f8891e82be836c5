"""The security definitions: versioned, changed by compare-and-set, bounded, and there again after a restart."""

from pathlib import Path

import pytest
from tests.definitions_stores import definitions_store as definitions_store

from headrace.broker.definition_facts import DefinitionsState
from headrace.broker.facts import decode_fact, encode_fact
from headrace.model import limits
from headrace.model.errors import (
    BindingNotFound,
    InvalidArgument,
    LimitExceeded,
    NotAuthenticated,
    RoleNotFound,
    TokenExpired,
    TokenNotFound,
    TokenRevoked,
    VersionConflict,
)
from headrace.model.security_requests import (
    Binding,
    BindingAdd,
    BindingRemove,
    Grant,
    RoleRemove,
    RoleSet,
    SecurityDescribe,
    TokenCreate,
    TokenList,
    TokenRevoke,
)
from headrace.security.definitions import DefinitionsChange, SecurityDefinitions, TokenDefinition
from headrace.security.tenants import TenantDefinition
from headrace.security.tokens import new_token, verified_token
from headrace.testing.workbench import Workbench

READ_ORDERS = Grant(["consume"], "topic", ["orders.*"])


def test_each_change_counts_and_a_stale_one_changes_nothing() -> None:
    bench = Workbench()
    assert bench.ask(RoleSet("inspector", [READ_ORDERS])).version == 1
    assert bench.ask(BindingAdd(Binding("inspector", "ada"), expected_version=1)).version == 2
    with pytest.raises(VersionConflict) as refused:
        bench.ask(RoleRemove("inspector", expected_version=1))
    assert refused.value.details == {"version": 2}
    info = bench.ask(SecurityDescribe())
    assert (info.version, info.bindings) == (2, [Binding("inspector", "ada")])


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    bench = Workbench(str(tmp_path))
    bench.ask(RoleSet("inspector", [READ_ORDERS]))
    bench.ask(BindingAdd(Binding("inspector", claims={"team": "audit*"}, tenant="acme")))
    created = bench.ask(TokenCreate("ada", description="laptop"))
    before = bench.broker.definitions.load()
    bench.close()
    bench = Workbench(str(tmp_path))
    assert bench.broker.definitions.load() == before
    assert verified_token(before, created.token, bench.now_us)[0] == created.info.id
    bench.close()


def test_a_snapshot_has_the_whole_document_in_bounded_facts() -> None:
    state = DefinitionsState()
    state.document = SecurityDefinitions(
        version=7,
        enabled=True,
        tenants={"acme": TenantDefinition(created_us=1)},
        roles={"inspector": [READ_ORDERS]},
        bindings=[Binding("inspector", f"user-{number}") for number in range(250)],
        tokens={f"{number:012}": TokenDefinition(hash=bytes(32), identity="ada") for number in range(10_000)},
    )
    state.used_us = {"000000000001": 5}
    encoded = [encode_fact(fact) for fact in state.facts()]
    assert max(map(len, encoded)) < 32 << 10
    again = DefinitionsState()
    for content in encoded:
        again.apply(decode_fact(content))  # type: ignore[arg-type]
    assert (again.document, again.used_us) == (state.document, state.used_us)


def test_removing_a_role_removes_its_bindings() -> None:
    bench = Workbench()
    bench.ask(RoleSet("inspector", [READ_ORDERS]))
    bench.ask(BindingAdd(Binding("inspector", "ada")))
    bench.ask(RoleRemove("inspector"))
    info = bench.ask(SecurityDescribe())
    assert not [role for role in info.roles if not role.is_built_in]
    assert info.bindings == []


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (RoleSet("a b", [READ_ORDERS]), InvalidArgument),
        (RoleSet("inspector", [Grant(["fly"], "topic", ["*"])]), InvalidArgument),
        (RoleSet("inspector", [Grant([], "topic", ["*"])]), InvalidArgument),
        (RoleSet("inspector", [Grant(["consume"], "planet", ["*"])]), InvalidArgument),
        (RoleSet("inspector", [Grant(["consume"], "topic", [])]), InvalidArgument),
        (RoleSet("inspector", [Grant(["consume"], "topic", ["a b"])]), InvalidArgument),
        (RoleSet("inspector", [READ_ORDERS] * (limits.GRANTS_MAX + 1)), InvalidArgument),
        (RoleRemove("inspector"), RoleNotFound),
        (BindingAdd(Binding("inspector", "ada")), RoleNotFound),
        (BindingAdd(Binding("inspector")), InvalidArgument),
        (BindingAdd(Binding("inspector", "ada", tenant="a/b")), InvalidArgument),
        (BindingRemove(Binding("inspector", "ada")), BindingNotFound),
        (TokenCreate("a*"), InvalidArgument),
        (TokenCreate(""), InvalidArgument),
        (TokenCreate("ada", expires_us=1), InvalidArgument),
        (TokenCreate("ada", description="x" * 501), InvalidArgument),
        (TokenRevoke("000000000000"), TokenNotFound),
        (TokenList(limit=0), InvalidArgument),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(request_: object, error: type[Exception]) -> None:
    bench = Workbench()
    with pytest.raises(error):
        bench.ask(request_)  # type: ignore[arg-type]
    assert bench.broker.definitions.load().version == 0


def test_a_token_is_stored_as_a_hash_and_shown_once() -> None:
    bench = Workbench()
    created = bench.ask(TokenCreate("ada", tenant="acme", scopes=[READ_ORDERS]))
    secret = created.token.rpartition("_")[2]
    document = bench.broker.definitions.load()
    assert secret not in repr(document) + repr(created) + repr(bench.ask(TokenList()))
    assert bench.ask(TokenList()).tokens == [created.info]
    token_id, token = verified_token(document, created.token, bench.now_us)
    assert (token_id, token.identity, token.tenant, token.scopes) == (created.info.id, "ada", "acme", (READ_ORDERS,))


def test_wrong_expired_and_revoked_tokens_are_refused() -> None:
    bench = Workbench()
    created = bench.ask(TokenCreate("ada", expires_us=bench.now_us + 1_000_000))
    document = bench.broker.definitions.load()
    unknown = new_token()[1]
    wrong = created.token[:-2] + ("aa" if created.token[-2:] != "aa" else "bb")
    texts = set()
    for token in ("", "hr_", "Bearer x", unknown, wrong, created.token + "x", created.token.upper()):
        with pytest.raises(NotAuthenticated) as refused:
            verified_token(document, token, bench.now_us)
        texts.add(str(refused.value))
    assert len(texts) == 1  # nobody learns which ids there are
    with pytest.raises(TokenExpired):
        verified_token(document, created.token, bench.now_us + 1_000_000)
    assert bench.ask(TokenRevoke(created.info.id)).tokens[0].revoked_us == bench.now_us
    with pytest.raises(TokenRevoked):
        verified_token(bench.broker.definitions.load(), created.token, bench.now_us)


def test_a_new_token_replaces_one_that_is_over_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("broker.security_admin", "security.definitions"):
        monkeypatch.setattr(f"headrace.{module}.TOKENS_MAX", 3)
    bench = Workbench()
    ids = [bench.ask(TokenCreate(f"user-{number}")).info.id for number in range(3)]
    with pytest.raises(LimitExceeded):
        bench.ask(TokenCreate("one-more"))
    bench.ask(TokenRevoke(ids[1]))
    bench.ask(TokenCreate("one-more"))
    left = {token.id for token in bench.ask(TokenList()).tokens}
    assert {ids[0], ids[2]} < left
    assert ids[1] not in left


def test_tokens_are_listed_in_pages() -> None:
    bench = Workbench()
    ids = sorted(bench.ask(TokenCreate("ada" if number % 2 else "bob")).info.id for number in range(5))
    page = bench.ask(TokenList(limit=2))
    assert [token.id for token in page.tokens] == ids[:2]
    assert [token.id for token in bench.ask(TokenList(after=page.after)).tokens] == ids[2:]
    assert {token.identity for token in bench.ask(TokenList(identity="ada")).tokens} == {"ada"}


def test_a_change_is_announced_with_the_new_document() -> None:
    bench = Workbench()
    told: list[SecurityDefinitions] = []
    bench.broker.definitions.on_change(told.append)
    bench.ask(RoleSet("inspector", [READ_ORDERS]))
    assert [document.roles for document in told] == [{"inspector": [READ_ORDERS]}]
    outcomes: list[object] = []
    bench.broker.definitions.compare_and_set(DefinitionsChange(enabled=True), 0, bench.now_us, outcomes.append)
    assert isinstance(outcomes[0], VersionConflict)
    assert len(told) == 1
