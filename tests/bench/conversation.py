"""A scripted conversation through a running router: predicted against reported cached tokens, turn by turn.

    python tests/bench/conversation.py --router http://127.0.0.1:8080 --model MODEL

One request at a time, so every prediction must be exact; exits with 1 otherwise. The engines need
``--enable-prompt-tokens-details``.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from typing import Any

import click
from rich.console import Console
from rich.table import Table

SYSTEM_PROMPTS = (
    "You are the guide of a museum of clocks. " + "Answer in one short sentence and name the room. " * 12,
    "You are a careful translator. " + "Keep names, numbers and units as they are. " * 16,
)
QUESTIONS = (
    "Where do I begin?",
    "Which piece is the oldest, and why is it kept behind glass?",
    "Tell me about «Großvater's» pendulum — in 日本語 if you can 🕰️.",
    "And the last one again, please?",
)
SETTLE_S = 0.4


def post(url: str, body: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """The headers (lower case) and the JSON body of an answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        return {name.lower(): value for name, value in response.headers.items()}, json.load(response)


def requests_of(model: str, ask: Any) -> Any:
    """Sends the script; yields a label, the answer's headers and its usage for each request."""
    for round_number in (1, 2):
        for number, system in enumerate(SYSTEM_PROMPTS, 1):
            messages = [{"role": "system", "content": system}]
            for turn, question in enumerate(QUESTIONS, 1):
                messages.append({"role": "user", "content": f"{question} ({round_number})"})
                body = {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0}
                headers, answer = ask("/v1/chat/completions", body)
                messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
                yield f"chat {number}.{round_number} turn {turn}", headers, answer["usage"]
    for salt in (None, "tenant-1", "tenant-1", "tenant-2"):
        body = {"model": model, "prompt": SYSTEM_PROMPTS[1], "max_tokens": 1} | (
            {"cache_salt": salt} if salt else {}
        )
        headers, answer = ask("/v1/completions", body)
        yield f"completion, salt {salt or 'none'}", headers, answer["usage"]


@click.command()
@click.option("--router", default="http://127.0.0.1:8080", show_default=True)
@click.option("--model", default="model", show_default=True)
def main(router: str, model: str) -> None:
    """Sends the conversation and prints the table."""

    def ask(path: str, body: dict[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
        answer = post(router + path, body)
        time.sleep(SETTLE_S)
        return answer

    table = Table("request", "replica", "prompt", "predicted", "reported", "")
    wrong = 0
    for label, headers, usage in requests_of(model, ask):
        reported = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        predicted = headers.get("x-warmroute-matched-tokens")
        right = predicted is not None and int(predicted) == reported
        right = right and headers["x-warmroute-prompt-tokens"] == str(usage["prompt_tokens"])
        wrong += not right
        table.add_row(
            label,
            headers["x-warmroute-replica"],
            str(usage["prompt_tokens"]),
            predicted or headers["x-warmroute-reason"],
            str(reported),
            "" if right else "wrong",
        )
    Console().print(table)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
