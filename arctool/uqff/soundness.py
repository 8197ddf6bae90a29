"""Is the container sound? Everything about an artifact that can be checked without decoding a weight.

Names, lengths and versions are checked by opening it and taking each layer apart; here the artifact is then held to its own
report, to the model's shapes, and to its directory.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from arctool.errors import ArctoolError, FormatError
from arctool.quant.tensor import DenseTensor, TrellisTensor
from arctool.uqff.answers import Tally
from arctool.uqff.discovery import CONFIG_NAME, RESIDUAL_NAME, SHADOWS, read_text
from arctool.uqff.families import check_finite, table_name
from arctool.uqff.files import hash_file
from arctool.uqff.header import parse_json
from arctool.uqff.reader import Artifact
from arctool.uqff.report import REPORT_NAME, Hashes, LayerRecord, Report, make_output

Step = Callable[[], None]

_HARMLESS: Final = ("readme", "license", "licence", "notice", ".gitattributes")
"""What people and hubs put beside a model, and no loader reads."""


@dataclass(frozen=True)
class Readable:
    """Keys of the layers that can be read, in file order, and those among them that are no part of the model in that shape."""

    keys: tuple[str, ...]
    misfits: frozenset[str]


def check_container(artifact: Artifact, expected: Mapping[str, tuple[int, ...]] | None, tally: Tally, step: Step) -> Readable:
    """Run every check of this room into `tally`; `step` is called once a layer."""
    readable = _check_layers(artifact, tally, step)
    _check_residual(artifact, tally)
    if artifact.report is None:
        _without_report(artifact, tally)
    else:
        _check_report(artifact, artifact.report, readable, tally)
        if artifact.report.hashes is not None:
            _check_hashes(artifact, artifact.report.hashes, tally)
    _check_directory(artifact, tally)
    misfits = _check_shapes(artifact, expected, readable, tally) if expected is not None else set()
    return Readable(tuple(readable), frozenset(misfits))


def _check_layers(artifact: Artifact, tally: Tally, step: Step) -> dict[str, LayerRecord]:
    """Take every layer apart: entries, lengths, geometry, finite scales. Returns what each is, by key."""
    readable: dict[str, LayerRecord] = {}
    used: set[str] = set()
    keys = artifact.keys()
    for key in keys:
        tally.count("layers")
        try:
            weight, _ = artifact.weight(key), artifact.bias(key)
        except ArctoolError as error:
            tally.fail(str(error))
        else:
            if isinstance(weight, DenseTensor):
                _check_finite(artifact, weight, f"{key}.weight", tally)
            nbytes = sum(entry.nbytes for entry in artifact.entries(key).values())
            bits = weight.stored_bits / math.prod(weight.shape)
            readable[key] = LayerRecord(key, weight.shape, weight.label, nbytes, bits)
            if isinstance(weight, TrellisTensor) and weight.codebook.kind == "table":
                used.add(table_name(weight.codebook.digest))
        step()
    if len(readable) == len(keys):
        for name in sorted(set(artifact.table_names()) - used):
            tally.fail(f"{artifact.directory}: table {name} is used by no layer")
    return readable


def _check_residual(artifact: Artifact, tally: Tally) -> None:
    for name in artifact.residual_names():
        tally.count("residual tensors")
        try:
            _check_finite(artifact, artifact.residual(name), name, tally)
        except ArctoolError as error:
            tally.fail(str(error))


def _check_finite(artifact: Artifact, tensor: DenseTensor, name: str, tally: Tally) -> None:
    """An infinity or NaN in one weight is one in every answer. The layer stays readable: its other faults are still looked for."""
    try:
        check_finite(tensor, f"{artifact.directory}: {name}")
    except FormatError as error:
        tally.fail(str(error))


def _without_report(artifact: Artifact, tally: Tally) -> None:
    message = f"{artifact.directory}: no {REPORT_NAME}, so no hash could be checked"
    if artifact.shards[0].header.metadata.get("uqff.producer") == "arctool":
        tally.fail(f"{message}; arctool always writes one: it was removed")
    else:
        tally.note(message)


def _check_report(artifact: Artifact, report: Report, readable: Mapping[str, LayerRecord], tally: Tally) -> None:
    """Our own report must be what we would write for these bytes; a foreign one must name the layers and shapes that are there."""
    where = f"{artifact.directory / REPORT_NAME}"
    if len(readable) != len(artifact.keys()):
        return  # an unreadable layer has failed already, and the report cannot be rebuilt without it
    if report.bake is not None:
        claimed = parse_json(read_text(artifact.directory, REPORT_NAME), where)
        for difference in _differences(claimed, _rebuilt(artifact, report, readable).to_json(), ""):
            tally.fail(f"{where}: {difference}")
        tally.count("report fields", _leaves(claimed))
        return
    output = artifact.output
    if output is None:
        return
    if output.layer_count != len(readable) or sum(output.actual_counts.values()) != len(readable):
        tally.fail(f"{where}: claims {output.layer_count} layers in {dict(output.actual_counts)}, the shards hold {len(readable)}")
    for layer in output.layers:
        tally.count("report layers")
        found = readable.get(layer.module)
        if found is None or found.shape != layer.shape:
            tally.fail(f"{where}: {layer.module} is claimed as {list(layer.shape)}, found {list(found.shape) if found else 'no layer'}")


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


def _differences(claimed: Any, found: Any, at: str) -> Iterator[str]:
    """Where two JSON values differ, by path."""
    if isinstance(claimed, dict) and isinstance(found, dict):
        for key in sorted(claimed.keys() | found.keys()):
            yield from _differences(claimed.get(key), found.get(key), f"{at}.{key}" if at else key)
    elif isinstance(claimed, list) and isinstance(found, list) and len(claimed) == len(found):
        for index, (left, right) in enumerate(zip(claimed, found, strict=True)):
            yield from _differences(left, right, f"{at}[{index}]")
    elif claimed != found:
        yield f"{at}: the report claims {str(claimed)[:80]}, the artifact has {str(found)[:80]}"


def _leaves(value: Any) -> int:
    if isinstance(value, dict | list):
        return sum(map(_leaves, value.values() if isinstance(value, dict) else value))
    return 1


def _check_hashes(artifact: Artifact, hashes: Hashes, tally: Tally) -> None:
    """SHA-256 of every entry, every shard's header and every other file, both ways: nothing altered, missing or added."""
    found = {}
    for shard in artifact.shards:
        for name in shard.header.tensors:
            found[name] = hashlib.sha256(shard.entry(name).raw.data).hexdigest()
    _compare("entry", hashes.entries, found, tally)
    _compare("header of", hashes.headers, {shard.path.name: shard.header_sha256() for shard in artifact.shards}, tally)
    files = {}
    for name in (RESIDUAL_NAME, CONFIG_NAME, *artifact.assets):
        files[name] = hash_file(artifact.directory / name)
    _compare("file", hashes.files, files, tally)


def _compare(what: str, claimed: Mapping[str, str], found: Mapping[str, str], tally: Tally) -> None:
    for name in sorted(claimed.keys() | found.keys()):
        tally.count("hashes")
        if name not in found:
            tally.fail(f"{what} {name}: listed in {REPORT_NAME} but not in the artifact")
        elif name not in claimed:
            tally.fail(f"{what} {name}: in the artifact but not listed in {REPORT_NAME}")
        elif claimed[name] != found[name]:
            tally.fail(f"{what} {name}: SHA-256 {found[name]} is not the {claimed[name]} of {REPORT_NAME}; the bytes were altered")


def _check_directory(artifact: Artifact, tally: Tally) -> None:
    """No file that a loader would take instead of ours, and none that belongs to nothing."""
    ours = {shard.path.name for shard in artifact.shards} | {RESIDUAL_NAME, CONFIG_NAME, REPORT_NAME, *artifact.assets}
    if artifact.report is not None:
        ours |= {name for output in artifact.report.outputs for name in output.shards}
    for item in sorted(artifact.directory.iterdir()):
        tally.count("files")
        if SHADOWS.fullmatch(item.name):
            tally.fail(f"{item}: other programs load this file instead of the artifact's; remove it")
        elif item.name in ours:
            continue
        elif item.is_dir() or item.name.lower().startswith(_HARMLESS):
            tally.note(f"{item}: not part of the artifact")
        else:
            tally.fail(f"{item}: a stray file that nothing in the artifact refers to; remove it")


def _check_shapes(
    artifact: Artifact, expected: Mapping[str, tuple[int, ...]], readable: Mapping[str, LayerRecord], tally: Tally
) -> set[str]:
    """Every tensor of the model is there in its shape, and no layer is there that the model lacks. Returns the keys of those that fail."""
    misfits = set()
    unreadable = set(artifact.keys()) - set(readable)
    for name, shape in expected.items():
        tally.count("shapes")
        key = name.removesuffix(".weight").removesuffix(".bias")
        if key in unreadable:
            continue  # refused already
        try:
            found = _shape(artifact, key, bias=name.endswith(".bias"))
        except ArctoolError as error:
            tally.fail(str(error))
            continue
        if found != tuple(shape):
            shown = "nothing" if found is None else list(found)
            tally.fail(f"{Path(artifact.directory).name}: {name}: the model needs {list(shape)}, found {shown}")
            if not name.endswith(".bias"):
                misfits.add(key)
    known = {name.removesuffix(".weight").removesuffix(".bias") for name in expected}
    for key in sorted(set(artifact.keys()) - known):
        tally.fail(f"{artifact.directory}: layer {key} is no part of the model that {CONFIG_NAME} describes")
        misfits.add(key)
    return misfits


def _shape(artifact: Artifact, key: str, *, bias: bool) -> tuple[int, ...] | None:
    if not bias:
        return artifact.weight(key).shape
    found = artifact.bias(key)
    return None if found is None else found.shape
