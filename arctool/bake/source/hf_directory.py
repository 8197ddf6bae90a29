"""A Hugging Face checkpoint directory as a source: config.json, safetensors (single or sharded), tokenizer files, licence.

Knows file names and the shard index, not which tensors a model needs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from arctool.bake.source.safetensors_store import SafetensorsStore
from arctool.bake.source.stored import Source
from arctool.bake.source.terms import licence_files, read_terms
from arctool.errors import SourceError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

ASSET_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files that travel into an artifact unchanged, if they are there."""

PICKLE_SUFFIXES = (".bin", ".pth", ".pt", ".ckpt")


def open_hf_directory(directory: Path, label: str | None = None) -> Source:
    """The checkpoint in `directory`. `label` names it in errors (a hub id); the path does by default.

    Raises SourceError where the directory is no model or a file of it cannot be read.
    """
    where = label or str(directory)
    config_path = directory / "config.json"
    if not config_path.is_file():
        raise SourceError(f"{where}: no config.json, so this is no Hugging Face model{_other_kind(directory)}")
    config = read_json_object(config_path)
    files = _tensor_files(directory, where)
    store = SafetensorsStore(files)
    assets = {name: _read_bytes(directory / name) for name in ASSET_NAMES if (directory / name).is_file()}
    if "tokenizer.json" not in assets:
        raise SourceError(
            f"{where}: no tokenizer.json; save the fast tokenizer into the directory "
            "(transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    for name in assets:
        if name.endswith(".json"):
            read_json_object(directory / name)
    return Source(where, config, store, assets | licence_files(directory), files, read_terms(directory))


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises SourceError for anything else."""
    try:
        value = json.loads(_read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise SourceError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from error


def _tensor_files(directory: Path, where: str) -> tuple[Path, ...]:
    """The safetensors files of the model, in a fixed order."""
    if (directory / INDEX_NAME).is_file():
        return _indexed_files(directory / INDEX_NAME)
    if (directory / SINGLE_NAME).is_file():
        return (directory / SINGLE_NAME,)
    found = sorted(directory.glob("*.safetensors"))
    for path in found:
        if not path.is_file():
            raise SourceError(f"{path}: not a regular file, or a link that leads nowhere; fetch the file itself")
    if len(found) == 1:
        return (found[0],)
    if found:
        names = ", ".join(path.name for path in found[:4])
        raise SourceError(f"{where}: {len(found)} safetensors files ({names}, ...) and no {INDEX_NAME} that says which belong together")
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise SourceError(
            f"{where}: weights only as pickle ({pickles[0]}), which can run code when it is read and is refused; "
            "convert the checkpoint to safetensors"
        )
    raise SourceError(f"{where}: no *.safetensors; download the weights too, or name the directory that holds them")


def _indexed_files(index_path: Path) -> tuple[Path, ...]:
    """The shards that an index names; every one of them must be there."""
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
        raise SourceError(f"{index_path}: expected a weight_map from tensor names to file names")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name:
            raise SourceError(f"{index_path}: shard {name!r} is not a plain file name")
        if not (index_path.parent / name).is_file():
            tensor = next(key for key, shard in weight_map.items() if shard == name)
            raise SourceError(f"{index_path}: names shard {name} (for {tensor}), which is not there; download it")
    return tuple(index_path.parent / name for name in names)


def _other_kind(directory: Path) -> str:
    """What the directory seems to be instead, as the tail of a message."""
    names = [path.name for path in directory.iterdir()]
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs:
        return f"; to use the GGUF file in it, name it: {directory / ggufs[0]}"
    return ""
