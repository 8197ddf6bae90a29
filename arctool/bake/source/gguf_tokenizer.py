"""A GGUF file's vocabulary as tokenizer.json, tokenizer_config.json and generation_config.json.

GGUF stores the tokens and merges of a byte-level BPE but only the *name* of its pre-tokenizer. The names below stand for exact splitting
rules; any other name is refused, since a guessed rule gives other ids for some texts and nobody would notice.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from typing import Any

from arctool.bake.source.gguf_file import STRING, GgufArray, GgufFile
from arctool.bake.source.gguf_sentencepiece import BYTE, MAX_PIECE, UNKNOWN, merges, parts
from arctool.errors import SourceError

ELEMENTS: Mapping[type, tuple[int, ...]] = {str: (STRING,), int: (0, 1, 2, 3, 4, 5, 10, 11), float: (6, 12)}
"""Metadata element types that are texts, whole numbers, reals."""

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""Token types of llama.cpp's vocabularies."""

BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"
KINDS = (BYTE_LEVEL, SENTENCEPIECE)
"""The values of tokenizer.ggml.model that we read."""

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
QWEN2_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = QWEN2_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def _split(*patterns: str) -> dict[str, Any]:
    """Split by each pattern in turn, then map bytes to the visible alphabet."""
    steps = [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in patterns]
    return {"type": "Sequence", "pretokenizers": [*steps, _byte_level(use_regex=False)]}


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


PRE_TOKENIZERS: Mapping[str, dict[str, Any]] = {
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)],
    },
    "gpt-2": _byte_level(use_regex=True),
    "qwen2": _split(QWEN2_PATTERN),
    "llama-bpe": _split(LLAMA3_PATTERN),
    # llama.cpp's own rule for files whose converter did not recognise the tokenizer.
    "default": _split(r"[\p{P}\$\+<=>\^~\|]+", GPT2_PATTERN, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
NORMALIZERS: Mapping[str, dict[str, Any]] = {"qwen2": {"type": "NFC"}}
WHOLE_WORDS_FIRST = ("llama-bpe",)
"""Pre-tokenizers whose models take a word that is a token as it is, before any merge (`ignore_merges`)."""


def tokenizer_assets(file: GgufFile) -> dict[str, bytes]:
    """The tokenizer files of the checkpoint in `file`. Raises SourceError for an unknown kind of vocabulary or splitting."""
    vocabulary = _Vocabulary(file)
    assets = {
        "tokenizer.json": vocabulary.tokenizer_json(),
        "tokenizer_config.json": vocabulary.tokenizer_config(),
        "generation_config.json": vocabulary.generation_config(),
    }
    return {name: (json.dumps(value, ensure_ascii=False) + "\n").encode() for name, value in assets.items()}


class _Vocabulary:
    """The `tokenizer.*` metadata of a file, checked."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._path = file.path
        embedding = file.tensors.get("token_embd.weight")
        self._rows = 0 if embedding is None else embedding.shape[0]
        self._metadata = file.metadata
        self._kind = file.metadata.get("tokenizer.ggml.model")
        if self._kind not in KINDS:
            raise SourceError(
                f"{file.path}: tokenizer.ggml.model: {self._kind!r} cannot be turned into a tokenizer.json, only 'gpt2' (byte-level "
                "BPE) and 'llama' (SentencePiece) can; use the original checkpoint"
            )
        self._pre = file.metadata.get("tokenizer.ggml.pre", "default")
        known = PRE_TOKENIZERS if self._kind == BYTE_LEVEL else ("default",)
        if self._pre not in known:
            raise SourceError(
                f"{file.path}: tokenizer.ggml.pre: unknown pre-tokenizer {self._pre!r}; known: {', '.join(known)}; "
                "use the original checkpoint"
            )
        self.tokens = self._list("tokens", str)
        self.types = self._list("token_type", int) if "tokenizer.ggml.token_type" in file.metadata else [NORMAL] * len(self.tokens)
        if len(self.types) != len(self.tokens) or len(set(self.tokens)) != len(self.tokens):
            raise SourceError(
                f"{file.path}: tokenizer.ggml.tokens: expected {len(self.types)} distinct tokens, found {len(set(self.tokens))}"
            )

    def tokenizer_json(self) -> dict[str, Any]:
        add_bos = self._metadata.get("tokenizer.ggml.add_bos_token", self._pre == "llama-bpe" or self._kind == SENTENCEPIECE)
        bos = self._token("bos")
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": index, **self._added(index)} for index in self._special()],
            "post_processor": _bos_template(bos, self.tokens.index(bos)) if add_bos and bos is not None else None,
            **(self._byte_level_parts() if self._kind == BYTE_LEVEL else self._sentencepiece_parts()),
        }

    def _byte_level_parts(self) -> dict[str, Any]:
        return {
            "normalizer": NORMALIZERS.get(self._pre),
            "pre_tokenizer": PRE_TOKENIZERS[self._pre],
            "decoder": _byte_level(use_regex=True),
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": self._pre in WHOLE_WORDS_FIRST,
                "vocab": {token: index for index, token in enumerate(self.tokens)},
                "merges": [self._merge(merge) for merge in self._list("merges", str)],
            },
        }

    def _sentencepiece_parts(self) -> dict[str, Any]:
        scores = self._list("scores", float)
        if len(scores) != len(self.tokens) or not all(map(math.isfinite, scores)):
            raise SourceError(f"{self._path}: tokenizer.ggml.scores: expected {len(self.tokens)} finite numbers, found {len(scores)}")
        missing = {f"<0x{byte:02X}>" for byte in range(256)} - {t for t, k in zip(self.tokens, self.types, strict=True) if k == BYTE}
        if missing:
            raise SourceError(f"{self._path}: tokenizer.ggml.tokens: no byte piece {min(missing)}; only vocabularies with all 256 are read")
        joinable = [kind in (NORMAL, USER_DEFINED) for kind in self.types]
        for index, token in enumerate(self.tokens):
            if joinable[index] and len(token) > MAX_PIECE:
                raise SourceError(
                    f"{self._path}: tokenizer.ggml.tokens: token {index} ({reprlib.repr(token)}) has {len(token)} characters; "
                    f"a SentencePiece vocabulary with more than {MAX_PIECE} is not read"
                )
        merge_list = merges(self.tokens, scores, joinable)
        unknown = next((token for token, kind in zip(self.tokens, self.types, strict=True) if kind == UNKNOWN), None)
        return parts(self.tokens, merge_list, unknown, self._metadata.get("tokenizer.ggml.add_space_prefix", True))

    def tokenizer_config(self) -> dict[str, Any]:
        named = {f"{role}_token": self._token(key) for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}
        template = self._metadata.get("tokenizer.chat_template")
        return {
            "added_tokens_decoder": {str(index): self._added(index) for index in self._special()},
            **{role: token for role, token in named.items() if token is not None},
            **({"chat_template": template} if isinstance(template, str) else {}),
            "clean_up_tokenization_spaces": False,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }

    def generation_config(self) -> dict[str, Any]:
        ids = (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding"))
        return {field: self._id(key) for field, key in ids if self._id(key) is not None}

    def _special(self) -> list[int]:
        return [index for index, kind in enumerate(self.types) if kind in (CONTROL, USER_DEFINED, UNKNOWN)]

    def _added(self, index: int) -> dict[str, Any]:
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return {"content": self.tokens[index], **flags, "special": self.types[index] != USER_DEFINED}

    def _list(self, key: str, kind: type) -> list[Any]:
        """The list `tokenizer.ggml.<key>` of texts, whole numbers or reals; all but the merges have at most one entry a token."""
        where = f"{self._path}: tokenizer.ggml.{key}"
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(value, GgufArray) or value.kind not in ELEMENTS[kind]:
            found = "nothing" if value is None else "a list of others" if isinstance(value, GgufArray) else type(value).__name__
            raise SourceError(f"{where}: expected a list of {kind.__name__}, found {found}")
        if value.count > self._rows and key != "merges":
            raise SourceError(f"{where}: {value.count} entries, but token_embd.weight has {self._rows} rows")
        return self._file.array(f"tokenizer.ggml.{key}")

    def _merge(self, merge: str) -> list[str]:
        parts = merge.split(" ")
        if len(parts) != 2 or not all(parts):
            raise SourceError(f"{self._path}: tokenizer.ggml.merges: expected two tokens with a space between, found {merge!r}")
        return parts

    def _id(self, key: str) -> int | None:
        value = self._metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(self.tokens)):
            raise SourceError(f"{self._path}: tokenizer.ggml.{key}_token_id: expected an id below {len(self.tokens)}, found {value!r}")
        return value

    def _token(self, key: str) -> str | None:
        index = self._id(key)
        return None if index is None else self.tokens[index]


def _bos_template(bos: str, index: int) -> dict[str, Any]:
    """A post-processor that puts `bos` in front."""
    token, first, second = (
        {"SpecialToken": {"id": bos, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"Sequence": {"id": "B", "type_id": 1}},
    )
    return {
        "type": "TemplateProcessing",
        "single": [token, first],
        "pair": [token, first, token, second],
        "special_tokens": {bos: {"id": bos, "ids": [index], "tokens": [bos]}},
    }
