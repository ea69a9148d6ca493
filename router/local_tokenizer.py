"""A model's tokenizer in this process: ``transformers``, with its chat template.

Everything here may take long and is for worker threads. A loaded tokenizer is never changed, so threads
share it.
"""

from __future__ import annotations

import importlib
import logging
import os
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from xxhash import xxh3_128_digest

from router.conversation import Chat, ContentFormat, InexactError
from router.cuts import Cuts, cuts_of
from router.errors import RouterError
from router.token_cache import TokenCache

log = logging.getLogger(__name__)

AT_ONCE_CHARS = 512
"""New text that is tokenised in about the time that a thread takes to begin."""


class TokenizerLoadError(RouterError):
    """A tokenizer that could not be loaded, and why."""


class _Around(msgspec.Struct, frozen=True):
    """The ids that the tokenizer puts in front of and behind a text, if it is asked to add special tokens."""

    before: list[int]
    behind: list[int]


class LocalTokenizer:
    """``name`` is what its tokens are kept under in ``cache``; no two tokenizers may share it."""

    def __init__(self, tokenizer: Any, name: str, cache: TokenCache) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._name = name
        self._cache = cache
        self._cuts: Cuts | None = cuts_of(self._backend)
        self._around = _around(self._backend)
        self._content_format = _content_format(tokenizer.chat_template)

    @property
    def cuts_texts(self) -> bool:
        """Whether the turns of a conversation are tokenised one by one."""
        return self._cuts is not None

    def render(self, chat: Chat) -> str:
        """The text of a chat. Raises InexactError where the template refuses it."""
        try:
            text = self._tokenizer.apply_chat_template(
                chat.messages, tools=chat.tools, tokenize=False, **chat.kwargs
            )
        except Exception as error:  # templates raise what they like; the engine will say what it thinks of it
            raise InexactError("template-refused") from error
        if not isinstance(text, str):
            raise InexactError("template-refused")
        return text

    def encode(self, text: str, add_special_tokens: bool) -> array[int]:
        """The ids of a text, most of them from the cache if it goes on from one that was seen."""
        ids = self._encode(text, add_special_tokens, len(text))
        assert ids is not None
        return ids

    def encode_at_once(self, text: str, add_special_tokens: bool) -> array[int] | None:
        """As :meth:`encode`, where next to nothing of the text is new; else None."""
        return self._encode(text, add_special_tokens, AT_ONCE_CHARS)

    def _encode(self, text: str, add_special_tokens: bool, most_new: int) -> array[int] | None:
        """None if more than ``most_new`` characters are not in the cache."""
        around = self._around if add_special_tokens else None
        if self._cuts is None or (add_special_tokens and around is None):
            if len(text) > most_new:
                return None
            return self._ids(text, add_special_tokens)
        ids = array("I", around.before if around else ())
        for piece in self._cuts.pieces(text):
            digest = _digest(piece)
            kept = self._cache.get(self._name, digest)
            if kept is None:
                most_new -= len(piece)
                if most_new < 0:
                    return None
                kept = self._make(piece, digest)
            ids.extend(kept)
        ids.extend(around.behind if around else ())
        return ids

    def encode_before_media(self, chat: Chat, replaced: Chat) -> array[int]:
        """The ids in front of the first image of a chat (of :func:`router.conversation.read_media_chat`), as
        far as nothing that comes behind can change them. Raises InexactError.

        What the template makes of images begins where the two texts differ at the latest. A token that they
        bring, and that somebody wrote as text, may be taken for one of them: nothing counts from there on.
        Where the engine has yet to put them in, that is any added token that somebody wrote.
        """
        if self._cuts is None or chat.add_special_tokens:
            raise InexactError("media-not-cut")
        text, other = self.render(chat), self.render(replaced)
        if text == other:
            raise InexactError("media-not-rendered")
        shared = _shared_chars(text, other)
        brought = set(Counter(self._cuts.added(text)) - Counter(self._cuts.added(other)))
        doubtful = brought or {token for said in _strings(chat.messages) for token in self._cuts.added(said)}
        ids, at = array("I"), 0
        for piece in self._cuts.pieces(text):
            at += len(piece)
            if at > shared or not doubtful.isdisjoint(self._cuts.added(piece)):
                break
            ids.extend(self._piece(piece))
        return ids

    def _piece(self, piece: str) -> array[int]:
        digest = _digest(piece)
        kept = self._cache.get(self._name, digest)
        return self._make(piece, digest) if kept is None else kept

    def _ids(self, text: str, add_special_tokens: bool) -> array[int]:
        """All of the text anew. ``encode`` would hold the interpreter for its whole run, half a second for
        100,000 tokens, and the event loop with it; a batch lets go of it (``tokenizers`` 0.23:
        ``tokenizer.rs``), and this one leaves out offsets, which take as long as all the rest.
        """
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return array("I", encoding.ids)

    def _make(self, piece: str, digest: bytes) -> array[int]:
        ids = self._ids(piece, False)
        self._cache.put(self._name, self._cache.era(self._name), digest, ids)
        return ids

    def content_format(self) -> ContentFormat:
        """What the template seems to want of a message's content, where no engine can be asked: parts if it
        goes through something called content.
        """
        return self._content_format


def _digest(piece: str) -> bytes:
    return xxh3_128_digest(piece.encode("utf-8", "surrogatepass"))


def _content_format(template: str | dict[str, str] | None) -> ContentFormat:
    texts = list(template.values()) if isinstance(template, dict) else [template or ""]
    return "openai" if any(_loops_over_content(text) for text in texts) else "string"


def _loops_over_content(template: str) -> bool:
    jinja2 = importlib.import_module("jinja2")
    nodes = importlib.import_module("jinja2.nodes")
    try:
        parsed = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except jinja2.TemplateError:
        return False
    for loop in parsed.find_all(nodes.For):
        for node in [loop.iter, *loop.iter.find_all((nodes.Getattr, nodes.Getitem, nodes.Name))]:
            named = getattr(
                node, "attr", getattr(node, "name", getattr(getattr(node, "arg", None), "value", None))
            )
            if named == "content":
                return True
    return False


def _strings(value: Any) -> Iterator[str]:
    """All text in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _strings([*value, *value.values()])
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _shared_chars(one: str, other: str) -> int:
    """How many leading characters two texts share."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _around(backend: Any) -> _Around | None:
    """What is added to a text, found with one; None where that is not plain."""
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    places = [at for at in range(len(full) - len(bare) + 1) if full[at : at + len(bare)] == bare]
    if not bare or len(places) != 1:
        return None
    return _Around(full[: places[0]], full[places[0] + len(bare) :])


def load_tokenizer(source: str, name: str, cache: TokenCache) -> LocalTokenizer:
    """The tokenizer in a folder, or of a model on the Hugging Face hub (which may take as long as it takes).

    Code that comes with a model is not run. Raises TokenizerLoadError.
    """
    # Each text is one thread's: a pool beside ours would only cost what waking it costs.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        transformers: Any = importlib.import_module("transformers")
        local = Path(source).is_dir()
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            source, trust_remote_code=False, local_files_only=local
        )
        if not getattr(tokenizer, "is_fast", False):
            raise TokenizerLoadError(f"{source} has no fast tokenizer (tokenizer.json)")
        return LocalTokenizer(tokenizer, name, cache)
    except TokenizerLoadError:
        raise
    except (
        Exception
    ) as error:  # from the network, from files, from the library: all of it is said and tried again
        raise TokenizerLoadError(f"{source}: {type(error).__name__}: {error}") from error
