"""Text to tokens and back, over a `tokenizer.json`. Knows the special tokens of a model; knows nothing of templates or engines."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Set
from typing import Any

import tokenizers

from arctool.errors import RequestError, SourceError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_FILE = "special_tokens_map.json"
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer. `special`: the named special tokens that templates refer to ("bos_token": "<s>", ...)."""

    def __init__(self, assets: Mapping[str, bytes], vocab_size: int) -> None:
        """`assets`: file name → bytes, with tokenizer.json. Raises SourceError if it is missing, unusable or too large a vocabulary."""
        if TOKENIZER_FILE not in assets:
            raise SourceError(f"{TOKENIZER_FILE}: missing; without it only token ids can be generated")
        self._tokenizer = _parse(assets[TOKENIZER_FILE])
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.longest = max(map(len, vocabulary), default=0)
        """Characters of the longest token. A token that stands for part of a character counts as more than it has of it."""
        self.size = max(vocabulary.values(), default=-1) + 1
        """One more than the highest token id; a model may have more rows, which mean nothing."""
        if not 0 < self.size <= vocab_size:
            raise SourceError(f"{TOKENIZER_FILE}: expected 1 to {vocab_size} tokens (vocab_size of config.json), found {self.size}")
        # tokenizer_config.json is the newer of the two; some models name their special tokens in the other only.
        self.special = {name: token for file in (SPECIAL_FILE, CONFIG_FILE) for name, token in _special_tokens(assets, file).items()}
        added = self._tokenizer.get_added_tokens_decoder()
        self.added = {t.content: i for i, t in added.items()}
        """Tokens that stand beside the vocabulary, by their text: the special ones, and others that are never split."""
        self._names = {i: t.content for i, t in added.items()}
        self._spelling = _spelling(self._tokenizer)
        self._hidden = frozenset(i for i, t in added.items() if t.special)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """`add_special_tokens` for plain text; a rendered chat brings its own, and a second BOS would follow from adding them.

        Raises RequestError for text that the tokenizer has no tokens for.
        """
        try:
            text.encode("utf-8")
        except (UnicodeEncodeError, AttributeError) as error:
            raise RequestError(f"prompt: expected text that is valid Unicode: {error}") from error
        encoding = _guarded("prompt: cannot be encoded", lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        return list(encoding.ids)

    def decode(self, ids: list[int], shown: Set[int] = frozenset()) -> str:
        """The text of `ids` without special tokens, but for those in `shown`; ids without a token give nothing.

        Raises RequestError where decoding fails.
        """
        kept = [i for i in ids if not self.is_hidden(i, shown)] if shown else ids
        return str(_guarded("token ids: cannot be decoded", lambda: self._tokenizer.decode(kept, skip_special_tokens=not shown)))

    def token_id(self, token: str) -> int | None:
        """The id of a token given by its text."""
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for, a special one's name included; put together, those of a text are its UTF-8.

        A token may be part of a character. Ids without a token give nothing.
        """
        if token in self._names:
            return self._names[token].encode()
        text = self._tokenizer.id_to_token(token)
        return b"" if text is None else self._spelling(str(text))

    def is_hidden(self, token: int, shown: Set[int] = frozenset()) -> bool:
        """Whether a token is special, and so not part of a text that does not ask for it by `shown`."""
        return token in self._hidden and token not in shown

    def to_json(self) -> str:
        """The text of a tokenizer.json, for libraries that read one themselves."""
        return str(self._tokenizer.to_str())

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The id of the end token that the tokenizer itself names."""
        found = self.token_id(self.special["eos_token"]) if "eos_token" in self.special else None
        return () if found is None else (found,)


def _spelling(tokenizer: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """From the text of a token in the vocabulary to its bytes: byte-level BPE writes every byte as a character of its own (GPT-2),
    SentencePiece a space as ▁ and bytes that no token has as <0xE2>."""
    decoder = json.dumps(json.loads(tokenizer.to_str()).get("decoder"))
    if '"ByteLevel"' in decoder:
        bytes_of = _gpt2_bytes()
        return lambda text: b"".join(bytes_of.get(c) or c.encode() for c in text)

    def of_sentencepiece(text: str) -> bytes:
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes.fromhex(text[3:5])
        return text.replace("\u2581", " ").encode()

    return of_sentencepiece


def _gpt2_bytes() -> dict[str, bytes]:
    """Character → byte of byte-level BPE: printable Latin-1 stands for itself, the others follow from U+0100 on (GPT-2's encoder)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {**{chr(byte): bytes([byte]) for byte in printable}, **{chr(256 + i): bytes([byte]) for i, byte in enumerate(others)}}


def json_asset(assets: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """A JSON object among the assets, {} if the file is not there. Raises SourceError if it is anything else."""
    if name not in assets:
        return {}
    try:
        value = json.loads(assets[name])
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{name}: expected JSON: {error}") from error
    if not isinstance(value, dict):
        raise SourceError(f"{name}: expected a JSON object, found a {type(value).__name__}")
    return value


def _guarded(what: str, act: Callable[[], Any]) -> Any:
    """`act()`; whatever the library raises becomes a RequestError `what by tokenizer.json: reason`.

    The library raises bare `Exception`, and a panic inside it is not even that.
    """
    try:
        return act()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise RequestError(f"{what} by {TOKENIZER_FILE}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _parse(data: bytes) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(data.decode("utf-8"))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic inside the library is not an Exception
        raise SourceError(f"{TOKENIZER_FILE}: cannot be read: {_first_line(error)}") from error


def _special_tokens(assets: Mapping[str, bytes], file: str) -> dict[str, str]:
    """The special tokens that `file` names; a token is written as its text or as an object with `content`."""
    config = json_asset(assets, file)
    found: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        value = config.get(name)
        content = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(content, str):
            found[name] = content
        elif value is not None:
            raise SourceError(f"{file}: {name}: expected a text or an object with content, found {type(value).__name__}")
    return found
