"""Rules give requests policies of their own; overrides do if they are allowed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from multidict import CIMultiDict

from router.errors import RefusedError, SettingsError
from router.policies import POLICIES
from router.prompt import RequestBody, given, read_other
from router.rules import Rule, Rules

CHAT = "/v1/chat/completions"


def picked(rules: Rules, model: str | None = "m", path: str = CHAT, **headers: str) -> str:
    found = rules.pick(model, path, CIMultiDict((n.replace("_", "-"), v) for n, v in headers.items()), ["a"])
    return f"{found.rule}:{found.policy.name}"


def test_the_first_rule_that_fits_counts_and_all_it_says_must_fit() -> None:
    rules = Rules(
        [
            Rule(name="agents", policy="session", headers={"X-App": "agent*"}, model="coder-*"),
            Rule(policy="prefix-hash", tenant="acme"),
            Rule(name="text", policy="random", path="/v1/completions"),
        ],
        POLICIES["cache-aware"],
    )
    assert picked(rules, "coder-7b", X_APP="agent/2") == "agents:session"
    assert picked(rules, "coder-7b", X_APP="web") == "None:cache-aware"
    assert picked(rules, "chat", X_APP="agent/2") == "None:cache-aware"
    assert picked(rules, "coder-7b", X_APP="agent", X_Tenant_Id="acme") == "agents:session"
    assert picked(rules, X_Tenant_Id="acme") == "rule[1]:prefix-hash"
    assert picked(rules, None, "/v1/completions") == "text:random"
    assert [(rule["name"], rule["requests"]) for rule in rules.shown()["rules"]] == [
        ("agents", 2),
        ("rule[1]", 1),
        ("text", 1),
    ]
    assert (rules.shown()["default"], rules.shown()["default_requests"]) == ("cache-aware", 2)


def test_a_request_that_names_its_policy_is_counted_for_no_rule_and_not_for_the_default() -> None:
    rules = Rules([Rule(policy="random", model="r")], POLICIES["cache-aware"], allow_override=True)
    for model in ("r", "m"):
        assert picked(rules, model, x_warmroute_policy="session") == "None:session"
    assert picked(rules, "m", x_warmroute_replica="a") == "None:cache-aware"
    shown = rules.shown()
    assert (shown["rules"][0]["requests"], shown["default_requests"]) == (0, 1)


def test_a_rule_has_its_own_parameters() -> None:
    rules = Rules([Rule(policy="session", parameters={"keys": ["field:chat"]})], POLICIES["session"])
    mine = rules.pick("m", CHAT, {}, []).policy
    assert mine.rank.__self__.keys == ("field:chat",)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule(policy="sesion"), r"unknown rule\[0\] policy 'sesion'; choose one of cache-aware.*"),
        (
            Rule(name="x", policy="session", parameters={"key": ["field:user"]}),
            r"rule\[0\] \(x\) policy session, parameters: .*unknown field `key`.*session has: keys, bound",
        ),
        (
            Rule(policy="prefix-hash", parameters={"messages": -1}),
            r"rule\[0\] policy prefix-hash, parameters: .*>= 0 - at `\$.messages`",
        ),
        (Rule(policy="round-robin", parameters={"bound": 2}), r"round-robin has: none"),
    ],
)
def test_rq16_what_no_policy_has_is_refused_with_the_place(rule: Rule, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        Rules([rule], POLICIES["cache-aware"])


def test_two_rules_of_one_name_are_refused() -> None:
    with pytest.raises(SettingsError, match="'x' is given twice"):
        Rules([Rule(name="x", policy="random")] * 2, POLICIES["cache-aware"])


def test_overrides_are_ignored_unless_they_are_allowed() -> None:
    headers = {"x-warmroute-policy": "random", "x-warmroute-replica": "a"}
    off = Rules([], POLICIES["cache-aware"]).pick("m", CHAT, headers, ["a"])
    assert (off.policy.name, off.pin) == ("cache-aware", None)
    on = Rules([], POLICIES["cache-aware"], allow_override=True).pick("m", CHAT, headers, ["a"])
    assert (on.policy.name, on.pin, on.asked) == ("random", "a", True)


def test_a_pin_may_name_a_rank_and_names_may_hold_slashes() -> None:
    rules = Rules([], POLICIES["cache-aware"], allow_override=True)
    pins = {
        pin: rules.pick("m", CHAT, {"x-warmroute-replica": pin}, ["a", "a/1", "b/c"]).pin
        for pin in ("a", "a/1", "a/2", "b/c", "b/c/3")
    }
    assert pins == {"a": "a", "a/1": "a/1", "a/2": ("a", 2), "b/c": "b/c", "b/c/3": ("b/c", 3)}


@pytest.mark.parametrize(
    "headers", [{"x-warmroute-policy": "nope"}, {"x-warmroute-replica": "z"}, {"x-warmroute-replica": "a/x"}]
)
def test_an_override_that_names_nothing_is_a_400_with_the_known_names(headers: dict[str, str]) -> None:
    with pytest.raises(RefusedError, match=r"is unknown here; known are (cache-aware|a)") as caught:
        Rules([], POLICIES["cache-aware"], allow_override=True).pick("m", CHAT, headers, ["a"])
    assert caught.value.status == 400


# in a router


async def test_a_rule_is_said_in_headers_decisions_metrics_and_debug(
    start_engine: Any, start_router: Any
) -> None:
    rules = (Rule(name="sessions", policy="session", headers={"x-app": "chat"}),)
    engines = [await start_engine() for _ in range(3)]
    router = await start_router(*engines, policy="least-loaded", rule=rules)
    replicas = set()
    for user in ("u", "u", "u"):
        body = {"model": "m", "prompt": "hello", "user": user}
        async with router.client.post(
            f"{router.url}/v1/completions", json=body, headers={"X-App": "chat"}
        ) as response:
            replicas.add(response.headers["x-warmroute-replica"])
            assert response.headers["x-warmroute-rule"] == "sessions"
            assert response.headers["x-warmroute-policy"] == "session"
    assert len(replicas) == 1
    assert sum(engine.tokenized for engine in engines) == 0
    decision = (await router.get("/debug/decisions?limit=1"))["decisions"][0]
    assert (decision["rule"], decision["policy"]) == ("sessions", "session")
    assert "u" not in {str(value) for value in decision.values()}
    assert await router.metric("rule_requests_total", rule="sessions") == 3
    shown = await router.get("/debug/rules")
    assert (shown["default"], shown["rules"][0]["requests"]) == ("least-loaded", 3)
    assert shown["default_requests"] == 0
    other = await router.complete()
    assert (await router.get("/debug/rules"))["default_requests"] == 1
    assert (other.headers["x-warmroute-policy"], "x-warmroute-rule" in other.headers) == (
        "least-loaded",
        False,
    )


async def test_rq10_a_session_sticks_moves_when_its_replica_goes_and_stays_there(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    engines = [await start_engine() for _ in range(3)]
    router = await start_router(*engines, policy="session")

    async def turn(user: str) -> str:
        response = await router.complete("hello", user=user)
        assert response.status == 200
        replica: str = response.headers["x-warmroute-replica"]
        return replica

    first = {str(n): await turn(str(n)) for n in range(30)}
    assert set(first.values()) == {"e0", "e1", "e2"}
    assert {user: await turn(user) for user in first} == first
    await engines[1].stop()
    moved = {user: await turn(user) for user in first}
    assert all(moved[user] == replica for user, replica in first.items() if replica != "e1")
    assert "e1" not in moved.values()
    await engines[1].start(engines[1].port)
    await kit.wait_until(lambda: router.parts.fleet.replicas["e1"].usable, "it is back")
    assert {user: await turn(user) for user in first} == moved


async def test_rq16_a_request_without_a_key_falls_back_to_load_and_says_so(
    start_engine: Any, start_router: Any
) -> None:
    router = await start_router(await start_engine(), policy="session")
    response = await router.complete("hello")
    assert response.headers["x-warmroute-reason"].startswith("fallback: the request has no key")
    assert await router.metric("decisions_total", policy="session", mode="fallback") == 1
    assert await router.metric("fallback_total", reason="no-key") == 1


async def test_prefix_hash_by_tokens_asks_an_engine_and_by_messages_does_not(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    engine = await start_engine()
    by_text = await start_router(engine, policy="prefix-hash", lookup=kit.lookup(kit.matched("e0", 16)))
    assert (
        (await by_text.complete("hello"))
        .headers["x-warmroute-reason"]
        .startswith("prefix hash: place 1 of 1")
    )
    assert engine.tokenized == 0
    by_ids = await start_router(engine, policy="prefix-hash", policy_parameters={"boundary": "tokens"})
    assert (await by_ids.complete("hello")).headers["x-warmroute-prompt-tokens"] == "5"
    assert engine.tokenized == 1


async def test_prefix_hash_by_tokens_sends_chats_with_images_by_what_is_in_front_of_them(
    start_engine: Any, start_router: Any
) -> None:
    engines = [await start_engine() for _ in range(4)]
    router = await start_router(*engines, policy="prefix-hash", policy_parameters={"boundary": "tokens"})

    async def replica(text: str, picture: str) -> str:
        image = {"type": "image_url", "image_url": {"url": picture}}
        messages = [{"role": "user", "content": [{"type": "text", "text": text}, image]}]
        body = {"model": "m", "messages": messages}
        async with router.client.post(f"{router.url}/v1/chat/completions", json=body) as response:
            assert response.headers["x-warmroute-reason"].startswith("prefix hash: place 1 of 4")
            return str(response.headers["x-warmroute-replica"])

    first = [await replica(f"prompt {number}", "cat") for number in range(8)]
    assert [await replica(f"prompt {number}", "dog") for number in range(8)] == first
    assert len(set(first)) > 1


async def test_a_pin_goes_there_or_nowhere(start_engine: Any, start_router: Any, kit: Any) -> None:
    engines = [await start_engine(), await start_engine()]
    router = await start_router(*engines, allow_override=True, policy="random")

    async def ask(**headers: str) -> Any:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with router.client.post(
            f"{router.url}/v1/completions", json={"model": "m", "prompt": "x"}, headers=named
        ) as response:
            await response.read()
            return response

    for _ in range(5):
        response = await ask(x_warmroute_replica="e1", x_warmroute_policy="least-loaded")
        assert response.headers["x-warmroute-replica"] == "e1"
        assert "policy as asked for; replica as asked for" in response.headers["x-warmroute-reason"]
    assert (await ask(x_warmroute_replica="e9")).status == 400
    await engines[1].stop()
    await kit.wait_until(lambda: not router.parts.fleet.replicas["e1"].usable, "it is down")
    response = await ask(x_warmroute_replica="e1")
    assert (response.status, response.headers["x-warmroute-reason"]) == (
        503,
        "the replica asked for cannot take it",
    )


async def test_a_refusal_names_the_policy_that_the_rule_chose(
    start_engine: Any, start_router: Any, kit: Any
) -> None:
    gate = asyncio.Event()
    engine = await start_engine(answer=kit.gated(gate))
    rule = Rule(policy="random", path="/v1/completions")
    router = await start_router(engine, rule=(rule,), max_inflight=1)
    first = asyncio.create_task(router.complete("x"))
    await kit.wait_until(lambda: engine.open == 1, "it is full")
    refused = await router.complete("x")
    assert (refused.status, refused.headers["x-warmroute-policy"]) == (503, "random")
    assert await router.metric("requests_total", policy="random", replica="", status="503") == 1
    gate.set()
    await first


async def test_rules_are_for_every_path_as_far_as_policies_need_no_tokens(
    start_engine: Any, start_router: Any
) -> None:
    router = await start_router(
        *[await start_engine() for _ in range(4)],
        rule=(
            Rule(name="sessions", policy="session", headers={"x-app": "agent"}),
            Rule(name="documents", policy="prefix-hash", path="/v1/responses"),
            Rule(
                name="tokens", policy="prefix-hash", parameters={"boundary": "tokens"}, path="/v1/embeddings"
            ),
            Rule(name="warm", policy="cache-aware", path="/v1/rerank"),
            Rule(name="even", policy="round-robin", path="/v1/score"),
        ),
    )

    async def send(path: str, body: Any, **headers: str) -> tuple[str, str, str, str]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with router.client.post(f"{router.url}{path}", json=body, headers=named) as response:
            assert response.status == 200
            said = ("policy", "rule", "replica", "reason")
            policy, rule, replica, reason = (response.headers.get(f"x-warmroute-{name}", "") for name in said)
            return policy, rule, replica, reason

    agents = [await send("/v1/messages", {"model": "m"}, x_app="agent", x_session_id="s") for _ in range(6)]
    assert {found[:2] for found in agents} == {("session", "sessions")}
    assert len({replica for _, _, replica, _ in agents}) == 1
    responses = [
        await send("/v1/responses", {"model": "m", "instructions": "Be brief.", "input": [{"role": "user"}]})
        for _ in range(6)
    ]
    assert len({replica for _, _, replica, _ in responses}) == 1
    assert all(reason.startswith("prefix hash:") for _, _, _, reason in responses)
    even = [await send("/v1/score", {"model": "m"}) for _ in range(4)]
    assert len({replica for _, _, replica, _ in even}) == 4
    for path, headers in (("/v1/embeddings", {}), ("/v1/rerank", {}), ("/v1/messages", {"x_app": "agent"})):
        *_, reason = await send(path, {"model": "m"}, **headers)
        assert reason.startswith("fallback: "), path
    policy, rule, _, reason = await send("/v1/other", {"model": "m"})
    assert (policy, rule) == ("least-loaded", "")
    assert reason.startswith("least load")
    assert await router.metric("fallback_total", reason="no-tokens") == 2
    assert await router.metric("fallback_total", reason="no-key") == 1


async def test_the_default_policy_is_for_every_path_too(start_engine: Any, start_router: Any) -> None:
    router = await start_router(*[await start_engine() for _ in range(4)], policy="session")
    chosen = set()
    for path in ("/v1/embeddings", "/v1/responses", "/v1/messages"):
        for _ in range(3):
            body = {"model": "m", "user": "u"}
            async with router.client.post(f"{router.url}{path}", json=body) as response:
                chosen.add(response.headers["x-warmroute-replica"])
    assert len(chosen) == 1
    async with router.client.post(f"{router.url}/v1/embeddings", json={"model": "m"}) as response:
        assert response.headers["x-warmroute-policy"] == "least-loaded"


def test_other_paths_say_the_same_in_other_words() -> None:
    chat = [{"role": "user", "content": "hi"}]
    for body, messages in (
        ({"messages": chat, "system": "S"}, [{"role": "system", "content": "S"}, *chat]),
        ({"messages": [], "system": "S"}, [{"role": "system", "content": "S"}]),
        (
            {"input": "hi", "instructions": "S"},
            [{"role": "system", "content": "S"}, *chat],
        ),
        ({"input": chat}, chat),
        ({"input": ["a", "b"]}, None),
    ):
        read = read_other(json.dumps({"model": "m", **body}).encode(), "application/json")
        assert read.model == "m"
        assert (json.loads(bytes(read.messages)) if given(read.messages) else None) == messages
    assert json.loads(bytes(read.prompt)) == ["a", "b"]
    assert read_other(b"\xff{", "application/json") == RequestBody()
    assert read_other(b'{"model": "m"}', "text/plain") == RequestBody()
