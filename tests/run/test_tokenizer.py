"""Tokens to text piece by piece, without broken characters, half stop strings or lost spaces."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import DirectorySource
from tokenizers import decoders, models

from arctool.errors import RequestError, SourceError
from arctool.run.detokenizer import StopStrings, StreamDecoder
from arctool.run.tokenizer import Tokenizer

CHECKPOINT = Path(__file__).resolve().parents[2] / "fixtures" / "checkpoints" / "llama"


@cache
def byte_level() -> Tokenizer:
    """The committed tokenizer of the tiny checkpoints: byte-level BPE, 512 tokens, three special ones."""
    return Tokenizer(DirectorySource(CHECKPOINT).assets, 512)


@cache
def metaspace() -> Tokenizer:
    """A SentencePiece-like tokenizer: "▁" for spaces, and bytes where a character is unknown."""
    vocab = {f"<0x{b:02X}>": b for b in range(256)} | {"<s>": 256, "▁": 257, "▁the": 258, "▁cat": 259, "s": 260, "▁é": 261}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<s>"))
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    inner.add_special_tokens(["<s>"])
    return Tokenizer({"tokenizer.json": inner.to_str().encode()}, 300)


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.push(i) for i in ids), decoder.flush()]


@settings(max_examples=500)
@given(st.lists(st.integers(0, 511), max_size=40))
def test_any_token_sequence_streams_to_exactly_its_decoded_text(ids: list[int]) -> None:
    assert "".join(stream(byte_level(), ids)) == byte_level().decode(ids)


@settings(max_examples=300)
@given(st.text(max_size=20))
def test_text_of_any_alphabet_streams_without_a_replacement_character(text: str) -> None:
    ids = byte_level().encode(text, add_special_tokens=False)
    pieces = stream(byte_level(), ids)
    assert "".join(pieces) == byte_level().decode(ids)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_of_several_tokens_leaves_whole() -> None:
    ids = byte_level().encode("a😀b", add_special_tokens=False)
    assert len(ids) > 3, "the fixture must split the emoji"
    pieces = [p for p in stream(byte_level(), ids) if p]
    assert pieces == ["a", "😀", "b"]


def test_an_unfinished_character_is_kept_back_until_the_end() -> None:
    ids = byte_level().encode("a😀", add_special_tokens=False)[:-1]
    pieces = stream(byte_level(), ids)
    assert pieces[0] == "a"
    assert not any(pieces[1:-1])
    assert pieces[-1] == "\ufffd"


def test_spaces_between_words_survive_a_special_token_and_a_leading_one_does_not() -> None:
    ids = [258, 256, 259, 260, 256, 256, 258]
    assert "".join(stream(metaspace(), ids)) == metaspace().decode(ids) == "the cats the"


def test_a_character_of_fallback_bytes_leaves_whole() -> None:
    ids = [258, *"你".encode(), 259, *"é".encode()]
    assert [p for p in stream(metaspace(), ids) if p] == ["the", "你", " cat", "é"]


def test_tokens_past_the_tokenizer_s_end_give_no_text() -> None:
    assert byte_level().decode([700]) == ""
    assert "".join(stream(byte_level(), [700, 40, 700])) == byte_level().decode([40])


stops = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=500)
@given(st.lists(st.text("abc", max_size=4), max_size=12), stops)
def test_a_stream_ends_before_the_stop_string_that_ends_first(pieces: list[str], stop: list[str]) -> None:
    whole = "".join(pieces)
    # By definition: the shortest beginning of the text that ends in a stop string, without that (longest) stop string.
    cut = next(((n, max(len(s) for s in stop if whole[:n].endswith(s))) for n in range(len(whole) + 1)
                if any(whole[:n].endswith(s) for s in stop)), None)  # fmt: skip
    checker, shown, stopped = StopStrings(stop), "", False
    for piece in pieces:
        got = checker.push(piece)
        shown, stopped = shown + got.text, got.stopped
        if stopped:
            break
        assert whole.startswith(shown)
    if not stopped:
        shown += checker.flush()
    assert stopped == (cut is not None)
    assert shown == (whole if cut is None else whole[: cut[0] - cut[1]])
    assert checker.found == (None if cut is None else whole[cut[0] - cut[1] : cut[0]])


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    checker = StopStrings(["END"])
    assert [checker.push(t).text for t in ["xE", "y", "EN", "E", "Z"]] == ["x", "Ey", "", "EN", "EZ"]


def test_text_goes_to_tokens_and_back() -> None:
    text = "The capital of France is\n Paris. Ça va? 東京 🎉"
    assert byte_level().decode(byte_level().encode(text, add_special_tokens=False)) == text


def test_special_tokens_are_known_by_name_and_hidden_from_text() -> None:
    assert byte_level().special["eos_token"] == "<|im_end|>"
    assert byte_level().eos_token_ids == (2,)
    assert byte_level().decode([1, 40, 2]) == byte_level().decode([40])


@settings(max_examples=200)
@given(st.lists(st.integers(0, 511) | st.integers(0, 2), max_size=20), st.sets(st.integers(0, 2)))
def test_special_tokens_that_are_asked_for_are_part_of_the_text(ids: list[int], shown: set[int]) -> None:
    names = {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>"}
    runs: list[list[int]] = [[]]
    wanted = ""
    for token in ids:  # a shown token stands between texts, a hidden one stands nowhere
        if token in shown:
            wanted += byte_level().decode(runs.pop()) + names[token]
            runs.append([])
        else:
            runs[-1].append(token)
    wanted += byte_level().decode(runs.pop())
    assert byte_level().decode(ids, shown) == wanted
    decoder = StreamDecoder(byte_level(), shown)
    assert "".join([*(decoder.push(i) for i in ids), decoder.flush()]) == wanted
    assert [byte_level().is_hidden(i, shown) for i in range(4)] == [i not in shown for i in range(3)] + [False]


def test_tokens_beside_the_vocabulary_are_known_by_their_text() -> None:
    assert byte_level().added == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(RequestError, match=r"^prompt: "):
        byte_level().encode("a\ud800b", add_special_tokens=False)


@pytest.mark.parametrize(
    "model", [models.WordLevel({"a": 0}), models.WordPiece({"a": 0}), models.Unigram([("a", -1.0)])], ids=lambda m: type(m).__name__
)
def test_text_that_a_tokenizer_has_no_tokens_for_is_refused(model: models.Model) -> None:
    tokenizer = Tokenizer({"tokenizer.json": tokenizers.Tokenizer(model).to_str().encode()}, 10)
    assert tokenizer.encode("a", add_special_tokens=False) == [0]
    with pytest.raises(RequestError, match=r"^prompt: cannot be encoded by tokenizer\.json: ") as caught:
        tokenizer.encode("b", add_special_tokens=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ids", [[-1], [1 << 40]])
def test_ids_that_the_library_refuses_to_decode_are_refused(ids: list[int]) -> None:
    with pytest.raises(RequestError, match=r"^token ids: cannot be decoded by tokenizer\.json: "):
        byte_level().decode(ids)


def test_special_tokens_come_from_the_map_where_the_config_names_none() -> None:
    named = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>", "additional_special_tokens": []}
    assets = {
        "tokenizer.json": (CHECKPOINT / "tokenizer.json").read_bytes(),
        "special_tokens_map.json": json.dumps(named).encode(),
    }
    assert Tokenizer(assets, 512).special == {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    assert Tokenizer(assets, 512).eos_token_ids == (2,)
    newer = {**assets, "tokenizer_config.json": b'{"eos_token": "<|endoftext|>", "bos_token": null}'}
    assert Tokenizer(newer, 512).special == {"eos_token": "<|endoftext|>", "bos_token": "<|im_start|>"}
    with pytest.raises(SourceError, match=r"^special_tokens_map\.json: eos_token: expected a text"):
        Tokenizer({**assets, "special_tokens_map.json": b'{"eos_token": 3}'}, 512)


@pytest.mark.parametrize(
    ("assets", "message"),
    [
        ({}, "tokenizer.json: missing"),
        ({"tokenizer.json": b"{"}, "tokenizer.json: cannot be read"),
        ({"tokenizer.json": b"\xff\xfe"}, "tokenizer.json: cannot be read"),
        ({"tokenizer.json": b'{"model": {"type": "Nonsense"}}'}, "tokenizer.json: cannot be read"),
        ({"tokenizer_config.json": b"[1]"}, "tokenizer_config.json: expected a JSON object, found a list"),
        ({"tokenizer_config.json": b"{"}, "tokenizer_config.json: expected JSON"),
        ({"tokenizer_config.json": b'{"eos_token": 3}'}, "tokenizer_config.json: eos_token"),
    ],
)
def test_an_unusable_tokenizer_is_refused_by_file(assets: dict[str, bytes], message: str) -> None:
    good = {"tokenizer.json": (CHECKPOINT / "tokenizer.json").read_bytes()}
    with pytest.raises(SourceError, match=f"^{message}") as caught:
        Tokenizer({**good, **assets} if "tokenizer_config.json" in assets else assets, 512)
    assert "\n" not in str(caught.value)


def test_a_vocabulary_larger_than_the_model_s_is_refused_with_both_numbers() -> None:
    data = (CHECKPOINT / "tokenizer.json").read_bytes()
    assert len(json.loads(data)["model"]["vocab"]) == 512
    with pytest.raises(SourceError, match=r"1 to 511 tokens .*found 512"):
        Tokenizer({"tokenizer.json": data}, 511)
