"""A model's tokenizer in this process: its ``tokenizer.json`` by ``tokenizers``, its chat template by Jinja.

Where the files do not say it all, or where engines say otherwise, ``transformers`` reads them.

Loading may take long and is for threads, and so is tokenising more than a little text. A loaded tokenizer is
never changed, so threads share it.
"""

from __future__ import annotations

import importlib
import logging
import os
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import msgspec
from xxhash import xxh3_128_digest

from router.common_prefix import common_chars
from router.conversation import Chat, ContentFormat, InexactError
from router.converted_tokenizer import converted
from router.cuts import Cuts, cuts_of
from router.encoding import encoded, panics_raised
from router.errors import RouterError
from router.heap import give_back
from router.token_cache import TokenCache
from router.tokenizer_files import AddedToken, NotPlainError, TokenizerFiles, fetched, read_files
from router.words import Words, words_of

log = logging.getLogger(__name__)


class TokenizerLoadError(RouterError):
    """A tokenizer that could not be loaded, and why."""


class Templates(Protocol):
    """A model's chat templates; ``sources`` are their texts."""

    sources: Sequence[str]

    def render(self, chat: Chat) -> str:
        """The text of a chat. Raises InexactError where the template refuses it."""
        ...


class _Around(msgspec.Struct, frozen=True):
    """The ids that the tokenizer puts in front of and behind a text, if it is asked to add special tokens."""

    before: array[int]
    behind: array[int]


_NOTHING = _Around(array("I"), array("I"))


class LocalTokenizer:
    """``name`` is what its tokens are kept under in ``cache``; no two tokenizers may share it. ``is_plain``:
    it was read without ``transformers``.
    """

    def __init__(
        self, backend: Any, templates: Templates, name: str, cache: TokenCache, *, is_plain: bool
    ) -> None:
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self._templates = templates
        self._name = name
        self._cache = cache
        self._cuts: Cuts | None = cuts_of(backend)
        self._words: Words | None = words_of(backend, self._cuts)
        self._around = _around(backend)
        self.is_plain = is_plain

    @property
    def cuts_texts(self) -> bool:
        """Whether the turns of a conversation are tokenised one by one."""
        return self._cuts is not None

    def render(self, chat: Chat) -> str:
        """The text of a chat. Raises InexactError where the template refuses it."""
        return self._templates.render(chat)

    def content_format(self) -> ContentFormat:
        """What the template seems to want of a message's content, where no engine can be asked."""
        formats: Any = importlib.import_module("router.chat_template")
        found: ContentFormat = formats.content_format(self._templates.sources)
        return found

    def encode(self, text: str, add_special_tokens: bool) -> array[int]:
        """The ids of a text, most of them from the cache if it goes on from one that was seen."""
        return self.begin(text, add_special_tokens).ids()

    def places(self, text: str) -> int:
        """In how many places :meth:`begin` has to look for a special token, at most."""
        return 0 if self._cuts is None else self._cuts.places(text)

    def begin(self, text: str, add_special_tokens: bool) -> Begun:
        """Looks up what is known of a text: quick, whatever is not."""
        around = self._around if add_special_tokens else _NOTHING
        if self._cuts is None or around is None:
            return Begun(self, _NOTHING, [None], [_Missing(0, text, b"")], add_special_tokens)
        parts: list[array[int] | None] = []
        missing: list[_Missing] = []
        for piece in self._cuts.pieces(text):
            digest = _digest(piece)
            kept = self._cache.get(self._name, digest)
            if kept is None:
                missing.append(_Missing(len(parts), piece, digest))
            parts.append(kept)
        return Begun(self, around, parts, missing, False)

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
        shared = common_chars(text, other)
        brought = set(Counter(self._cuts.added(text)) - Counter(self._cuts.added(other)))
        doubtful = brought or {token for said in _strings(chat.messages) for token in self._cuts.added(said)}
        ids, at = array("I"), 0
        for piece in self._cuts.all_pieces(text):
            at += len(piece)
            if at > shared or not doubtful.isdisjoint(self._cuts.added(piece)):
                break
            ids.extend(self._piece(piece))
        return ids

    def _piece(self, piece: str) -> array[int]:
        digest = _digest(piece)
        kept = self._cache.get(self._name, digest)
        return self.make([_Missing(0, piece, digest)], False)[0] if kept is None else kept

    def make(self, missing: Sequence[_Missing], add_special_tokens: bool) -> list[array[int]]:
        """The ids of texts that are not known; kept, if they have a digest. Raises InexactError for what is
        no text.
        """
        era = self._cache.era(self._name)
        texts = [part.text for part in missing]
        try:
            ids = self._made(texts, add_special_tokens)
        except TypeError as error:  # a half of a pair of surrogates: JSON may hold one, UTF-8 may not
            raise InexactError("surrogates") from error
        for part, its_ids in zip(missing, ids, strict=True):
            if part.digest:
                self._cache.put(self._name, era, part.digest, its_ids)
        return ids

    def _made(self, texts: Sequence[str], add_special_tokens: bool) -> list[array[int]]:
        if self._words is not None and not add_special_tokens:
            return [self._words.ids(text) for text in texts]
        return encoded(self._backend, texts, add_special_tokens)


class _Missing(msgspec.Struct, frozen=True):
    """A part of a text whose ids are not known: where it stands, and its digest if it may be kept."""

    at: int
    text: str
    digest: bytes


class Begun:
    """A text of which some is known. ``new_chars`` is how much is not."""

    def __init__(
        self,
        tokenizer: LocalTokenizer,
        around: _Around,
        parts: list[array[int] | None],
        missing: Sequence[_Missing],
        add_special_tokens: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._around = around
        self._parts = parts
        self._missing = missing
        self._add_special_tokens = add_special_tokens
        self.new_chars = sum(len(part.text) for part in missing)

    def ids(self) -> array[int]:
        """All ids, once the rest is tokenised. To be asked once, by whatever thread."""
        if self._missing:
            made = self._tokenizer.make(self._missing, self._add_special_tokens)
            for part, its_ids in zip(self._missing, made, strict=True):
                self._parts[part.at] = its_ids
        ids = array("I", self._around.before)
        for known in self._parts:
            assert known is not None
            ids.extend(known)
        ids.extend(self._around.behind)
        return ids


def _digest(piece: str) -> bytes:
    return xxh3_128_digest(piece.encode("utf-8", "surrogatepass"))


def _strings(value: Any) -> Iterator[str]:
    """All text in a value of JSON."""
    found = [value]
    while found:
        item = found.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            found += [*item, *item.values()]
        elif isinstance(item, list):
            found += item


def _around(backend: Any) -> _Around | None:
    """What is added to a text, found with one; None where that is not plain."""
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    places = [at for at in range(len(full) - len(bare) + 1) if full[at : at + len(bare)] == bare]
    if not bare or len(places) != 1:
        return None
    return _Around(array("I", full[: places[0]]), array("I", full[places[0] + len(bare) :]))


def load_tokenizer(source: str, name: str, cache: TokenCache) -> LocalTokenizer:
    """The tokenizer in a folder, or of a model on the Hugging Face hub (which may take as long as it takes);
    by ``transformers`` where its files do not say it all.

    Code that comes with a model is not run. Raises TokenizerLoadError.
    """
    try:
        with panics_raised():
            loaded = _plain(read_files(fetched(source)), name, cache)
    except NotPlainError as why:
        log.info("the tokenizer in %s is read by transformers: %s", source, why)
        return load_converted(source, name, cache, because=str(why))
    except Exception as error:  # from the network, from files, from libraries: all is said and tried again
        raise TokenizerLoadError(f"{source}: {type(error).__name__}: {error}") from error
    give_back()
    return loaded


def load_converted(source: str, name: str, cache: TokenCache, *, because: str = "") -> LocalTokenizer:
    """As :func:`load_tokenizer`, by ``transformers``."""
    _one_thread_each()
    try:
        with panics_raised():
            backend, templates = converted(source)
            loaded = LocalTokenizer(backend, templates, name, cache, is_plain=False)
    except Exception as error:
        said = f"{because}, and " if because else ""
        raise TokenizerLoadError(f"{source}: {said}{type(error).__name__}: {error}") from error
    give_back()
    return loaded


def _plain(files: TokenizerFiles, name: str, cache: TokenCache) -> LocalTokenizer:
    _one_thread_each()
    tokenizers: Any = importlib.import_module("tokenizers")
    chat_template: Any = importlib.import_module("router.chat_template")
    backend = tokenizers.Tokenizer.from_file(str(files.tokenizer))
    special_tokens, more = files.special_tokens, list(files.more)
    if backend.padding is not None and "pad_token" not in special_tokens:
        special_tokens = {**special_tokens, "pad_token": backend.padding["pad_token"]}
        more.append(AddedToken(content=special_tokens["pad_token"], special=True))
    _add(backend, files.tokens, tokenizers.AddedToken)
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    _add(backend, [token for token in more if token.content not in known], tokenizers.AddedToken)
    backend.encode_special_tokens = files.splits_special_tokens
    templates = chat_template.ChatTemplates(files.templates, special_tokens)
    return LocalTokenizer(backend, templates, name, cache, is_plain=True)


def _add(backend: Any, tokens: Iterable[AddedToken], kind: Any) -> None:
    """The first of several with one content counts."""
    first: dict[str, AddedToken] = {}
    for token in tokens:
        first.setdefault(token.content, token)
    backend.add_tokens([kind(**token.as_arguments()) for token in first.values()])


def _one_thread_each() -> None:
    """Each text is one thread's: a pool beside ours would only cost what waking it costs."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
