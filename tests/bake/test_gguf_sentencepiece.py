"""A SentencePiece vocabulary from GGUF tokenises as SentencePiece does: judged by its own greedy algorithm, written out here."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_gguf import write_gguf
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.trainers import BpeTrainer

from arctool.bake.source.checkpoint import open_checkpoint
from arctool.bake.source.gguf_sentencepiece import merges, parts
from arctool.errors import SourceError

ROOT = Path(__file__).resolve().parents[2]


def trained() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types laid out as SentencePiece does: specials, 256 bytes, joined pieces by rank, characters last."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = Metaspace()
    text = (ROOT / "fixtures" / "texts" / "training.txt").read_text()
    tokenizer.train_from_iterator([text], BpeTrainer(vocab_size=252, show_progress=False))
    vocab = tokenizer.get_vocab()
    pieces = sorted((token for token in vocab if len(token) > 1), key=vocab.__getitem__)
    characters = sorted(token for token in vocab if len(token) == 1)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *characters]
    count = len(pieces) + len(characters)
    return tokens, [0.0] * 259 + [-float(rank) for rank in range(count)], [2, 3, 3] + [6] * 256 + [1] * count


TOKENS, SCORES, TYPES = trained()


def sentencepiece(text: str) -> list[str]:
    """The algorithm: join the neighbours with the best-scoring piece, leftmost first, until nothing joins; the rest falls to bytes."""
    score = {token: s for token, s, kind in zip(TOKENS, SCORES, TYPES, strict=True) if kind == 1}
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        joined = [(score[a + b], -i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in score]
        if not joined:
            break
        at = -max(joined)[1]
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
    return [out for symbol in symbols for out in ([symbol] if symbol in score else [f"<0x{b:02X}>" for b in symbol.encode()])]


def tokenizer_of(tiny_llama: Path, target: Path, **changes: Any) -> Tokenizer:
    fields = {"model": "llama", "pre": "default", "tokens": TOKENS, "scores": SCORES, "token_type": TYPES, "merges": None, **changes}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    checkpoint = open_checkpoint(str(write_gguf(tiny_llama, target, "llama", metadata=metadata)))
    return Tokenizer.from_str(checkpoint.assets["tokenizer.json"].decode())


def _shared() -> Tokenizer:
    found = merges(TOKENS, SCORES, [kind == 1 for kind in TYPES])
    document = {"version": "1.0", "added_tokens": [], "post_processor": None, **parts(TOKENS, found, "<unk>", True)}
    return Tokenizer.from_str(json.dumps(document))


SHARED = _shared()


@settings(max_examples=300)
@given(text=st.text(alphabet='aehinorst  dlTCM,."é東🙂\n1', min_size=1, max_size=40))
def test_texts_are_cut_as_sentencepiece_cuts_them(text: str) -> None:
    assert SHARED.encode(text, add_special_tokens=False).tokens == sentencepiece(text)


def test_prose_is_cut_as_sentencepiece_cuts_it_and_comes_back(tiny_llama: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tiny_llama, tmp_path / "m.gguf")
    text = (ROOT / "fixtures" / "texts" / "heldout.txt").read_text()[:3000]
    encoded = tokenizer.encode(text, add_special_tokens=False)
    assert encoded.tokens == sentencepiece(text)
    assert len(encoded.tokens) < 0.7 * len(text)
    assert tokenizer.decode(encoded.ids) == text
    assert tokenizer.encode("She").tokens[0] == "<s>"
    assert tokenizer.encode("</s>", add_special_tokens=False).ids == [2]


def test_the_implied_space_can_be_off(tiny_llama: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tiny_llama, tmp_path / "m.gguf", add_space_prefix=False)
    ids = tokenizer.encode("the", add_special_tokens=False).ids
    assert "".join(tokenizer.id_to_token(i) for i in ids) == "the"
    assert tokenizer.decode(ids) == "the"


@pytest.mark.parametrize(
    ("changes", "culprit"),
    [
        ({"scores": None}, "scores"),
        ({"scores": [0.0]}, "scores"),
        ({"scores": [float("nan")] * len(TOKENS)}, "scores"),
        ({"token_type": [1] * len(TOKENS)}, "no byte piece <0x00>"),
        ({"pre": "llama-bpe"}, "unknown pre-tokenizer 'llama-bpe'"),
        ({"tokens": [*TOKENS[:-1], "a" * 257]}, r"tokens: token \d+ \('aaa.*\) has 257 characters"),
    ],
)
def test_a_vocabulary_that_is_not_whole_is_refused(changes: dict[str, Any], culprit: str, tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=culprit):
        tokenizer_of(tiny_llama, tmp_path / "m.gguf", **changes)
