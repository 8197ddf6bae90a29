"""A SentencePiece vocabulary (llama.cpp's `llama` model: pieces with scores) as the parts of a tokenizer.json.

SentencePiece joins, again and again, the two neighbours whose joined piece has the highest score. The same order as a merge list: every
way to cut a piece into two other pieces, best score first. Characters that are no piece become byte pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SPACE = "▁"
"""What SentencePiece writes for a space (U+2581)."""

MAX_PIECE = 256
"""Characters of the longest piece that is joined from others: `merges` tries every cut. SentencePiece trains at most 16 by default."""

UNKNOWN, BYTE = 2, 6
"""Token types that this kind of vocabulary has besides those of `gguf_tokenizer`."""


def merges(tokens: Sequence[str], scores: Sequence[float], joinable: Sequence[bool]) -> list[list[str]]:
    """The merge list of a vocabulary. `joinable[i]`: whether token i is text, not a control, unknown or byte piece.

    Time grows with the square of a token's length; the caller refuses those above `MAX_PIECE`.
    """
    known = {token: score for token, score, text in zip(tokens, scores, joinable, strict=True) if text}
    ranked = []
    for token, score in known.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in known and right in known:
                ranked.append((-score, -cut, left, right))
    ranked.sort()
    return [[left, right] for _, _, left, right in ranked]


def parts(tokens: Sequence[str], merge_list: list[list[str]], unknown: str | None, space_first: bool) -> dict[str, Any]:
    """Normalizer, pre-tokenizer, decoder and model of tokenizer.json. `space_first`: text begins with an implied space."""
    to_mark = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    from_mark = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    prepend = [{"type": "Prepend", "prepend": SPACE}]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*(prepend if space_first else []), to_mark]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [from_mark, {"type": "ByteFallback"}, {"type": "Fuse"}, *(strip if space_first else [])],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": merge_list,
        },
    }
