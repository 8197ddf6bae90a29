"""An evaluation's numbers against the engine's own definitions, sizes worked out by hand, and every input that must be refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from locations import ROOT
from safetensors.numpy import load_file, save_file
from tiny_gguf import write_gguf

from arctool.bake.source.checkpoint import open_checkpoint
from arctool.bench import evaluation, reading
from arctool.bench.evaluation import Evaluation, evaluate
from arctool.bench.reading import plan_reading
from arctool.bench.subjects import Subject, open_subject
from arctool.errors import SourceError, UsageError, VerificationError
from arctool.kernels.registry import Registry, default_registry
from arctool.quant.tensor import TrellisTensor
from arctool.run.divergence import compare
from arctool.run.evaluate import perplexity
from arctool.run.llm import ArtifactSource
from arctool.run.tokenizer import Tokenizer
from arctool.run.weights import load_model
from arctool.uqff.container import open_artifact

TEXT = ROOT / "fixtures" / "texts" / "heldout.txt"
SMALL: dict[str, Any] = {"text": TEXT, "window": 50, "tokens": 175}
"""Four windows, the last one half as long."""


@pytest.fixture(scope="session")
def registry() -> Registry:
    return default_registry()


@pytest.fixture(scope="session")
def ids(tiny_llama: Path) -> list[int]:
    """The tokens that `SMALL` reads."""
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        return Tokenizer(checkpoint.assets, checkpoint.config.vocab_size).encode(TEXT.read_text(), add_special_tokens=False)[:175]


@pytest.fixture(scope="session")
def measured(tiny_llama: Path, artifacts: dict[str, Path]) -> Evaluation:
    """Both artifacts and their source, against the source."""
    return evaluate([*map(str, artifacts.values()), str(tiny_llama)], against=str(tiny_llama), **SMALL)


def change_weights(model: Path, change: Callable[[dict[str, np.ndarray]], object]) -> Path:
    weights = load_file(model / "model.safetensors")
    change(weights)
    save_file(weights, model / "model.safetensors")
    return model


def change_json(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_the_numbers_are_those_of_the_engine(
    measured: Evaluation, tiny_llama: Path, artifacts: dict[str, Path], ids: list[int], registry: Registry
) -> None:
    windows = [ids[:50], ids[50:100], ids[100:150], ids[150:]]
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        base = load_model(checkpoint, registry)
    for row, path in zip(measured.rows, artifacts.values(), strict=False):
        with open_artifact(path) as artifact:
            model = load_model(ArtifactSource(artifact), registry)
        assert row.comparison == compare(base, model, windows)
        assert row.perplexity == row.comparison.perplexity
        assert row.perplexity == pytest.approx(perplexity(model, ids, window=50), rel=1e-12)
    fine, coarse, same = (row.comparison for row in measured.rows)
    assert 0 < fine.kl < coarse.kl
    assert (same.kl, same.same_top1, same.tokens) == (0.0, 1.0, 171)
    assert measured.base_perplexity == pytest.approx(perplexity(base, ids, window=50), rel=1e-12)
    assert (measured.reading.predicted, len(measured.reading.windows)) == (171, 4)


def test_without_a_source_there_is_a_perplexity_and_nothing_else(measured: Evaluation, artifacts: dict[str, Path]) -> None:
    found = evaluate([str(artifacts["qtip4"])], **SMALL)
    (row,) = found.rows
    assert row.perplexity == pytest.approx(measured.rows[0].perplexity, rel=1e-12)
    assert (row.comparison, row.layers, found.source, found.base_perplexity) == (None, (), None, None)


def test_layers_are_measured_in_the_original_basis_against_the_limit_of_their_rate(
    measured: Evaluation, tiny_llama: Path, artifacts: dict[str, Path]
) -> None:
    truth = load_file(tiny_llama / "model.safetensors")
    for row, path, limit in zip(measured.rows, artifacts.values(), (2.0**-8, 2.0**-4), strict=False):
        linear = [layer for layer in row.layers if layer.key.endswith("_proj")]
        assert len(linear) == 14
        with open_artifact(path) as artifact:
            for layer in linear:
                stored = artifact.weight(layer.key)
                assert isinstance(stored, TrellisTensor)
                want = truth[f"{layer.key}.weight"].astype(np.float64)
                error = ((stored.dense() - want) ** 2).sum() / (want**2).sum()
                assert layer.relative_error == pytest.approx(error, rel=1e-6)
                assert layer.limit == limit
                assert layer.ratio == pytest.approx(error / limit, rel=1e-6)
                assert layer.bits_per_weight == pytest.approx(stored.stored_bits / want.size)
    assert measured.rows[2].layers == ()


def test_sizes_and_rates_can_be_worked_out_from_the_shapes(artifacts: dict[str, Path]) -> None:
    with open_subject(str(artifacts["qtip4"])) as subject:
        facts = subject.facts
    assert facts.nbytes == sum(path.stat().st_size for path in artifacts["qtip4"].iterdir())
    assert (facts.name, facts.kind) == ("qtip4", "artifact")
    bits = weights = 0
    for rows, columns in [(64, 64)] * 2 + [(32, 64)] * 2 + [(96, 64)] * 2 + [(64, 96)]:
        weights += rows * columns
        # Four bits a weight are whole words here; a scale of 32 bits a row; a sign for each input and output.
        bits += 4 * rows * columns + 32 * rows + rows + columns
    assert facts.linear_bits_per_weight == pytest.approx(bits / weights)
    assert facts.parameters == 2 * weights + 2 * 512 * 64 + 5 * 64


def test_checkpoints_count_their_files_and_their_storage_types(tiny_llama: Path, copy_checkpoint: Callable[[str], Path]) -> None:
    with open_subject(str(tiny_llama)) as subject:
        assert (subject.facts.linear_bits_per_weight, subject.facts.bits_per_weight, subject.quantised) == (32.0, 32.0, ())
        names = ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
        assert subject.facts.nbytes == sum((tiny_llama / name).stat().st_size for name in names)
    half = change_weights(copy_checkpoint("llama"), lambda w: w.update({k: v.astype(np.float16) for k, v in w.items()}))
    with open_subject(str(half)) as subject:
        assert (subject.facts.linear_bits_per_weight, subject.facts.bits_per_weight) == (16.0, 16.0)


def test_a_quantised_gguf_is_a_row_like_any_other(tiny_llama: Path, tmp_path: Path, copy_checkpoint: Callable[[str], Path]) -> None:
    gguf = write_gguf(tiny_llama, tmp_path / "tiny-q8.gguf", "llama", tensor_type=GGMLQuantizationType.Q8_0)
    (row,) = evaluate([str(gguf)], against=str(tiny_llama), **SMALL).rows
    assert (row.model.name, row.model.kind, row.model.nbytes) == ("tiny-q8", "GGUF", gguf.stat().st_size)
    assert row.model.linear_bits_per_weight == 8.5
    truth = load_file(tiny_llama / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    want = truth[f"{name}.weight"]
    stored = dequantize(quantize(want, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    (layer,) = (layer for layer in row.layers if layer.key == name)
    assert (layer.label, layer.limit) == ("q8_0", 2.0**-17)
    assert layer.relative_error == pytest.approx(float(((stored - want) ** 2).sum() / (want**2).sum()), rel=1e-5)
    assert row.comparison is not None
    assert 0 < row.comparison.kl < 0.01


def test_the_base_is_read_once_and_every_model_once(tiny_llama: Path, artifacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[object] = []
    monkeypatch.setattr(evaluation, "load_model", lambda source, kernels: loaded.append(source) or load_model(source, kernels))
    evaluate([*map(str, artifacts.values())], against=str(tiny_llama), layers=False, **SMALL)
    assert [type(source).__name__ for source in loaded] == ["Checkpoint", "ArtifactSource", "ArtifactSource"]


def test_progress_rises_to_its_end_and_names_what_is_done(tiny_llama: Path, artifacts: dict[str, Path]) -> None:
    seen: list[tuple[str, int, int]] = []
    paths = [str(artifacts["qtip4"]), str(artifacts["qtip2-v4"])]
    found = evaluate(paths, against=str(tiny_llama), progress=lambda *step: seen.append(step), **SMALL)
    layers = sum(len(row.layers) for row in found.rows)
    assert {total for _, _, total in seen} == {3 * 171 + layers}
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1][1] == 3 * 171 + layers
    assert list(dict.fromkeys(label for label, _, _ in seen)) == [
        "llama (source)", "qtip4", "qtip4: layers", "qtip2-v4", "qtip2-v4: layers",
    ]  # fmt: skip


def test_layers_can_be_left_out(tiny_llama: Path, artifacts: dict[str, Path]) -> None:
    assert evaluate([str(artifacts["qtip4"])], against=str(tiny_llama), layers=False, **SMALL).rows[0].layers == ()


def test_a_model_that_gives_no_numbers_fails_alone_or_as_one_row_of_several(
    tiny_llama: Path, artifacts: dict[str, Path], copy_checkpoint: Callable[[str], Path]
) -> None:
    loud = str(change_weights(copy_checkpoint("llama"), lambda w: w["lm_head.weight"].__setitem__(33, np.float32(3e38))))
    message = r"llama: window 0: after token \d+ the logit of entry 33 is -?(inf|nan)"
    with pytest.raises(VerificationError, match=message):
        evaluate([loud], against=str(tiny_llama), **SMALL)
    with pytest.raises(VerificationError, match=r"llama: window 0: ids: after token \d+ the logit"):
        evaluate([loud], **SMALL)
    with pytest.raises(VerificationError, match=r"llama: base: window 0: after token \d+ the logit of entry 33"):
        evaluate([str(tiny_llama)], against=loud, **SMALL)
    seen: list[tuple[str, int, int]] = []
    found = evaluate([str(artifacts["qtip4"]), loud], against=str(tiny_llama), progress=lambda *step: seen.append(step), **SMALL)
    whole, failed = found.rows
    assert seen[-1][1] == seen[-1][2]
    assert failed.failure is not None
    assert re.search(message, failed.failure.message)
    assert found.failure == failed.failure
    assert failed.failure.exit_code == VerificationError.exit_code
    assert (failed.perplexity, failed.comparison) == (None, None)
    assert whole.failure is None
    assert whole.comparison is not None
    assert found.base_perplexity == whole.comparison.base_perplexity


def test_only_layers_that_the_source_has_in_their_shape_are_compared(
    tiny_llama: Path, artifacts: dict[str, Path], copy_checkpoint: Callable[[str], Path]
) -> None:
    def shorten(weights: dict[str, np.ndarray]) -> None:
        for name in [name for name in weights if name.startswith("model.layers.1.")]:
            del weights[name]

    short = change_weights(copy_checkpoint("llama"), shorten)
    change_json(short / "config.json", num_hidden_layers=1)
    (row,) = evaluate([str(artifacts["qtip4"])], against=str(short), **SMALL).rows
    assert {layer.key for layer in row.layers if "layers" in layer.key} == {
        f"model.layers.0.{name}_proj"
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    }


def test_the_json_is_json_and_every_field_of_it_is_documented(measured: Evaluation) -> None:
    value = json.loads(json.dumps(measured.to_json(), allow_nan=False))
    documented = (ROOT / "docs" / "quality.md").read_text()

    def names(item: Any) -> set[str]:
        if isinstance(item, dict):
            return set(item).union(*map(names, item.values()))
        return set().union(*map(names, item)) if isinstance(item, list) else set()

    found = names({key: item for key, item in value.items() if key != "kernels"})
    assert {"linear_bits_per_weight", "p99", "ratio", "sha256"} <= found
    for name in found | {"kernels"}:
        assert f"`{name}`" in documented, name
    assert value["models"][0]["kl"]["mean"] == measured.rows[0].comparison.kl
    assert value["kernels"]["cpu.decode"] == 28


# What is read.


def reading_of(*paths: Path, text: Path | None = TEXT, window: int | None = 50, tokens: int = 175) -> Any:
    with ExitStack() as opened:
        return plan_reading([opened.enter_context(open_subject(str(path))) for path in paths], text, window, tokens)


def test_a_text_is_cut_into_windows_and_a_short_one_is_one_window(tiny_llama: Path, ids: list[int], tmp_path: Path) -> None:
    found = reading_of(tiny_llama)
    assert found.windows == (tuple(ids[:50]), tuple(ids[50:100]), tuple(ids[100:150]), tuple(ids[150:]))
    assert (found.tokens, found.predicted, found.opening) == (175, 171, ())
    (tmp_path / "short").write_text("Hello there, short text.")
    short = reading_of(tiny_llama, text=tmp_path / "short")
    assert len(short.windows) == 1
    assert 2 <= short.tokens < 50
    assert reading_of(tiny_llama, window=None).window == 256
    assert reading_of(tiny_llama).digest == found.digest != short.digest


def test_the_built_in_text_is_long_enough_for_the_default(tiny_llama: Path) -> None:
    found = reading_of(tiny_llama, text=None, window=None, tokens=8192)
    assert (found.tokens, len(found.windows), found.name) == (8192, 32, "evaluation.txt")


@pytest.mark.parametrize("first", [1, 32])
def test_a_long_file_is_read_as_far_as_needed_and_gives_the_tokens_of_the_whole(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    # Three bytes a character, so that a cut falls into one; at one byte a token the first pieces have too few tokens.
    monkeypatch.setattr(reading, "BYTES_A_TOKEN", first)
    words = "…" * 4000 + TEXT.read_text()
    (tmp_path / "long").write_text(words + "x" * 50_000_000)
    (tmp_path / "all").write_text(words)
    long, whole = (reading_of(tiny_llama, text=tmp_path / name, window=256, tokens=5000) for name in ("long", "all"))
    assert long.windows == whole.windows
    assert long.tokens == 5000
    (tmp_path / "mark").write_bytes(b"\xef\xbb\xbf" + TEXT.read_bytes())
    assert reading_of(tiny_llama, text=tmp_path / "mark").windows == reading_of(tiny_llama).windows


def test_a_model_that_begins_texts_with_a_token_begins_windows_with_it(copy_checkpoint: Callable[[str], Path], ids: list[int]) -> None:
    model = copy_checkpoint("llama")
    change_json(
        model / "tokenizer.json",
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
        },
    )
    found = reading_of(model, tokens=150)
    assert found.windows == tuple((1, *ids[at : at + 49]) for at in (0, 49, 98))
    assert (found.tokens, found.predicted, found.opening) == (150, 147, (1,))
    with pytest.raises(UsageError, match="--tokens"):
        reading_of(model, tokens=1)


def test_a_model_without_a_tokenizer_reads_the_sources_tokens(tiny_llama: Path, artifacts: dict[str, Path], ids: list[int]) -> None:
    with open_subject(str(tiny_llama)) as lead, open_subject(str(artifacts["qtip4"])) as other:
        bare = Bare(other.source)
        found = plan_reading([lead, Subject(other.facts, bare, other.tensors)], TEXT, 50, 175)
        assert found.windows[0] == tuple(ids[:50])
        with pytest.raises(SourceError, match=r"qtip4: tokenizer\.json: missing"):
            plan_reading([Subject(other.facts, bare, other.tensors), lead], TEXT, 50, 175)


class Bare:
    """A source without assets."""

    def __init__(self, source: Any) -> None:
        self.config, self.weight, self.bias = source.config, source.weight, source.bias
        self.assets: dict[str, bytes] = {}


def test_models_that_cut_text_differently_are_not_compared(
    tiny_llama: Path, copy_checkpoint: Callable[[str], Path], ids: list[int]
) -> None:
    other = copy_checkpoint("llama")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    names = {number: name for name, number in vocab.items()}
    first, second = ids[40], next(i for i in ids if i not in ids[:41])
    vocab[names[first]], vocab[names[second]] = second, first
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UsageError, match=rf"its tokenizer\.json cuts the text .* first at token {ids.index(first)};"):
        reading_of(tiny_llama, other)


def test_models_of_different_vocabularies_are_not_compared(tiny_llama: Path, copy_checkpoint: Callable[[str], Path]) -> None:
    def widen(weights: dict[str, np.ndarray]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name] = np.concatenate((weights[name], weights[name][:8]))

    other = change_weights(copy_checkpoint("llama"), widen)
    change_json(other / "config.json", vocab_size=520)
    with pytest.raises(UsageError, match=r"llama: a vocabulary of 520 tokens, .*llama has 512"):
        reading_of(tiny_llama, other)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"window": 257}, "--window: expected 2 to 256 tokens, the context of .*llama, found 257"),
        ({"window": 1}, "--window: expected 2 to 256"),
        ({"window": -5}, "--window: expected 2 to 256"),
        ({"tokens": 1}, "--tokens: expected at least 2, found 1"),
        ({"tokens": -1}, "--tokens: expected at least 2, found -1"),
        ({"text": Path("/nowhere")}, "--text: /nowhere: cannot be read: No such file"),
        ({"text": ROOT}, "--text: .*: cannot be read: not a regular file"),
    ],
)
def test_options_that_give_nothing_to_predict_are_refused(tiny_llama: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        reading_of(tiny_llama, **options)


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"", "0 tokens in it"), (b"a", "1 tokens in it"), (b"abc\xff", "not UTF-8 text: .* at byte 3"), (b"ab\xc3", "not UTF-8 text")],
)
def test_a_text_that_is_none_is_refused(tiny_llama: Path, tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "text").write_bytes(data)
    with pytest.raises(UsageError, match=rf"--text: .*text: {words}"):
        reading_of(tiny_llama, text=tmp_path / "text")


def test_nothing_to_evaluate_is_refused() -> None:
    with pytest.raises(UsageError, match="at least one model"):
        evaluate([])


def test_infinite_errors_are_null_in_json() -> None:
    assert evaluation._finite({"a": [math.inf, 1.5], "b": {"c": math.nan}}) == {"a": [None, 1.5], "b": {"c": None}}
