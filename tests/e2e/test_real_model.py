"""SmolLM2-135M-Instruct, baked once to 4 bits by the command line: proven, asked a question, compared with the unquantised model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import ok
from zygote import Zygote

from arctool.bake.pipeline import bake_in_memory
from arctool.bake.recipe import Recipe
from arctool.bake.source.checkpoint import open_checkpoint
from arctool.kernels.registry import default_registry
from arctool.run.evaluate import logits
from arctool.run.llm import LLM, ArtifactSource
from arctool.run.sampling.params import SamplingParams
from arctool.run.weights import load_model
from arctool.uqff.container import open_artifact

pytestmark = pytest.mark.real

QUESTION = "What is the capital of France?"
ANSWER_IDS = [504, 3575, 282, 4649, 314, 7042, 30, 2]
"""'The capital of France is Paris.' and its end token: what transformers generates greedily in f32."""


@pytest.fixture(scope="session")
def baked(zygote: Zygote, smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 at qtip4."""
    target = tmp_path_factory.mktemp("real") / "smollm2-qtip4"
    done = ok(zygote.run("bake", smollm2_dir, "--isq", "qtip4", "--calib", "none", "-o", target, "--json"))
    linear, embedding = 106_168_320, 49152 * 576
    expected = (4.05 * linear + 8.5 * embedding) / (linear + embedding)  # the embedding is q8_0
    assert abs(json.loads(done.stdout)["quantised_bits_per_weight"] - expected) < 0.01
    assert "272/272" in done.stderr
    return target


def test_all_four_questions_hold(zygote: Zygote, baked: Path, smollm2_dir: Path) -> None:
    report = json.loads(ok(zygote.run("verify", baked, "--source", smollm2_dir, "--json")).stdout)
    assert report["passed"]
    for question in ("container", "implementations", "tables", "source"):
        assert report[question]["asked"]
        assert report[question]["passed"]
        assert report[question]["failure_count"] == 0
    counts = report["implementations"]["counts"]
    assert (counts["trellis tensors"], counts["block tensors"], counts["tensors compared"]) == (210, 1, 211)
    assert {row["implementation"] for row in report["coverage"]} >= {"cpu.decode"}
    assert all(row["differing"] == 0 and row["weights"] > 0 for row in report["coverage"])
    errors = [row["relative_error"] for row in report["errors"] if row["label"].startswith("trellis-")]
    assert len(errors) == 210
    assert 0.0039 < min(errors) < max(errors) < 0.008


def test_the_artifact_answers_with_paris(zygote: Zygote, baked: Path) -> None:
    done = ok(zygote.run("run", baked, "--prompt", QUESTION, "--temperature", "0", "--max-tokens", "40"))
    assert "Paris" in done.stdout
    assert "tokens/s" in done.stderr


def test_the_unquantised_model_gives_the_tokens_of_transformers(zygote: Zygote, smollm2_dir: Path) -> None:
    done = ok(zygote.run("run", smollm2_dir, "--prompt", QUESTION, "--temperature", "0", "--json"))
    answer = json.loads(done.stdout)
    assert answer["token_ids"] == ANSWER_IDS
    assert answer["text"] == "The capital of France is Paris."
    assert answer["finish_reason"] == "stop"


def test_every_step_engages_every_layer_once(baked: Path) -> None:
    llm = LLM(baked)
    completion = llm.chat([{"role": "user", "content": QUESTION}], SamplingParams(temperature=0, max_tokens=6))
    engaged = llm.registry.engagement()
    steps = len(completion.token_ids)  # the prompt's own step gives the first of them
    assert steps >= 4
    assert engaged["cpu.linear.trellis-table"] == 210 * steps
    assert engaged["cpu.attention"] == 30 * steps
    assert engaged["cpu.embedding.ggml-q8_0"] == engaged["cpu.linear.ggml-q8_0"] == steps  # one table, tied


def test_the_artifact_gives_the_logits_of_the_bake_in_memory_bit_for_bit(baked: Path, smollm2_dir: Path) -> None:
    with open_checkpoint(str(smollm2_dir)) as checkpoint:
        memory = load_model(bake_in_memory(checkpoint, Recipe.uniform("qtip4")), default_registry())
    with open_artifact(baked) as artifact:
        stored = load_model(ArtifactSource(artifact), default_registry())
        found = logits(stored, ANSWER_IDS)
    assert found.tobytes() == logits(memory, ANSWER_IDS).tobytes()
    assert len(set(found.argmax(axis=1).tolist())) >= 4
