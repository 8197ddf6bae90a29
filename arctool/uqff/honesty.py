"""Does an artifact say the truth about itself? Its report against the bytes, its hashes against the bytes, its name against its layers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any, Final

from arctool.quant.codebooks import RUNGS
from arctool.quant.tensor import TrellisTensor
from arctool.uqff.answers import Tally
from arctool.uqff.discovery import CONFIG_NAME, RESIDUAL_NAME, read_text
from arctool.uqff.files import hash_file
from arctool.uqff.header import parse_json
from arctool.uqff.json_changes import changes
from arctool.uqff.reader import Artifact
from arctool.uqff.report import REPORT_NAME, LayerRecord, Output, Report, make_output

KIND_NAMES: Final = frozenset(
    (
        *("f32", "f16", "bf16", "unquant", "fp8", "f8q8", "mxfp4", "hqq4", "hqq8", "afq2", "afq3", "afq4", "afq6", "afq8"),
        *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q8_1", "q2k", "q3k", "q4k", "q5k", "q6k", "q8k"),
    )
)
"""Labels that mistral.rs's reports and file names use for a way of storing; its own name for our bf16 and f32 may be `unquant`."""

SHOWN_TYPES: Final = 4
"""Types that a note counts, the most frequent first."""


def check_report(artifact: Artifact, readable: Mapping[str, LayerRecord], tally: Tally) -> None:
    """Our own report must be what we would write for these bytes; a foreign one must name the layers, shapes and types that are there."""
    report = artifact.report
    if report is None:
        _without_report(artifact, tally)
        return
    if len(readable) != len(artifact.keys()):
        return  # an unreadable layer has failed already, and the report cannot be rebuilt without it
    where = f"{artifact.directory / REPORT_NAME}"
    if report.bake is not None:
        claimed = parse_json(read_text(artifact.directory, REPORT_NAME), where)
        for change in changes(claimed, _rebuilt(artifact, report, readable).to_json()):
            tally.fail(f"{where}: {change.name}: the report claims {str(change.a)[:80]}, the artifact has {str(change.b)[:80]}")
        tally.count("report fields", _leaves(claimed))
    elif artifact.output is not None:
        if _ours(artifact):
            tally.fail(f"{where}: without the part `arctool`, which holds the hashes; arctool always writes it: it was removed")
        _check_foreign(artifact, artifact.output, readable, where, tally)


def check_name(artifact: Artifact, readable: Mapping[str, LayerRecord], tally: Tally) -> None:
    """Show what is stored in another type than the artifact is named for: a file called q4k may hold more q4_1."""
    for name, source in _claimed_names(artifact).items():
        _check_claim(name, source, readable, tally)


def _check_claim(name: str, source: str, readable: Mapping[str, LayerRecord], tally: Tally) -> None:
    expected = _labels_of(name)
    # Tables over the vocabulary get more bits by everybody's default; what matters is the layers between.
    layers = {key: record for key, record in readable.items() if ".layers." in key}
    others = Counter(record.stored for record in layers.values() if record.stored not in expected)
    tally.count("layers as named", len(layers) - others.total())
    if others:
        shown = ", ".join(f"{count} {label}" for label, count in others.most_common(SHOWN_TYPES))
        shown += ", …" if len(others) > SHOWN_TYPES else ""
        first = next(key for key, record in layers.items() if record.stored not in expected)
        tally.note(f"{source} says {name}: {others.total()} of {len(layers)} layers are stored otherwise ({shown}), the first is {first}")


def check_hashes(artifact: Artifact, pool: Executor, tally: Tally, *, entries: bool = True) -> None:
    """SHA-256 of every entry, every shard's header and every other file, both ways: nothing altered, missing or added.

    Without `entries`, those of the data (shards' entries and the residual file) are left out: what remains takes no time.
    """
    hashes = None if artifact.report is None else artifact.report.hashes
    if hashes is None:
        return
    _compare("header of", hashes.headers, {shard.path.name: shard.header_sha256() for shard in artifact.shards}, tally)
    skipped = set() if entries else {RESIDUAL_NAME}
    names = [name for name in (RESIDUAL_NAME, CONFIG_NAME, *artifact.assets) if name not in skipped]
    files = dict(zip(names, pool.map(lambda name: hash_file(artifact.directory / name), names), strict=True))
    _compare("file", {name: digest for name, digest in hashes.files.items() if name not in skipped}, files, tally)
    places = [(shard, name) for shard in artifact.shards for name in shard.header.tensors]
    if entries:
        found = pool.map(lambda place: place[0].sha256(place[1]), places)
        _compare("entry", hashes.entries, {name: digest for (_, name), digest in zip(places, found, strict=True)}, tally)
    else:
        _compare_names("entry", hashes.entries, {name for _, name in places}, tally)


def _without_report(artifact: Artifact, tally: Tally) -> None:
    message = f"{artifact.directory}: no {REPORT_NAME}, so no hash could be checked"
    if _ours(artifact):
        tally.fail(f"{message}; arctool always writes one: it was removed")
    else:
        tally.note(message)


def _ours(artifact: Artifact) -> bool:
    """Whether the first shard says that arctool wrote it."""
    return artifact.shards[0].header.metadata.get("uqff.producer") == "arctool"


def _check_foreign(artifact: Artifact, output: Output, readable: Mapping[str, LayerRecord], where: str, tally: Tally) -> None:
    """A report of mistral.rs: counts, and each layer that it details. It has no hashes, and of codes it gives the shape of the words."""
    tally.note(f"{where}: without hashes; only shapes and types were compared with it")
    claimed = {name: count for name, count in output.actual_counts.items() if count}
    found = Counter(record.stored for record in readable.values())
    same = _canonical(claimed) == _canonical(found)
    if output.layer_count != len(readable) or not same:
        tally.fail(f"{where}: claims {output.layer_count} layers in {claimed}, the shards hold {len(readable)} in {dict(found)}")
    for module, count in Counter(layer.module for layer in output.layers).items():
        if count > 1:
            tally.fail(f"{where}: {module} is claimed {count} times")
    for module in sorted(set(readable) - {layer.module for layer in output.layers}) if output.layers else ():
        tally.fail(f"{where}: {module} is in the shards and not among the layers of the report")
    for layer in output.layers:
        tally.count("report layers")
        record = readable.get(layer.module)
        if record is None:
            tally.fail(f"{where}: {layer.module} is claimed, and there is no such layer")
        elif layer.shape != record.shape and layer.shape != _word_shape(artifact, record):
            tally.fail(f"{where}: {layer.module} is claimed as {list(layer.shape)}, found {list(record.shape)}")
        elif _canonical({layer.stored: 1}) != _canonical({record.stored: 1}):
            tally.fail(f"{where}: {layer.module} is claimed as {layer.stored}, found {record.stored}")


def _word_shape(artifact: Artifact, record: LayerRecord) -> tuple[int, ...] | None:
    """The shape of the words that hold a layer's codes, where mistral.rs reports that one in place of the weight's."""
    if not record.stored.startswith(("afq", "mxfp4")):
        return None
    return artifact.entries(record.module)[f"{record.module}.weight"].shape


def _canonical(counts: Mapping[str, int]) -> dict[str, int]:
    """Counts by label; mistral.rs calls its tag 1 `unquant` whatever it holds, and that may be any plain type."""
    merged: Counter[str] = Counter()
    for label, count in counts.items():
        merged["plain" if label in ("unquant", "f32", "f16", "bf16") else label] += count
    return dict(merged)


def _claimed_names(artifact: Artifact) -> dict[str, str]:
    """What the report and the first shard's name call the way of storing → who says so; a name that is no such way is left out."""
    file = artifact.shards[0].path.name
    claims = [] if artifact.output is None else [(artifact.output.quant, REPORT_NAME)]
    claims.append((re.sub(r"-\d+$", "", file.removesuffix(".uqff")), file))
    found: dict[str, str] = {}
    for name, source in claims:
        if name.lower() in RUNGS or name.lower() in KIND_NAMES:
            found.setdefault(name.lower(), source)
    return found


def _labels_of(name: str) -> frozenset[str]:
    """What `stored` says of layers that are what `name` names."""
    if name in RUNGS:
        rung = RUNGS[name]
        kind = "sum2" if rung.codebook_name == "sum2" else rung.codebook().dtype
        return frozenset((TrellisTensor.label_of(rung.geometry, kind),))
    return frozenset(("f32", "f16", "bf16")) if name == "unquant" else frozenset((name,))


def _rebuilt(artifact: Artifact, report: Report, readable: Mapping[str, LayerRecord]) -> Report:
    """The report that the writer would give these bytes; what only the baker knows is taken from `report`."""
    known = {} if artifact.output is None else {layer.module: layer.details for layer in artifact.output.layers}
    layers = tuple(replace(layer, details=known.get(key, layer.details)) for key, layer in readable.items())
    quant = report.bake.rung if report.bake is not None else report.outputs[0].quant
    metadata = artifact.shards[0].header.metadata
    return replace(
        report,
        tool=metadata.get("uqff.producer", "nothing"),
        tool_version=metadata.get("arctool.version"),
        uqff_version=".".join(map(str, artifact.version)),
        outputs=(make_output(quant, tuple(shard.path.name for shard in artifact.shards), layers),),
    )


def _leaves(value: Any) -> int:
    if isinstance(value, dict | list):
        return sum(map(_leaves, value.values() if isinstance(value, dict) else value))
    return 1


def _compare(what: str, claimed: Mapping[str, str], found: Mapping[str, str], tally: Tally) -> None:
    for name in sorted(claimed.keys() & found.keys()):
        tally.count("hashes")
        if claimed[name] != found[name]:
            tally.fail(f"{what} {name}: SHA-256 {found[name]} is not the {claimed[name]} of {REPORT_NAME}; the bytes were altered")
    _compare_names(what, claimed, found.keys(), tally, counted="hashes")


def _compare_names(what: str, claimed: Mapping[str, str], found: Any, tally: Tally, counted: str = "names") -> None:
    for name in sorted(claimed.keys() - found):
        tally.count(counted)
        tally.fail(f"{what} {name}: listed in {REPORT_NAME} but not in the artifact")
    for name in sorted(found - claimed.keys()):
        tally.count(counted)
        tally.fail(f"{what} {name}: in the artifact but not listed in {REPORT_NAME}")
