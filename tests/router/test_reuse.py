"""What in recorded prompts breaks their reuse, by recordings made for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from events.recording import Done, RecordingWriter, Sent
from router.reuse import BLOCK_TOKENS, Reuse, _written, measure
from warmroute import main

RULES = " ".join(f"Rule {number}: never do the thing number {number * 7}." for number in range(40))
FACTS = [f"Document {name}: " + " ".join(f"{name} has fact {n}." for n in range(40)) + "\n" for name in "abc"]


def recorded(folder: Path, bodies: Sequence[dict[str, Any]], *, known: bool = True, cached: int = 0) -> Path:
    """A recording of requests, a token for each character where tokens are known."""
    path = folder / f"{len(list(folder.iterdir()))}.jsonl"
    writer = RecordingWriter(path)
    for number, body in enumerate(bodies):
        text = "".join(each["content"] for each in body["messages"])
        tokens = [ord(letter) for letter in text] if known else None
        sent = {"model": "m"} | body
        writer.write(Sent(id=number, src="e0", t=float(number), path="/", body=sent, tokens=tokens))
        writer.write(Done(id=number, prompt_tokens=len(text), cached_tokens=cached))
    writer.close()
    return path


def chat(*contents: str, **more: Any) -> dict[str, Any]:
    roles = ("system", "user", "assistant", "user")
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]} | more


def look(folder: Path, *bodies: dict[str, Any], **more: Any) -> Reuse:
    return measure(recorded(folder, bodies, **more))


@pytest.mark.parametrize("known", [True, False])
def test_a_time_in_front_of_the_rules_is_found_as_what_breaks_their_reuse(
    tmp_path: Path, known: bool
) -> None:
    bodies = [chat(f"It is 22:{minute:02d}. {RULES}", f"question {minute}") for minute in range(8, 13)]
    found = look(tmp_path, *bodies, known=known)
    assert found.reusable == 0
    assert found.guessed == (0 if known else 5)
    (one,) = found.breaks
    assert (one.place, one.requests) == ("messages[0] (system)", 4)
    assert one.before.endswith("It is 22:1")
    assert (one.here[:8], one.earlier[:8]) == ("2. Rule ", "1. Rule ")
    assert one.lost_tokens == pytest.approx(4 * len(RULES) / (1 if known else 4), rel=0.02)
    assert "Other prompts can" in found.verdict()


def test_a_conversation_that_grows_loses_nothing_and_is_reusable_by_whole_blocks(tmp_path: Path) -> None:
    first, second = (
        chat(RULES, "Hello there, you."),
        chat(RULES, "Hello there, you.", "Hi.", "What can you do?"),
    )
    found = look(tmp_path, first, second)
    assert found.breaks == ()
    assert found.reusable == (len(RULES) + len("Hello there, you.")) // BLOCK_TOKENS * BLOCK_TOKENS


def test_documents_in_another_order_and_tools_in_another_order_are_found(tmp_path: Path) -> None:
    one, other = (chat("Answer.", "".join(order) + "What?") for order in (FACTS, FACTS[::-1]))
    (of_documents,) = look(tmp_path, one, other).breaks
    assert of_documents.place == "messages[1] (user)"
    assert of_documents.lost_tokens > 0.9 * sum(map(len, FACTS))
    tools = [{"name": f"tool_{name}", "description": fact} for name, fact in zip("abc", FACTS, strict=True)]
    one, other = (chat(RULES, "What?", tools=order) for order in (tools, tools[::-1]))
    assert look(tmp_path, one, other).breaks[0].place == "tools"


def test_prompts_of_another_model_or_salt_are_not_compared(tmp_path: Path) -> None:
    same = chat(RULES, "What?")
    found = look(tmp_path, same, same | {"model": "other"}, same | {"cache_salt": "s"})
    assert (found.reusable, found.breaks) == (0, ())
    assert found.verdict().startswith("These prompts begin alike next to nowhere")


def test_the_verdict_says_what_routing_can_gain(tmp_path: Path) -> None:
    bodies = [chat(RULES, f"question {number}") for number in range(20)]
    for cached, said in (
        (0, "Routing by caches can gain"),
        (1500, "Engines have what can"),
        (1e4, "Engines had more"),
    ):
        assert look(tmp_path, *bodies, cached=int(cached)).verdict().startswith(said)
    assert look(tmp_path).verdict().startswith("Nothing can be said")


def test_requests_that_are_tokens_alone_or_of_strange_form_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "strange.jsonl"
    writer = RecordingWriter(path)
    for number, body in enumerate(
        (
            {"prompt": [*range(100)]},
            {"prompt": [*range(100)]},
            {},
            {"messages": 3},
            {"messages": [None, {"content": 3}]},
        )
    ):
        writer.write(Sent(id=number, src="e0", t=0.0, path="/", body=body))
    writer.close()
    found = measure(path)
    assert (found.requests, found.guessed, found.prompt, found.reusable) == (5, 3, 200, 96)


def test_tools_that_are_nested_deeply_are_passed_over(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(400):
        deep = [deep]
    found = look(tmp_path, *(chat(f"It is 22:{n}. {RULES}", "What?", tools=deep) for n in range(10, 12)))
    assert found.requests == 2
    for _ in range(5000):
        deep = [deep]
    assert _written(deep) == ""


def test_the_command_prints_places_and_refuses_in_one_line(tmp_path: Path) -> None:
    path = recorded(tmp_path, [chat(f"It is 22:{minute}. {RULES}", "What?") for minute in range(10, 20)])
    run = CliRunner().invoke
    shown = run(main, ["reuse", str(path)], catch_exceptions=False).stdout
    assert "messages[0] (system)" in shown
    assert "10 requests" in " ".join(shown.split())
    said = json.loads(run(main, ["reuse", str(path), "--json"]).stdout)["recordings"][0]
    assert said["breaks"][0]["requests"] == 9
    assert said["verdict"] in " ".join(shown.split())
    for wrong in (tmp_path / "none", Path(__file__)):
        refused = run(main, ["reuse", str(wrong)])
        assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
