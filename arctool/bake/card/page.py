"""The model card of an artifact: `README.md`, for a hub's page and for whoever finds the directory. A pure function of what was baked.

Equal bakes give equal cards: no date, no path, no machine. Every name that comes from outside, a model's, a licence's, a recipe's, is
written so that neither YAML nor Markdown nor HTML reads more in it than text. Knows records and numbers, no weights and no files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from arctool.bake.account import parse_account
from arctool.bake.card.budget_section import budget
from arctool.bake.card.front_matter import HUB_NAME, base_model, front_matter, licence
from arctool.bake.card.markdown import code, plain, sentence, table
from arctool.bake.card.subject import CardLayer, Subject
from arctool.uqff.container import LayerRecord
from arctool.uqff.discovery import RESIDUAL_NAME
from arctool.uqff.report import DENSE_LABELS, REPORT_NAME

MOST_LISTED = 24
"""Layers of a list; the report has all."""

MOST_RULES = 64

UNIFORM = 0.9
"""Of the linear layers, with one rung: what is less is called mixed."""

Key = TypeVar("Key", bound=Hashable)


def card(subject: Subject) -> str:
    """The whole file, ending in a line feed."""
    parts = (
        front_matter(subject),
        overview(subject),
        recipe(subject),
        *([] if subject.info.budget is None else [budget(parse_account(subject.info.budget, "budget"))]),
        sizes(subject),
        calibration(subject),
        quality(subject),
        fallbacks(subject),
        USAGE,
        licence(subject),
    )
    return "\n\n".join(parts) + "\n"


def overview(subject: Subject) -> str:
    """The title, one sentence, and the facts of the artifact."""
    info, totals = subject.info, subject.contents.totals
    name, revision = base_model(info)
    shown = "a model without a name" if name is None else code(name)
    linked = f"[{shown}](https://huggingface.co/{name})" if name is not None and HUB_NAME.fullmatch(name) else shown
    linear = bits(subject, lambda layer: layer.role == "linear")
    rungs = [layer.rung for layer in subject.layers if layer.role == "linear"]
    mixed = rungs.count(info.rung) < UNIFORM * len(rungs)
    rows = [
        ("source", shown + ("" if revision is None else f" at revision {code(revision)}")),
        ("fingerprint of the source", "unknown" if info.fingerprint is None else code(info.fingerprint)),
        ("rung", f"{len(set(rungs))} of them, {code(info.rung)} where nothing else is said" if mixed else code(info.rung)),
        ("bits a weight", f"{linear} in linear layers, {totals.bits_per_weight:.3f} in all"),
        ("weights", f"{totals.parameters:,}"),
        ("on the disk", f"{totals.nbytes / 1e6:,.1f} MB"),
        ("format", f"UQFF {plain(subject.contents.uqff_version)}"),
        ("made by", f"arctool {plain(subject.arctool)}, algorithm {code(info.algorithm or 'unknown')}, seed {info.seed}"),
    ]
    return (
        f"# {shown} at {f'{linear} bits a weight' if mixed else code(info.rung)}\n\n"
        f"{linked} with its weights quantised by `arctool bake`: an artifact in UQFF, the container that mistral.rs uses. This page was "
        f"written by the bake and tells what it did and measured; what the model is and was made for, its source's own page tells.\n\n"
        + table(("", ""), rows)
    )


def recipe(subject: Subject) -> str:
    """What the layers got, and by which rules."""
    rows = []
    for (role, rung), layers in grouped(subject.layers, lambda layer: (layer.role, layer.rung)).items():
        records = [layer.record for layer in layers]
        stored = ", ".join(sorted({record.stored for record in records}))
        rows.append((role, code(rung), code(stored), f"{len(layers)}", f"{weights(layers):,}", mean_bits(layers)))
    found = subject.info.recipe
    lines = [f"- default of the linear layers: {code(str(found.get('default', subject.info.rung)))}"]
    lines += [f"- embedding and head: {code(str(found['vocabulary']))}"] if "vocabulary" in found else []
    lines += [f"- where a width does not fit: {code(str(found['fallback']))}"] if "fallback" in found else []
    # Layer by layer, the section on the budget has what the budget decided.
    decided = {layer for group in (subject.info.budget or {}).get("groups", []) for layer in group["layers"]}
    rules = [rule for rule in found.get("rules", []) if isinstance(rule, dict) and rule.get("match") not in decided]
    lines += [f"- {rule_line(rule)}" for rule in rules[:MOST_RULES]]
    lines += [f"- and {len(rules) - MOST_RULES} rules more: `{REPORT_NAME}` has all"] if len(rules) > MOST_RULES else []
    heads = ("part", "rung", "stored as", "layers", "weights", "bits a weight")
    return f"## Recipe\n\n{table(heads, rows)}\n\nBits count scales and signs; a table is counted once, in the size.\n\n" + "\n".join(lines)


def rule_line(rule: dict[str, object]) -> str:
    """One rule of a recipe; later ones win."""
    first, end = rule.get("first"), rule.get("end")
    where = "" if first is None else f" in layers {first} to {end - 1 if isinstance(end, int) else end}"
    return f"{code(str(rule.get('match', '*')))}{where}: {code(str(rule.get('rung')))}"


def sizes(subject: Subject) -> str:
    """Bytes on the disk, by part."""
    contents = subject.contents
    rows = [
        (f"{role} ({counted(len(layers), 'layer')})", sum(layer.record.nbytes or 0 for layer in layers))
        for role, layers in grouped(subject.layers, lambda layer: layer.role).items()
    ]
    shards = sum(file.nbytes for file in contents.files if file.name.endswith(".uqff"))
    residual = sum(file.nbytes for file in contents.files if file.name == RESIDUAL_NAME)
    rows += [
        ("tables of the rungs", contents.totals.table_bytes),
        ("headers of the shards", shards - contents.totals.table_bytes - sum(size for _, size in rows)),
        ("norms and other small tensors", residual),
        ("configuration, tokenizer, licence", contents.totals.nbytes - shards - residual),
        ("all, without this page and the report", contents.totals.nbytes),
    ]
    return "## Size\n\n" + table(("part", "bytes"), [(what, f"{size:,}") for what, size in rows])


def calibration(subject: Subject) -> str:
    """What the error feedback was weighed with."""
    found = subject.info.calibration
    if found is None:
        return "## Calibration\n\nNone: what is quantised is rounded as it is, without regard to what a layer sees."
    tokens, sampled = found.get("tokens"), found.get("sampled")
    source = "the public-domain text that ships with arctool" if found.get("auto") else "text that whoever baked it chose"
    by_itself = f", {sampled:,} of them written by the model itself" if isinstance(sampled, int) and sampled else ""
    count = f"{tokens:,}" if isinstance(tokens, int) else "an unknown number of"
    lossy = [layer.record for layer in subject.layers if layer.record.details.dropped_rows]
    dropped = "No row of it had to be left out."
    if lossy:
        worst = max(lossy, key=lambda record: record.details.dropped_rows)
        most = f"at most {worst.details.dropped_rows:,} ({code(worst.module)})"
        dropped = f"Rows that were not finite were left out in {counted(len(lossy), 'layer')}, {most}."
    return (
        f"## Calibration\n\n{count} tokens of {source}{by_itself}, in windows of {plain(str(found.get('window', 'unknown')))}; identity "
        f"{code(str(found.get('text', 'unknown')))}. {dropped}"
    )


def quality(subject: Subject) -> str:
    """What was measured of the whole, and of every rung's layers."""
    found = subject.quality
    if isinstance(found, str):
        text = f"The model as a whole was not measured when it was baked: {sentence(found)}.\n\n{MEASURE}"
    else:
        rows = [
            ("perplexity", f"{found.perplexity:.4g}, its source {found.base_perplexity:.4g}"),
            ("KL divergence from the source, mean", f"{found.kl:.4g} nats a token"),
            ("KL divergence, 99th percentile", f"{found.kl_p99:.4g} nats a token"),
            ("same likeliest token as the source", f"{found.same_top1:.1%}"),
        ]
        text = (
            f"{table(('', ''), rows)}\n\nOver {found.predicted:,} predicted of the first {found.tokens:,} tokens of arctool's "
            f"{code(found.text)} (SHA-256 {code(found.text_sha256)}), read in windows of at most {found.window:,}; SHA-256 of the tokens: "
            f"{code(found.tokens_sha256)}. arctool's calibration text is another one. So few tokens tell rungs apart, not close rivals. "
            f"{MEASURE}"
        )
    return f"## Quality\n\n{text}\n\n{layer_errors(subject)}"


def layer_errors(subject: Subject) -> str:
    """Mean and worst errors of the packed layers, by rung."""
    rows = []
    for rung, layers in grouped(subject.layers, lambda layer: layer.rung).items():
        if all(layer.record.stored in DENSE_LABELS for layer in layers):
            continue
        relative = [(layer.record.details.relative_error, layer.record) for layer in layers]
        proxy = [(layer.record.details.proxy_error, layer.record) for layer in layers]
        rows.append((code(rung), str(len(layers)), *mean_and_worst(relative), *mean_and_worst(proxy)))
    if not rows:
        return "No layer is quantised."
    heads = ("rung", "layers", "relative error, mean", "worst", "output error, mean", "worst")
    return (
        f"{table(heads, rows)}\n\nRelative error: ‖W−Ŵ‖²/‖W‖² of a layer's weights. Output error: tr(E H Eᵀ)/tr(W H Wᵀ), the share of the "
        "output's power that is lost on the calibration text, where there was one. Means weigh a layer by its weights."
    )


def mean_and_worst(errors: Sequence[tuple[float | None, LayerRecord]]) -> tuple[str, str]:
    """The mean of the errors that are known, weighed by weights, and the largest with its layer."""
    known = [(error, record) for error, record in errors if error is not None]
    if not known:
        return "–", "–"
    mean = sum(error * record.weights for error, record in known) / sum(record.weights for _, record in known)
    worst, where = max(known, key=lambda pair: pair[0])
    return f"{mean:.4g}", f"{worst:.4g} ({code(where.module)})"


def fallbacks(subject: Subject) -> str:
    """The layers that did not get what was asked for, and why."""
    lines = []
    for layer in subject.layers:
        details, module = layer.record.details, code(layer.record.module)
        if details.fallback_reason is not None:
            wanted = code(details.resolved_target or "unknown")
            lines.append(f"- {module}: {code(layer.rung)} instead of {wanted}: {sentence(details.fallback_reason)}")
        if details.note is not None:
            lines.append(f"- {module}: {sentence(details.note)}")
    more = len(lines) - MOST_LISTED
    lines = lines[:MOST_LISTED] + ([f"- and {more} more: `{REPORT_NAME}` has all"] if more > 0 else [])
    return "## Layers that fell back\n\n" + ("\n".join(lines) if lines else "None: every layer got what the recipe says.")


MEASURE = "To measure with more, and against any other model: `arctool eval DIRECTORY --against SOURCE`."

USAGE = """## How to use it

DIRECTORY is where these files lie, SOURCE the checkpoint that they were made from.

```
arctool run DIRECTORY                      # chat in the terminal
arctool serve DIRECTORY                    # an OpenAI-compatible server, in versions that have one
arctool verify DIRECTORY                   # every file, every layer, every decoder, bit by bit
arctool verify DIRECTORY --source SOURCE   # and the error of every layer
arctool inspect DIRECTORY                  # what is inside
```

```python
import arctool

print(arctool.LLM("DIRECTORY").chat([{"role": "user", "content": "What is a codebook?"}]).text)
```

mistral.rs reads the container and those layers that it has a format for; trellis layers it refuses by name."""


def bits(subject: Subject, which: Callable[[CardLayer], bool]) -> str:
    """Mean stored bits a weight of some layers."""
    return mean_bits([layer for layer in subject.layers if which(layer)])


def mean_bits(layers: Sequence[CardLayer]) -> str:
    """Mean stored bits a weight, weighed by weights; a dash where there is nothing to count."""
    known = [layer.record for layer in layers if layer.record.bits_per_weight is not None]
    if not known:
        return "–"
    mean = sum((record.bits_per_weight or 0.0) * record.weights for record in known) / sum(record.weights for record in known)
    return f"{mean:.3f}" if math.isfinite(mean) else "–"


def counted(count: int, what: str) -> str:
    """A number of things, in words: one has no s."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def weights(layers: Iterable[CardLayer]) -> int:
    """How many weights the layers have."""
    return sum(layer.record.weights for layer in layers)


def grouped(layers: Iterable[CardLayer], key: Callable[[CardLayer], Key]) -> dict[Key, list[CardLayer]]:
    """The layers by `key`, in the order in which keys first occur."""
    found: dict[Key, list[CardLayer]] = {}
    for layer in layers:
        found.setdefault(key(layer), []).append(layer)
    return found
