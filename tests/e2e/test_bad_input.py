"""Everything that a user can get wrong or a machine can refuse: one line that names the culprit, its exit code, nothing half-written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from commands import arctool, refused, tree
from safetensors.numpy import load_file, save_file
from zygote import Zygote

from arctool.errors import FormatError, RequestError, SourceError, StorageError, UsageError, VerificationError

SOURCE, USAGE, FORMAT = SourceError.exit_code, UsageError.exit_code, FormatError.exit_code
STORAGE, REQUEST, VERIFICATION = StorageError.exit_code, RequestError.exit_code, VerificationError.exit_code


@pytest.fixture
def model(copy_checkpoint: Callable[[str], Path]) -> Path:
    """A tiny Llama to be broken."""
    return copy_checkpoint("llama")


def change_config(model: Path, **fields: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def change_weights(model: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    weights = load_file(model / "model.safetensors")
    change(weights)
    save_file(weights, model / "model.safetensors")


def cut(path: Path, keep: float = 0.5) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


def poison(weights: dict[str, np.ndarray]) -> None:
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan


UP = "model.layers.1.mlp.up_proj.weight"

BROKEN_MODELS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "a missing tensor": (lambda m: change_weights(m, lambda w: w.pop(UP)), (f"tensor {UP} [96, 64] is missing",)),
    "a wrong shape": (
        lambda m: change_weights(m, lambda w: w.update({UP: np.ones((95, 64), np.float32)})),
        ("model.safetensors", UP, "expected shape [96, 64]", "found [95, 64]"),
    ),
    "a tensor that would be dropped": (
        lambda m: change_weights(m, lambda w: w.update({"model.layers.1.mlp.up_proj.bias": np.ones(96, np.float32)})),
        ("model.layers.1.mlp.up_proj.bias",),
    ),
    "an integer tensor": (lambda m: change_weights(m, lambda w: w.update({UP: np.ones((96, 64), np.int8)})), (UP, "I8")),
    "a value that is no number": (lambda m: change_weights(m, poison), (UP, "NaN or infinite", "[3, 5]")),
    "an unknown architecture": (lambda m: change_config(m, architectures=["GemmaForCausalLM"]), ("GemmaForCausalLM", "LlamaForCausalLM")),
    "no architecture": (lambda m: change_config(m, architectures=None), ("config.json", "architectures")),
    "a width of nothing": (lambda m: change_config(m, hidden_size=0), ("config.json", "hidden_size")),
    "a width of text": (lambda m: change_config(m, hidden_size="64"), ("config.json", "hidden_size")),
    "layers beyond belief": (lambda m: change_config(m, num_hidden_layers=10**9), ("config.json", "num_hidden_layers")),
    "quantised already": (lambda m: change_config(m, quantization_config={"quant_method": "gptq"}), ("quantization_config", "gptq")),
    "a config that is no JSON": (lambda m: cut(m / "config.json"), ("config.json", "not valid JSON")),
    "a config that is a list": (lambda m: (m / "config.json").write_text("[]"), ("config.json", "found list")),
    "no config": (lambda m: (m / "config.json").unlink(), ("no config.json",)),
    "a directory for a config": (lambda m: ((m / "config.json").unlink(), (m / "config.json").mkdir()), ("no config.json",)),
    "no weights": (lambda m: (m / "model.safetensors").unlink(), ("no *.safetensors",)),
    "weights cut off": (lambda m: cut(m / "model.safetensors", 0.9), ("model.safetensors",)),
    "weights of no bytes": (lambda m: (m / "model.safetensors").write_bytes(b""), ("model.safetensors",)),
    "weights of one huge header": (lambda m: (m / "model.safetensors").write_bytes(b"\xff" * 64), ("model.safetensors",)),
    "weights behind a link to nowhere": (
        lambda m: ((m / "model.safetensors").unlink(), (m / "model.safetensors").symlink_to("gone")),
        ("model.safetensors", "not a regular file"),
    ),
    "a directory for weights": (
        lambda m: ((m / "model.safetensors").unlink(), (m / "model.safetensors").mkdir()),
        ("model.safetensors", "not a regular file"),
    ),
    "a pipe for weights": (
        lambda m: ((m / "model.safetensors").unlink(), os.mkfifo(m / "model.safetensors")),
        ("model.safetensors", "not a regular file"),
    ),
    "weights as pickle only": (lambda m: (m / "model.safetensors").rename(m / "pytorch_model.bin"), ("pytorch_model.bin", "pickle")),
    "an index of a missing shard": (
        lambda m: (m / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {UP: "model-00002.safetensors"}})),
        ("model-00002.safetensors", UP),
    ),
    "an index that leaves the directory": (
        lambda m: (m / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {UP: "../x.safetensors"}})),
        ("../x.safetensors",),
    ),
    "no tokenizer": (lambda m: (m / "tokenizer.json").unlink(), ("no tokenizer.json",)),
    "a tokenizer cut off": (lambda m: cut(m / "tokenizer.json"), ("tokenizer.json", "not valid JSON")),
}


@pytest.mark.parametrize("fault", BROKEN_MODELS)
def test_a_broken_checkpoint_is_refused_by_its_culprit(zygote: Zygote, model: Path, tmp_path: Path, fault: str) -> None:
    break_it, named = BROKEN_MODELS[fault]
    break_it(model)
    refused(zygote.run("bake", model, "--isq", "bf16", "-o", "a", cwd=tmp_path), SOURCE, str(model), *named)
    assert os.listdir(tmp_path) == ["llama"]


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("missing", ("missing: no such file or directory",)),
        ("empty", ("empty: no config.json",)),
        ("text", ("text: not a model that we know",)),
        ("pipe.gguf", ("pipe.gguf: neither a directory nor a regular file",)),
        ("short.gguf", ("short.gguf",)),
        ("lying.gguf", ("lying.gguf", "claims 18446744073709551615 metadata pairs")),
        ("model.safetensors", ("model.safetensors: a single safetensors file has no config",)),
        ("model.pth", ("model.pth: a pickle can run code",)),
        ("two\nlines \x1b[31mred", ("two lines \\x1b[31mred: no such file",)),
        ("", ("no such file or directory",)),
    ],
)
@pytest.mark.parametrize("command", ["bake", "run", "source"])
def test_what_is_no_model_is_refused_by_name(
    zygote: Zygote, tiny_artifact: Path, tmp_path: Path, command: str, name: str, named: tuple[str, ...]
) -> None:
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe.gguf")
    for file, data in {
        "text": b"hello", "short.gguf": b"GGUF\x03\0", "lying.gguf": b"GGUF\x03\0\0\0" + b"\xff" * 99,
        "model.safetensors": b"", "model.pth": b"",
    }.items():  # fmt: skip
        (tmp_path / file).write_bytes(data)
    before = sorted(os.listdir(tmp_path))
    argv = {
        "bake": ("bake", name, "--isq", "qtip4", "-o", "a"),
        "run": ("run", name, "-p", "x"),
        "source": ("verify", tiny_artifact, "--source", name),
    }[command]
    refused(zygote.run(*argv, cwd=tmp_path), SOURCE, *named)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_hub_that_cannot_be_reached_is_said_to_be(zygote: Zygote, tmp_path: Path) -> None:
    refused(zygote.run("bake", "org/name", "--isq", "qtip4", cwd=tmp_path), SOURCE, "org/name", "cannot be reached")
    assert os.listdir(tmp_path) == []


def test_an_artifact_is_no_checkpoint_and_a_checkpoint_no_artifact(zygote: Zygote, artifact: Path, model: Path, tmp_path: Path) -> None:
    refused(zygote.run("bake", artifact, "--isq", "qtip4", "-o", "a", cwd=tmp_path), SOURCE, str(artifact), "is an artifact")
    refused(zygote.run("inspect", model), FORMAT, str(model), "not an artifact")
    told = zygote.run("verify", model)
    assert told.code == VERIFICATION
    assert "not an artifact" in told.stdout
    assert "NOT VERIFIED" in told.stdout
    for command in ("inspect", "verify"):
        refused(zygote.run(command, model / "config.json"), USAGE, str(model / "config.json"), "not an artifact")
        refused(zygote.run(command, tmp_path / "missing"), STORAGE, str(tmp_path / "missing"), "no such file or directory")
    refused(zygote.run("inspect", tmp_path), FORMAT, str(tmp_path), "not an artifact")


RECIPES = {
    "nonsense: 1": ("nonsense", "layer range"),
    "default: {isq: qtip9}": ("default", "qtip9", "qtip2-v4"),
    "0-9: {isq: qtip4}": ("0-9", "the model's layers are 0 to 1"),
    '0: {isq: qtip4, size: 3}': ("0:", "size"),
    'rules: [{match: "*.x_proj", isq: qtip4}]': ("*.x_proj", "matches no tensor"),
    'rules: [{match: "model.norm", isq: qtip4}]': ("model.norm", "norm is not quantised"),
    "embedding: q4_m": ("embedding", "unknown rung 'q4_m'", "q8_0"),
    "rules: [{": ("not valid YAML",),
    "0: {isq: qtip4}\n0: {isq: qtip3}": ("0", "comes twice"),
    "": ("expected a mapping",),
    "[1, 2]": ("expected a mapping", "list"),
}  # fmt: skip


@pytest.mark.parametrize("text", RECIPES)
def test_a_recipe_with_a_fault_is_refused_by_file_and_key(zygote: Zygote, tiny_llama: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "r.yml").write_text(text)
    done = zygote.run("bake", tiny_llama, "--isq", "qtip4", "--recipe", "r.yml", "-o", "a", cwd=tmp_path)
    refused(done, USAGE, "r.yml", *RECIPES[text])
    assert os.listdir(tmp_path) == ["r.yml"]


def test_a_recipe_that_is_no_file_is_refused(zygote: Zygote, tiny_llama: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, reason in ((tmp_path, "not a regular file"), (tmp_path / "pipe", "not a regular file"), (tmp_path / "no", "No such file")):
        done = zygote.run("bake", tiny_llama, "--isq", "qtip4", "--recipe", path, "-o", "a", cwd=tmp_path)
        refused(done, USAGE, str(path), "cannot be read", reason)
    assert os.listdir(tmp_path) == ["pipe"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--isq", "qtip9"), ("--isq: unknown rung 'qtip9'", "qtip2.25-v4", "bf16")),
        (("--isq", ""), ("--isq: unknown rung ''",)),
        (("--isq", "qtip4", "--seed", "-1"), ("--seed: expected 0 to 18446744073709551615, found -1",)),
        (("--isq", "qtip4", "--seed", str(1 << 64)), ("--seed", str(1 << 64))),
        (("--isq", "qtip4", "--revision", "main"), ("a revision (main) applies to hub ids only",)),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(
    zygote: Zygote, tiny_llama: Path, tmp_path: Path, options: tuple[str, ...], named: tuple[str, ...]
) -> None:
    refused(zygote.run("bake", tiny_llama, "-o", "a", *options, cwd=tmp_path), USAGE, *named)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("calib", "code", "named"),
    [
        (("no.txt",), SOURCE, ("no.txt: cannot be read: No such file or directory",)),
        (("empty.txt",), SOURCE, ("empty.txt: empty; calibration needs text",)),
        (("short.txt",), USAGE, ("--calib short.txt: expected at least 16 tokens of text",)),
        (("noise.txt",), SOURCE, ("noise.txt: expected UTF-8 text",)),
        (("bare",), USAGE, ("--calib bare: no .jsonl, .md, .txt file in it",)),
        (("",), USAGE, ("--calib: expected a file, a folder or auto",)),
        (("auto", "--calib-tokens", "0"), USAGE, ("--calib-tokens: expected at least 64, found 0",)),
    ],
)
def test_calibration_text_that_is_of_no_use_is_refused_by_name(
    zygote: Zygote, tiny_llama: Path, tmp_path: Path, calib: tuple[str, ...], code: int, named: tuple[str, ...]
) -> None:
    for name, data in {"empty.txt": b" \n", "short.txt": b"Hi.", "noise.txt": b"\xff\xfe"}.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "bare").mkdir()
    before = sorted(os.listdir(tmp_path))
    refused(zygote.run("bake", tiny_llama, "--isq", "qtip4", "-o", "a", "--calib", *calib, cwd=tmp_path), code, *named)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("bake", "x", "--isq", "qtip4", "--nope"), "--nope"),
        (("bake", "x", "--isq", "qtip4", "--jobs", "0"), "--jobs"),
        (("bake", "x", "--isq", "qtip4", "--seed", "one"), "--seed"),
        (("bake",), "model"),
        (("run", "x", "--temperature", "warm"), "--temperature"),
        (("frobnicate",), "frobnicate"),
    ],
)
def test_a_command_line_that_cannot_be_parsed_names_the_word(zygote: Zygote, tmp_path: Path, argv: tuple[str, ...], named: str) -> None:
    done = zygote.run(*argv, cwd=tmp_path)
    assert done.code == USAGE
    assert "Usage: arctool" in done.stderr
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "code", "named"),
    [
        (("--temperature", "nan"), REQUEST, "temperature: expected a number from 0 to 2, found nan"),
        (("--temperature", "inf"), REQUEST, "temperature"),
        (("--temperature", "-0.1"), REQUEST, "temperature"),
        (("--top-p", "0"), REQUEST, "top_p"),
        (("--top-p", "nan"), REQUEST, "top_p"),
        (("--min-p", "1.5"), REQUEST, "min_p"),
        (("--top-k", "-2"), REQUEST, "top_k"),
        (("--max-tokens", "0"), REQUEST, "max_tokens"),
        (("--seed", str(1 << 64)), REQUEST, "seed"),
        (("--typical-p", "0"), REQUEST, "typical_p"),
        (("--repetition-penalty", "0"), REQUEST, "repetition_penalty"),
        (("--presence-penalty", "nan"), REQUEST, "presence_penalty"),
        (("--frequency-penalty", "-3"), REQUEST, "frequency_penalty"),
        (("--regex", "[a"), REQUEST, "regex: at 1"),
        (("--regex", "a", "--json-schema", "x"), USAGE, "--json-schema and --regex"),
        (("--json-schema", "nowhere.json"), SOURCE, "nowhere.json: expected a JSON schema"),
        (("--json-schema", __file__), REQUEST, "json_schema: expected JSON"),
        (("--max-model-len", "1"), USAGE, "max_model_len: expected 2 to the model's max_position_embeddings = 256"),
        (("--max-model-len", "257"), USAGE, "max_model_len"),
        (("-p", "x" * 2000), REQUEST, "prompt: 2014 tokens leave no room in the context of 256 tokens"),
        (("-p", "hello there", "--max-model-len", "4"), REQUEST, "the context of 4 tokens"),
        (("-p", "", "--raw"), REQUEST, "prompt: expected at least one token"),
        (("-p", "\udcff"), REQUEST, "prompt: expected text that is valid Unicode"),
        (("--system", "\udcff"), REQUEST, "valid Unicode"),
    ],
)
def test_a_request_that_cannot_be_served_names_its_field(
    zygote: Zygote, tiny_artifact: Path, options: tuple[str, ...], code: int, named: str
) -> None:
    done = zygote.run("run", tiny_artifact, "-p", "hi", *options)
    refused(done, code, named)
    assert done.stdout == ""


def test_json_and_raw_want_a_prompt(zygote: Zygote, tiny_artifact: Path) -> None:
    for option in ("--json", "--raw"):
        refused(zygote.run("run", tiny_artifact, option), USAGE, "--prompt")


def test_standard_input_that_is_no_text_is_refused(tiny_artifact: Path, tmp_path: Path, zygote: Zygote) -> None:
    (tmp_path / "p").write_bytes(b"\xff\xfe\x00")
    strict = "import sys\nsys.stdin.reconfigure(encoding='utf-8', errors='strict')"
    refused(zygote.run("run", tiny_artifact, "-p", "-", stdin=tmp_path / "p", hook=strict), REQUEST, "standard input is not utf-8 text")
    lenient = strict.replace("'strict'", "'surrogateescape'")
    refused(zygote.run("run", tiny_artifact, "-p", "-", stdin=tmp_path / "p", hook=lenient), REQUEST, "prompt", "Unicode")


TEXTS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
FILES = ("config.json", "residual.safetensors", "qtip4-0.uqff", "uqff_report.json", *TEXTS)
DAMAGES: dict[str, Callable[[Path], object]] = {
    "gone": lambda path: path.unlink(),
    "cut": cut,
    "emptied": lambda path: path.write_bytes(b""),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "a link to nowhere": lambda path: (path.unlink(), path.symlink_to("gone")),
    "flipped": lambda path: path.write_bytes(path.read_bytes()[:-40] + bytes([path.read_bytes()[-40] ^ 1]) + path.read_bytes()[-39:]),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_artifact_is_never_verified_and_no_command_stumbles(zygote: Zygote, artifact: Path, file: str, damage: str) -> None:
    DAMAGES[damage](artifact / file)
    told = zygote.run("verify", artifact, "--json")
    assert told.code == VERIFICATION
    assert told.stderr == ""
    report = json.loads(told.stdout)
    assert not report["passed"]
    failures = [line for part in ("container", "implementations", "tables") for line in report[part]["failures"]]
    assert any(file in line or str(artifact) in line for line in failures), failures
    # What opens at all may still be looked at and run; what does not is one line with the code of its class.
    for argv in (("inspect", artifact), ("run", artifact, "-p", "x", "--max-tokens", "1", "--temperature", "0")):
        done = zygote.run(*argv)
        if done.code:
            assert done.code in (FORMAT, SOURCE)
            refused(done, done.code, "json" if file.endswith(".json") else file if damage != "gone" else str(artifact))
    if (damage in ("cut", "emptied") and file not in TEXTS) or damage == "a directory":
        refused(zygote.run("inspect", artifact), FORMAT, file)


def test_an_artifact_of_an_unknown_architecture_is_named_by_every_command(zygote: Zygote, artifact: Path) -> None:
    change_config(artifact, architectures=["MambaForCausalLM"])
    refused(zygote.run("run", artifact, "-p", "x"), FORMAT, "config.json", "MambaForCausalLM")
    told = zygote.run("verify", artifact)
    assert told.code == VERIFICATION
    assert "MambaForCausalLM" in told.stdout


@pytest.mark.parametrize(
    ("output", "named"),
    [
        ("file/a", "file"),
        ("file", "file: already exists"),
        ("folder", "folder: already exists"),
        ("dangling", "dangling: already exists"),
        ("dangling/a", "dangling"),
        ("folder/" + "n" * 300, "File name too long"),
        ("folder/" + "n" * 240, "File name too long"),
        ("/proc/nope/a", "/proc/nope: cannot write"),
        ("/", "/: already exists"),
        ("", "already exists"),
    ],
)
def test_an_output_that_cannot_be_made_is_refused_by_name(
    zygote: Zygote, tiny_llama: Path, tmp_path: Path, output: str, named: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere/at/all")
    before = tree(tmp_path), sorted(os.listdir(tmp_path))
    refused(zygote.run("bake", tiny_llama, "--isq", "qtip4", "-o", output, cwd=tmp_path), STORAGE, named)
    assert (tree(tmp_path), sorted(os.listdir(tmp_path))) == before
    assert os.listdir(tmp_path / "folder") == []


def test_a_fresh_process_says_the_same_as_a_forked_one(zygote: Zygote, tmp_path: Path) -> None:
    argv = ("bake", tmp_path / "missing", "--isq", "qtip4")
    fresh = arctool(*argv, cwd=tmp_path)
    assert fresh == zygote.run(*argv, cwd=tmp_path)
    refused(fresh, SOURCE, "missing")
