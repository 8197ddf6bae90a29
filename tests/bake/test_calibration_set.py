"""Which tokens a bake calibrates with: how many windows, how long, from which text, and how many the model writes itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from arctool.bake.calibration import token_set as calibration_set
from arctool.bake.calibration.text import Windows
from arctool.bake.calibration.token_set import CalibrationSet, choose_calibration, sample_windows
from arctool.bake.source.checkpoint import Checkpoint, open_checkpoint
from arctool.errors import SourceError, UsageError

WORDS = "It was the best of times, it was the worst of times, it was the age of wisdom.\n"


@pytest.fixture
def llama(tiny_llama: Path) -> Iterator[Checkpoint]:
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        yield checkpoint


def text(folder: Path, words: str, name: str = "a.txt") -> str:
    (folder / name).write_text(words)
    return str(folder / name)


def test_auto_takes_windows_of_the_models_context_and_leaves_an_eighth_to_the_model(llama: Checkpoint) -> None:
    chosen = choose_calibration(llama, "auto", 4200)
    assert llama.config.max_position_embeddings == 256
    assert (chosen.text.ids.shape, chosen.sampled, chosen.tokens) == ((14, 256), 2, 16 * 256)
    assert 0 <= chosen.text.ids.min() < chosen.text.ids.max() < 512
    assert len({row.tobytes() for row in chosen.text.ids}) == 14
    assert chosen.to_json() == {"text": chosen.text.identity, "tokens": 4096, "window": 256, "sampled": 512, "auto": True}


def test_a_model_too_large_to_be_held_whole_writes_nothing(llama: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = sum(llama.tensor(name).size for name in llama.names())
    monkeypatch.setattr(calibration_set, "SELF_WEIGHTS", weights)
    assert choose_calibration(llama, "auto", 2048).sampled == 1
    monkeypatch.setattr(calibration_set, "SELF_WEIGHTS", weights - 1)
    chosen = choose_calibration(llama, "auto", 2048)
    assert (chosen.text.ids.shape, chosen.sampled) == ((8, 256), 0)


def test_a_users_text_is_all_that_is_used(llama: Checkpoint, tmp_path: Path) -> None:
    chosen = choose_calibration(llama, text(tmp_path, WORDS * 400), 2048)
    assert (chosen.text.ids.shape, chosen.sampled) == ((8, 256), 0)
    assert chosen.to_json()["auto"] is False


@pytest.mark.parametrize(("tokens", "shape"), [(64, (1, 64)), (255, (1, 255)), (256, (1, 256)), (511, (1, 256)), (512, (2, 256))])
def test_fewer_tokens_than_a_window_are_one_shorter_window(llama: Checkpoint, tokens: int, shape: tuple[int, int]) -> None:
    chosen = choose_calibration(llama, "auto", tokens)
    assert (chosen.text.ids.shape, chosen.sampled) == (shape, 0)


def test_text_shorter_than_a_window_is_one_shorter_window(llama: Checkpoint, tmp_path: Path) -> None:
    chosen = choose_calibration(llama, text(tmp_path, WORDS), 4096)
    assert chosen.text.ids.shape[0] == 1
    assert 16 <= chosen.text.ids.shape[1] < 256


@pytest.mark.parametrize("tokens", [63, 1, 0, -1])
def test_too_few_tokens_are_refused(llama: Checkpoint, tokens: int) -> None:
    with pytest.raises(UsageError, match=f"^--calib-tokens: expected at least 64, found {tokens}$"):
        choose_calibration(llama, "auto", tokens)


@pytest.mark.parametrize(
    ("words", "error", "named"), [("", SourceError, "empty"), ("Hi.", UsageError, "expected at least 16 tokens of text")]
)
def test_text_that_cannot_calibrate_is_named(llama: Checkpoint, tmp_path: Path, words: str, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=rf"a\.txt: {named}"):
        choose_calibration(llama, text(tmp_path, words), 4096)


def test_the_same_text_under_another_name_is_the_same_calibration(llama: Checkpoint, tmp_path: Path) -> None:
    one, two, other = (
        choose_calibration(llama, text(tmp_path, words, name), 512).to_json()
        for words, name in ((WORDS * 99, "a.txt"), (WORDS * 99, "b.md"), (WORDS[3:] * 99, "c.txt"))
    )
    assert one == two != other
    assert str(tmp_path) not in json.dumps(one)


def test_messages_are_rendered_by_the_models_template(copy_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    model = copy_checkpoint("llama")
    (model / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}")
    messages = [{"role": "user", "content": WORDS * 9}]
    record = text(tmp_path, json.dumps({"messages": messages}), "a.jsonl")
    plain = text(tmp_path, f"[user] {WORDS * 9}\n", "b.txt")
    with open_checkpoint(str(model)) as checkpoint:
        rendered, wanted = (choose_calibration(checkpoint, source, 128).text.ids for source in (record, plain))
    np.testing.assert_array_equal(rendered, wanted)


def test_what_the_model_writes_depends_on_the_seed_alone(llama: Checkpoint) -> None:
    chosen = CalibrationSet("auto", Windows(np.zeros((1, 40), np.int32), ()), 2)
    one, again, other = (sample_windows(llama, chosen, seed, None) for seed in (5, 5, 6))
    assert (one.shape, one.dtype) == ((2, 40), np.int32)
    assert one.min() >= 0
    assert one.max() < 512
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()
    assert len(np.unique(one)) > 10


def test_where_the_mix_runs_out_the_model_still_writes_its_eighth(llama: Checkpoint) -> None:
    """The mix has some 196 thousand of this tokenizer's tokens."""
    chosen = choose_calibration(llama, "auto", 1 << 18)
    count = len(chosen.text.ids)
    assert count < 7 * 128
    assert chosen.sampled == count // 7 > 100


def test_more_tokens_than_memory_could_hold_are_refused(llama: Checkpoint) -> None:
    with pytest.raises(UsageError, match=f"^--calib-tokens: expected at most {1 << 24}, found {(1 << 24) + 1}$"):
        choose_calibration(llama, "auto", (1 << 24) + 1)
