"""`uqff_report.json`: what a bake says of itself. Schema 1 of mistral.rs, with our own facts under "arctool".

Nothing in it decodes a weight. It names the shards, what every layer was meant to be and is, and the SHA-256 of everything,
so that `verify` can hold the artifact to its word. No timestamps and no paths: equal bakes give equal reports.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from arctool.errors import FormatError

REPORT_NAME: Final = "uqff_report.json"
UQFF_VERSION: Final = (1, 2, 0)

DENSE_LABELS: Final = ("f32", "bf16", "f16")
"""Labels of what is not quantised."""


@dataclass(frozen=True)
class LayerDetails:
    """What the baker knows of a layer and its bytes do not say.

    `default_target`, `resolved_target`: rung by default, and after the recipe's rules; `fallback_reason`: why what is stored
    is not that rung; `relative_error`: ‖W−Ŵ‖²/‖W‖² against the source; `proxy_error`: tr(E H Eᵀ)/tr(W H Wᵀ) over its calibration
    inputs, of which `dropped_rows` were not usable; `note`: what else a reader should know, such as why it was rounded without feedback.
    """

    default_target: str | None = None
    resolved_target: str | None = None
    fallback_reason: str | None = None
    relative_error: float | None = None
    proxy_error: float | None = None
    dropped_rows: int = 0
    note: str | None = None


@dataclass(frozen=True)
class LayerRecord:
    """One stored layer. `nbytes`: of all its entries; `bits_per_weight`: of streams or blocks, scales and signs, None if unknown."""

    module: str
    shape: tuple[int, ...]
    stored: str
    nbytes: int | None = None
    bits_per_weight: float | None = None
    details: LayerDetails = field(default_factory=LayerDetails)

    @property
    def weights(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class BakeInfo:
    """What an artifact was made from and how. `recipe` is plain JSON; `base_model` is a name, not a path of this machine.

    `algorithm` names what turned weights into bytes; `tables`: SHA-256 of the values by rung;
    `calibration`: tokens and their hash, None for a bake without. Where any of it differs, so may the bytes.
    `licence`, `licence_name`, `licence_link`: what the source's own card says of it. `budget`: how the recipe was found, if by a budget.
    """

    rung: str
    seed: int
    recipe: Mapping[str, Any] = field(default_factory=dict)
    base_model: str | None = None
    fingerprint: str | None = None
    licence: str | None = None
    licence_name: str | None = None
    licence_link: str | None = None
    algorithm: str | None = None
    tables: Mapping[str, str] = field(default_factory=dict)
    calibration: Mapping[str, Any] | None = None
    budget: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Quality:
    """How the artifact's predictions compare with its source's over `predicted` of `tokens` tokens of a text, in windows of `window`.

    `text_sha256`: of the text's bytes; `tokens_sha256`: of the tokens as little-endian i32; the numbers as in `run.divergence.Comparison`.
    """

    text: str
    text_sha256: str
    tokens_sha256: str
    window: int
    tokens: int
    predicted: int
    perplexity: float
    base_perplexity: float
    kl: float
    kl_p99: float
    same_top1: float


@dataclass(frozen=True)
class Hashes:
    """SHA-256 (hex) by entry name, by shard name for its header, and by file name for every other file."""

    entries: Mapping[str, str]
    headers: Mapping[str, str]
    files: Mapping[str, str]


@dataclass(frozen=True)
class Output:
    """One quantisation of the model: its name, its shards in order, its layers, and the counts that the report claims."""

    quant: str
    shards: tuple[str, ...]
    layers: tuple[LayerRecord, ...]
    layer_count: int
    actual_counts: Mapping[str, int]
    fallback_count: int


@dataclass(frozen=True)
class Report:
    """A whole report. `bake` and `hashes` are None in one that another program wrote, `quality` where nothing was measured."""

    tool: str
    tool_version: str | None
    uqff_version: str
    outputs: tuple[Output, ...]
    base_model: str | None = None
    bake: BakeInfo | None = None
    hashes: Hashes | None = None
    quality: Quality | None = None

    def to_json(self) -> dict[str, Any]:
        """The report as JSON objects; `report_parse.parse_report` gives it back."""
        value: dict[str, Any] = {
            "schema": 1,
            "generated_by": _drop_none({"tool": self.tool, "arctool_version": self.tool_version}),
            "base_model": self.base_model,
            "uqff_version": self.uqff_version,
            "outputs": [_output_json(output) for output in self.outputs],
        }
        if self.bake is not None and self.hashes is not None:
            value["arctool"] = _arctool_json(self.outputs[0], self.bake, self.hashes, self.quality)
        return _drop_none(value)

    def to_bytes(self) -> bytes:
        """The file: UTF-8 JSON. Raises FormatError where the baker's facts are not JSON."""
        return json_bytes(self.to_json(), REPORT_NAME)


def json_bytes(value: Any, where: str) -> bytes:
    """`value` as a JSON file. Raises FormatError, naming `where`, for what JSON cannot say (NaN, infinity, foreign objects)."""
    try:
        return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise FormatError(f"{where}: cannot be written as JSON: {error}") from error


def make_output(quant: str, shards: tuple[str, ...], layers: tuple[LayerRecord, ...]) -> Output:
    """An output whose counts are what its layers say."""
    fallbacks = sum(layer.details.fallback_reason is not None for layer in layers)
    counts = Counter(layer.stored for layer in layers)
    return Output(quant, shards, layers, len(layers), dict(sorted(counts.items())), fallbacks)


def mean_bits(layers: tuple[LayerRecord, ...], *, quantised_only: bool) -> float | None:
    """Mean stored bits per weight, weighted by weights; None where no layer counts or a layer's bits are unknown.

    Quantised is what is packed: trellis streams and GGML blocks.
    """
    chosen = [layer for layer in layers if layer.stored not in DENSE_LABELS or not quantised_only]
    if not chosen or any(layer.bits_per_weight is None for layer in chosen):
        return None
    return sum((layer.bits_per_weight or 0.0) * layer.weights for layer in chosen) / sum(layer.weights for layer in chosen)


def _drop_none(value: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if item is not None}


def _output_json(output: Output) -> dict[str, Any]:
    fallbacks = [
        _drop_none(
            {
                "module": layer.module,
                "from": layer.details.resolved_target,
                "to": layer.stored,
                "shape": list(layer.shape),
                "reason": layer.details.fallback_reason,
            }
        )
        for layer in output.layers
        if layer.details.fallback_reason is not None
    ]
    rows = [
        _drop_none(
            {
                "module": layer.module,
                "default_target": layer.details.default_target,
                "resolved_target": layer.details.resolved_target,
                "stored": layer.stored,
                "shape": list(layer.shape),
            }
        )
        for layer in output.layers
    ]
    value = {
        "quant": output.quant,
        "shards": list(output.shards),
        "layers": output.layer_count,
        "actual_counts": dict(output.actual_counts),
        "fallback_count": output.fallback_count,
    }
    return value | ({"fallbacks": fallbacks} if fallbacks else {}) | ({"layer_details": rows} if rows else {})


def _arctool_json(output: Output, bake: BakeInfo, hashes: Hashes, quality: Quality | None) -> dict[str, Any]:
    made = {"algorithm": bake.algorithm, "tables": dict(bake.tables) or None, "calibration": bake.calibration, "budget": bake.budget}
    licence = {"licence": bake.licence, "licence_name": bake.licence_name, "licence_link": bake.licence_link}
    return {
        "rung": bake.rung,
        "seed": bake.seed,
        **_drop_none(made),
        "recipe": dict(bake.recipe),
        "source": _drop_none({"fingerprint": bake.fingerprint, **licence}),
        "bits_per_weight": _drop_none(
            {
                "quantised": mean_bits(output.layers, quantised_only=True),
                "all": mean_bits(output.layers, quantised_only=False),
            }
        ),
        "layers": {
            layer.module: _drop_none(
                {
                    "bytes": layer.nbytes,
                    "bits_per_weight": layer.bits_per_weight,
                    "relative_error": layer.details.relative_error,
                    "proxy_error": layer.details.proxy_error,
                    "dropped_rows": layer.details.dropped_rows or None,
                    "note": layer.details.note,
                }
            )
            for layer in output.layers
        },
        **({} if quality is None else {"quality": asdict(quality)}),
        "sha256": {"entries": dict(hashes.entries), "headers": dict(hashes.headers), "files": dict(hashes.files)},
    }
