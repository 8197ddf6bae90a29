"""What a budget measures with and what it checks on: different works, begun as the model is used to, within its context."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from locations import ROOT

from arctool.bake.budget.held_out import held_out
from arctool.bake.source.checkpoint import open_checkpoint
from arctool.run.tokenizer import Tokenizer

VALIDATION = ROOT / "arctool" / "run" / "texts" / "validation.txt"


def tokenizer_of(model: Path) -> Tokenizer:
    with open_checkpoint(str(model)) as checkpoint:
        return Tokenizer(checkpoint.assets, checkpoint.config.vocab_size)


def test_measuring_and_checking_read_different_passages_of_the_validation_text(tiny_llama: Path) -> None:
    tokenizer = tokenizer_of(tiny_llama)
    passages = VALIDATION.read_text(encoding="utf-8").split("\n\n\n")
    assert len(passages) == 18
    found = held_out(tokenizer, 4096)
    assert len(found.measured) == 4
    for window, passage in zip(found.measured, passages[:4], strict=True):
        assert passage.startswith(tokenizer.decode(window[:200]))
        assert len(window) == min(256, len(tokenizer.encode(passage, add_special_tokens=False)))
    checked = tokenizer.decode([token for window in found.checked for token in window][:6000])
    assert "\n\n\n".join(passages[4:]).startswith(checked)
    assert len(checked) > 8000


def test_windows_fit_the_context_and_are_bounded(tiny_llama: Path) -> None:
    tokenizer = tokenizer_of(tiny_llama)
    found = held_out(tokenizer, 100)
    assert [len(window) for window in found.measured] == [100] * 4
    assert {len(window) for window in found.checked[:-1]} == {100}
    assert sum(map(len, found.checked)) == sum(map(len, held_out(tokenizer, 4096).checked)) == 8192
    assert max(map(len, held_out(tokenizer, 4096).checked)) == 1024


def test_a_tokenizer_that_begins_texts_with_bos_begins_every_window_so(tiny_llama: Path) -> None:
    plain = tokenizer_of(tiny_llama)
    bos = plain.token_id("<|endoftext|>")
    assert bos is not None

    class Begins:
        """The same tokenizer, with a BOS of its own accord."""

        special: ClassVar = {"bos_token": "<|endoftext|>"}
        token_id = staticmethod(plain.token_id)

        @staticmethod
        def encode(text: str, add_special_tokens: bool) -> list[int]:
            return [*([bos] if add_special_tokens else []), *plain.encode(text, add_special_tokens=False)]

    found = held_out(Begins(), 64)  # type: ignore[arg-type]
    for window in found.measured + found.checked:
        assert window[0] == bos
        assert bos not in window[1:]
        assert len(window) <= 64
    assert found.digest != held_out(plain, 64).digest


def test_the_digest_tells_where_windows_end(tiny_llama: Path) -> None:
    tokenizer = tokenizer_of(tiny_llama)
    assert held_out(tokenizer, 100).digest == held_out(tokenizer, 100).digest
    assert len({held_out(tokenizer, context).digest for context in (64, 100, 4096)}) == 3
