"""What templates say of the time, near a midnight of ours or of the engine's."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="the extra local-tokenizer is not installed")

from router import template_time
from router.chat_template import ChatTemplates
from router.conversation import Chat, InexactError
from router.converted_tokenizer import ConvertedTemplates
from router.template_time import certain_time
from tests.router import small_tokenizer

TEMPLATE = "Today is {{ strftime_now('%d %b %Y') }}. {{ messages[0].content }}"
CHAT = Chat([{"role": "user", "content": "x"}], None, {})
NOON = [datetime(2026, 11, 29, 11, 59, 59), datetime(2026, 11, 29, 13, 0, 1)]
MIDNIGHT = [datetime(2026, 11, 29, 23, 59, 59), datetime(2026, 11, 30, 0, 0, 1)]


def clock(monkeypatch: pytest.MonkeyPatch, shows: list[datetime]) -> None:
    monkeypatch.setattr(template_time, "moments", lambda: shows)


def test_ix09_a_date_is_said_unless_it_may_be_another_one_at_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    templates = ChatTemplates({"default": TEMPLATE}, {})
    clock(monkeypatch, NOON)
    assert templates.render(CHAT) == "Today is 29 Nov 2026. x"
    clock(monkeypatch, MIDNIGHT)
    with pytest.raises(InexactError, match="time"):
        templates.render(CHAT)
    assert ChatTemplates({"default": "{{ messages[0].content }}"}, {}).render(CHAT) == "x"


def test_ix09_a_time_of_day_is_never_sure_to_be_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, NOON)
    with pytest.raises(InexactError):
        certain_time("%H:%M")


def test_an_engine_may_go_by_utc_or_by_our_zone_and_clocks_are_seconds_apart() -> None:
    shown = template_time.moments()
    assert len(shown) == 4
    assert all(moment.tzinfo is None for moment in shown)
    assert shown[1] - shown[0] >= 2 * template_time.CLOCKS_APART


def test_ix09_a_template_that_the_library_renders_says_no_doubtful_date_either(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra transformers is not installed")
    tokenizer = transformers.AutoTokenizer.from_pretrained(small_tokenizer.save(tmp_path))
    tokenizer.chat_template = TEMPLATE
    templates = ConvertedTemplates(tokenizer)
    clock(monkeypatch, NOON)
    assert templates.render(CHAT).startswith("Today is ")
    clock(monkeypatch, MIDNIGHT)
    with pytest.raises(InexactError, match="time"):
        templates.render(CHAT)
