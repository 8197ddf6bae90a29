"""Perplexity and KL divergence of a checkpoint at several rungs on a fixed text: the README's quality table.

    python -m arctool.bench.quality models/smollm2-135m fixtures/texts/heldout.txt --rungs bf16 qtip4 qtip3 qtip2.25-v4 qtip2-v4

Each rung is baked in memory (the artifact would hold the same weights) and reads the same windows as the unquantised model.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from arctool.bake.checkpoint import Checkpoint, open_checkpoint
from arctool.bake.pipeline import MemoryModel, bake_in_memory
from arctool.bake.recipe import Recipe
from arctool.kernels.registry import default_registry
from arctool.quant.tensor import TrellisTensor
from arctool.run.evaluate import logits
from arctool.run.models.decoder import CausalLM
from arctool.run.tokenizer import Tokenizer
from arctool.run.weights import load_model

log = logging.getLogger(__name__)

BASE = "bf16"


@dataclass(frozen=True)
class Quality:
    """One row. `bits`: mean over the quantised layers, scales and signs included; `kl`: mean KL(base ‖ rung) in nats a token."""

    rung: str
    bits: float
    perplexity: float
    kl: float
    same_top1: float
    tokens: int


def log_softmax(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Row-wise log-probabilities f64."""
    shifted = rows.astype(np.float64) - rows.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def bits_per_weight(model: MemoryModel) -> float:
    """Stored bits over weights of the trellis layers; 16 where there are none."""
    layers = [weight for weight in model.weights.values() if isinstance(weight, TrellisTensor)]
    count = sum(weight.shape[0] * weight.shape[1] for weight in layers)
    return sum(weight.stored_bits for weight in layers) / count if count else 16.0


def compare(base: CausalLM, model: CausalLM, windows: Sequence[Sequence[int]]) -> tuple[float, float, float, int]:
    """(perplexity of `model`, mean KL from `base`, share of equal top-1 tokens, predicted tokens) over the windows."""
    surprise = divergence = agree = 0.0
    count = 0
    for ids in windows:
        reference, candidate = log_softmax(logits(base, ids)[:-1]), log_softmax(logits(model, ids)[:-1])
        targets = np.asarray(ids[1:])
        surprise -= float(candidate[np.arange(len(targets)), targets].sum())
        divergence += float((np.exp(reference) * (reference - candidate)).sum())
        agree += float((reference.argmax(axis=1) == candidate.argmax(axis=1)).sum())
        count += len(targets)
    return float(np.exp(surprise / count)), divergence / count, agree / count, count


def measure(checkpoint: Checkpoint, text: str, rungs: Sequence[str], window: int, windows: int) -> list[Quality]:
    """A row for each rung. The base is the checkpoint at bf16, as an artifact without a rung would hold it."""
    registry = default_registry()
    ids = Tokenizer(checkpoint.assets, checkpoint.config.vocab_size).encode(text, add_special_tokens=False)
    parts = [ids[start : start + window] for start in range(0, min(len(ids), window * windows), window)]
    base = load_model(bake_in_memory(checkpoint, Recipe.uniform(BASE)), registry)
    rows = []
    for name in rungs:
        baked = bake_in_memory(checkpoint, Recipe.uniform(name))
        row = Quality(name, bits_per_weight(baked), *compare(base, load_model(baked, registry), parts))
        log.info("%s", row)
        rows.append(row)
    log.info("engaged: %s", dict(registry.engagement()))
    return rows


def main() -> None:
    """Parse, measure, print a Markdown table and, with --out, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--rungs", nargs="+", default=[BASE, "qtip4", "qtip3", "qtip2.25-v4", "qtip2-v4"])
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    with open_checkpoint(options.model) as checkpoint:
        rows = measure(checkpoint, options.text.read_text(encoding="utf-8"), options.rungs, options.window, options.windows)
    lines = ["| rung | bits/weight | perplexity | mean KL | same top-1 |", "|---|---|---|---|---|"]
    lines += [f"| {r.rung} | {r.bits:.3f} | {r.perplexity:.2f} | {r.kl:.4f} | {r.same_top1:.3f} |" for r in rows]
    log.info("%s", "\n".join(lines))
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
