"""Hostile files and directories: links, pipes, devices, disguises, names that steer a terminal; and the corpus of the fuzzer.

Whatever may hang runs in a child process with a time limit, so that a fault here is a failure and not a stopped test run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import uqff_samples as samples
from locations import FIXTURES, ROOT, load_script
from mutants import framed

from arctool.errors import ArctoolError, FormatError
from arctool.uqff.container import open_artifact
from arctool.uqff.header import MAX_VALUES, parse_json
from arctool.uqff.inspect import inspect

HOSTILE = FIXTURES / "hostile"
FILES = ("qtip2b-0.uqff", "residual.safetensors", "config.json", "uqff_report.json", "tokenizer.json")


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    samples.write(tmp_path / "a", ("model.layers.0.q", "lm_head"))
    return tmp_path / "a"


# ---- what lies in the directory ------------------------------------------------------------------------------------------------


def outside(path: Path) -> Path:
    """The file moved out of the directory, whole."""
    target = path.parent.parent / f"moved-{path.name}"
    path.rename(target)
    return target


LINKS: dict[str, Callable[[Path], object]] = {
    "out of the directory": lambda path: path.symlink_to(outside(path)),
    "out, by a relative way": lambda path: path.symlink_to(f"../{outside(path).name}"),
    "within the directory": lambda path: path.symlink_to(path.rename(path.parent / ".blob").name),
    "to a link": lambda path: ((path.parent / ".l").symlink_to(outside(path)), path.symlink_to(".l")),
    "to itself": lambda path: (path.unlink(), path.symlink_to(path.name)),
    "to nowhere": lambda path: (path.unlink(), path.symlink_to("nowhere")),
    "to the directory": lambda path: (path.unlink(), path.symlink_to(".")),
    "to a device": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "to standard input": lambda path: (path.unlink(), path.symlink_to("/dev/stdin")),
    "to a secret": lambda path: (path.unlink(), path.symlink_to("/etc/passwd")),
    "to a proc file": lambda path: (path.unlink(), path.symlink_to("/proc/self/mem")),
}

NO_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a directory": (lambda path: (path.unlink(), path.mkdir()), "not a regular file but a directory"),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "not a regular file but a pipe"),
    "nothing": (lambda path: path.unlink(), "is missing|no .uqff file"),
    "an empty file": (lambda path: path.write_bytes(b""), "empty|too short|not readable as JSON|SHA-256"),
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", LINKS)
def test_a_link_is_refused_wherever_it_leads(artifact: Path, file: str, kind: str) -> None:
    LINKS[kind](artifact / file)
    with pytest.raises(FormatError, match=f"{file}: not a regular file but a symbolic link.*copy the file itself here.*--local-dir"):
        open_artifact(artifact)


def test_a_hard_link_and_a_link_to_the_directory_are_fine(artifact: Path, tmp_path: Path) -> None:
    """A hard link is the file; and which directory is meant is the caller's affair."""
    os.link(artifact / "config.json", tmp_path / "config.json")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "again").symlink_to(tmp_path / "link")
    for path in (tmp_path / "link", tmp_path / "link" / "qtip2b-0.uqff", tmp_path / "linked" / "again"):
        with open_artifact(path) as found:
            assert found.keys() == ("model.layers.0.q", "lm_head")
    (tmp_path / "model.uqff").symlink_to(artifact / "qtip2b-0.uqff")
    with pytest.raises(FormatError, match=r"model\.uqff: not a regular file but a symbolic link"):
        open_artifact(tmp_path / "model.uqff")


SCRIPT = """
import sys
from pathlib import Path
from arctool.errors import ArctoolError
from arctool.uqff.inspect import inspect
from arctool.uqff.verify import verify
for call in (lambda: inspect(Path(sys.argv[1])), lambda: verify(Path(sys.argv[1]))):
    try:
        found = call()
    except ArctoolError as error:
        print(error)
    else:
        print("\\n".join(getattr(found, "container").failures) if hasattr(found, "container") else "read")
"""


@pytest.mark.parametrize("kind", [*NO_FILES, "to a device", "to standard input"])
def test_what_is_no_file_is_refused_without_hanging(artifact: Path, tmp_path: Path, kind: str) -> None:
    change, words = NO_FILES[kind] if kind in NO_FILES else (LINKS[kind], "symbolic link")
    for file in FILES:
        samples.write(tmp_path / file, ("lm_head",))
        change(tmp_path / file / file)
    script = f"import sys\nfor sys.argv[1] in sys.argv[1:]:\n{SCRIPT.replace(chr(10), chr(10) + ' ')}"
    paths = [str(tmp_path / file) for file in FILES]
    done = subprocess.run(
        [sys.executable, "-c", script, *paths], capture_output=True, text=True, timeout=60, stdin=subprocess.PIPE, check=True
    )
    assert done.stderr == ""
    for file in FILES:
        said = [line for line in done.stdout.splitlines() if str(tmp_path / file) in line or f"file {file}:" in line]
        expected = "it was removed" if kind == "nothing" and file == "uqff_report.json" else words
        assert any(re.search(expected, line) for line in said), done.stdout


STRANGERS: dict[str, Callable[[Path], object]] = {
    "a link to a device": lambda d: (d / "x.json").symlink_to("/dev/zero"),
    "a pipe": lambda d: os.mkfifo(d / "x.json"),
    "a link as a second shard": lambda d: (d / "qtip2b-1.uqff").symlink_to("qtip2b-0.uqff"),
    "a name that steers the terminal": lambda d: (d / "x\x1b[2J.json").write_text("{}"),
    "a name of two lines": lambda d: (d / "x\nexit 0.json").write_text("{}"),
    "a name that is no UTF-8": lambda d: Path(os.fsdecode(os.fsencode(d) + b"/x\xff.json")).write_text("{}"),
    "a directory of that name": lambda d: (d / "x.json").mkdir(),
}


@pytest.mark.parametrize("report", [True, False])
@pytest.mark.parametrize("kind", STRANGERS)
def test_what_lies_beside_the_artifact_does_no_harm(artifact: Path, kind: str, report: bool) -> None:
    if not report:
        (artifact / "uqff_report.json").unlink()
    STRANGERS[kind](artifact)
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(artifact)], capture_output=True, timeout=60, check=True)
    assert done.stderr == b""
    words = b"read" if kind == "a directory of that name" and report else b"qtip2b-1" if "second" in kind else b"x"
    assert words in done.stdout


NAMES = {
    **{"parent": "../a/qtip2b-0.uqff", "absolute": "{}/qtip2b-0.uqff", "backslash": "..\\qtip2b-0.uqff", "here": "./qtip2b-0.uqff"},
    **{
        "through a directory": "x/../qtip2b-0.uqff",
        "NUL": "qtip2b-0.uqff\0",
        "NUL inside": "qtip2b-0.uqff\0.uqff",
        "empty": "",
        "dot": ".",
    },
    **{"dots": "..", "hidden": ".x.uqff", "newline": "a\nb.uqff", "escape": "\x1b[2Ja.uqff", "right to left": "\u202effqu.uqff"},
    **{"of 300 bytes": "é" * 150 + ".uqff", "of 5000": "a" * 5000 + ".uqff", "other case": "QTIP2B-0.UQFF", "a device": "/dev/zero"},
    **{
        "drive": "C:\\a.uqff",
        "a URL": "https://example.org/a.uqff",
        "home": "~/a.uqff",
        "the config": "config.json",
        "a blank": "qtip2b-0.uqff ",
    },
}


@pytest.mark.parametrize("field", ["shard", "file", "second shard"])
@pytest.mark.parametrize("kind", NAMES)
def test_a_report_cannot_name_a_file_elsewhere(artifact: Path, kind: str, field: str) -> None:
    name = NAMES[kind].format(artifact)
    path = artifact / "uqff_report.json"
    report = json.loads(path.read_text())
    if field == "shard":
        report["outputs"][0]["shards"] = [name]
    elif field == "second shard":
        report["outputs"][0]["shards"].append(name)
    else:
        report["arctool"]["sha256"]["files"][name] = "0" * 64
    path.write_text(json.dumps(report))
    if field == "file" and kind == "the config":
        return  # where it belongs: a lie about its hash, which `test_uqff_verify` tells
    with pytest.raises(FormatError, match=r"not a plain file name|is missing|is not in uqff_report\.json|is not a \.uqff file") as refused:
        open_artifact(artifact)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 1500 + 2 * len(str(artifact))


# ---- what is in the files ------------------------------------------------------------------------------------------------------


def test_a_sparse_file_with_an_absurd_length_costs_nothing(artifact: Path) -> None:
    (artifact / "uqff_report.json").unlink()
    with (artifact / "qtip2b-0.uqff").open("wb") as file:
        file.write((99_000_000).to_bytes(8, "little"))
        file.truncate(1 << 40)
    with pytest.raises(FormatError, match=r"qtip2b-0\.uqff: header: not readable as JSON"):
        open_artifact(artifact)
    with (artifact / "qtip2b-0.uqff").open("r+b") as file:
        file.write((1 << 39).to_bytes(8, "little"))
    with pytest.raises(FormatError, match=r"claims 549755813888 bytes of 1099511627776 \(limit 100000000\)"):
        open_artifact(artifact)


@pytest.mark.parametrize("name", ["config.json", "uqff_report.json", "tokenizer.json"])
def test_a_sparse_text_is_not_read(artifact: Path, name: str) -> None:
    with (artifact / name).open("ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(FormatError, match=f"{name}: 1099511627776 bytes; a text of an artifact has at most"):
        open_artifact(artifact).assets["tokenizer.json"]


BOMBS = {
    "lists": b"[" + b"[]," * 3_000_000 + b"[]]",
    "numbers": b"[" + b"1," * 5_000_000 + b"1]",
    "objects": b"[" + b'{"a":1},' * 2_200_000 + b"{}]",
    "keys": b"{" + b",".join(b'"%d":0' % i for i in range(4_200_000)) + b"}",
}


@pytest.mark.parametrize("kind", BOMBS)
def test_json_of_millions_of_values_is_refused_before_they_are_made(kind: str) -> None:
    with pytest.raises(FormatError, match=f"^f: more than {MAX_VALUES} values"):
        parse_json(b'{"a":' + BOMBS[kind] + b"}", "f")


LEVELS = {
    "the top": b'{"x":1,%s,"x":1}',
    "within a tensor": b'{"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"dtype":"U8"},%s}',
    "in the metadata": b'{"__metadata__":{"x":"1","x":"1"},%s}',
    "the metadata": b'{"__metadata__":{},"__metadata__":{},%s}',
    "deep": b'{"x":[{"y":[[{"z":1,"z":1}]]}],%s}',
    "spelt otherwise": b'{"x":1,%s,"\\u0078":1}',
}


@pytest.mark.parametrize("file", FILES[:4])
@pytest.mark.parametrize("level", LEVELS)
def test_a_key_that_comes_twice_is_refused_at_every_level(artifact: Path, file: str, level: str) -> None:
    raw = (artifact / file).read_bytes()
    tensors = file.endswith((".uqff", ".safetensors"))
    start = 8 + int.from_bytes(raw[:8], "little") if tensors else len(raw)
    inner = (raw[8:start] if tensors else raw).strip()[1:-1]
    if tensors:
        inner = inner[inner.index(b"},") + 2 :]  # without its own metadata
    text = LEVELS[level] % inner
    (artifact / file).write_bytes(framed(text) + raw[start:] if tensors else text)
    with pytest.raises(FormatError, match=rf"{file}: .*key '(x|z|dtype|__metadata__)' occurs twice"):
        open_artifact(artifact)


def test_what_an_error_quotes_cannot_steer_the_terminal(artifact: Path) -> None:
    """A report's field with an escape sequence goes into the message; the command line prints it spelt out, on one line."""
    path = artifact / "uqff_report.json"
    report = json.loads(path.read_text())
    path.write_text(json.dumps(report | {"schema": "\x1b]0;owned\a\x1b[2J\r\n\u202e"}))
    for argv in (["inspect"], ["verify"], ["run", "-p", "x"]):
        done = subprocess.run(
            [sys.executable, "-c", "from arctool.cli import main; main()", argv[0], str(artifact), *argv[1:]],
            capture_output=True,
            timeout=120,
            check=False,
        )
        assert done.returncode != 0
        said = (done.stdout + done.stderr).decode()
        assert "schema: expected int" in said
        assert all(character.isprintable() or character == "\n" for character in said), said


# ---- the corpus ----------------------------------------------------------------------------------------------------------------


def fuzzer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_artifact", ROOT / "fuzz" / "fuzz_artifact.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_corpus_is_what_its_script_makes(tmp_path: Path) -> None:
    made = load_script("make_hostile").make_all(tmp_path)
    committed = {str(path.relative_to(HOSTILE)) for path in HOSTILE.rglob("*") if path.is_file()}
    assert set(made) == committed
    for name, path in made.items():
        assert path.read_bytes() == (HOSTILE / name).read_bytes(), name
    assert sum(path.stat().st_size for path in made.values()) < 200_000


def test_every_file_of_the_corpus_is_refused_in_its_words_or_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fuzzer's own check, without the fuzzer; it must not be needed."""
    monkeypatch.setitem(sys.modules, "atheris", None)
    module, known = fuzzer(), load_script("make_hostile").files()
    found = {name: module.one(raw) for name, raw in module.seeds().items()}
    assert set(found) == set(known)
    assert {name.split("/")[0] for name in found} == set(module.TARGETS) - {"layer"}
    for name, (_, words) in known.items():
        assert bool(words) == bool(found[name]), f"{name}: {found[name]}"
        assert re.search(words, found[name]), f"{name}: {found[name]}"
    assert sum(not words for words in found.values()) >= 12


def test_the_fuzzer_reaches_the_families_and_sees_a_reader_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    module = fuzzer()
    number = bytes((list(module.TARGETS).index("layer"),))
    names, dtypes = module.SUFFIXES, list(module.DTYPES)

    def entry(name: str, dtype: str, shape: list[int], raw: bytes) -> bytes:
        return bytes((names.index(name), dtypes.index(dtype), len(shape), *shape)) + raw

    parts = (
        entry("weight", "U8", [2, 4], b"\1\0\0\0\2\0\0\0"),
        entry("weight.format", "U8", [], b"\x40"),
        entry("weight.shape", "U32", [2], b"\2\0\0\0\4\0\0\0"),
        entry("weight.scales", "F32", [2], b"\0\0\x80\x3f" * 2),
        entry("weight.sections", "U8", [1], b"\2"),
    )
    assert module.one(number + b"".join(parts)) == ""
    assert "scales" in module.one(number + b"".join(parts[:3]))
    monkeypatch.setattr("arctool.uqff.sections.encode_sections", lambda sections, where: b"")
    with pytest.raises(AssertionError):
        module.one(module.seeds()["sections/sum2"])
    monkeypatch.setattr("arctool.uqff.sections.decode_sections", lambda blob, where: blob[99])
    with pytest.raises(IndexError):
        module.one(module.seeds()["sections/sum2"])


@pytest.mark.parametrize("name", ["pickle2", "pickle3", "pickle4", "pickle5", "zip", "gzip", "elf", "gguf", "html", "lfs-pointer"])
def test_a_disguise_is_called_by_its_name_in_every_place_of_a_shard(artifact: Path, name: str) -> None:
    raw, words = load_script("make_hostile").files()[f"artifact/{name}"]
    for file in ("qtip2b-0.uqff", "residual.safetensors"):
        whole = (artifact / file).read_bytes()
        (artifact / file).write_bytes(raw)
        for call in (open_artifact, inspect):
            with pytest.raises(ArctoolError, match=rf"{file}: the header claims \d+ bytes of \d+ .*; the file is {words}"):
                call(artifact)
        (artifact / file).write_bytes(whole)
