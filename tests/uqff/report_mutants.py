"""Mutants of an artifact's JSON files and of its directory: every field of the report in type, value, name and presence; files moved."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from mutants import Base, Mutant, Parts, single

REPORT = "uqff_report.json"

Path = tuple[str | int, ...]

WRONG: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        2,
        2**31,
        2**63,
        2**64,
        -(2**64),
        10**300,
        0.5,
        -0.5,
        1e308,
        "",
        "x",
        "0",
        "\x1b[2J",
        "a\0b",
        "\U0001f600",
    ),
    *("../x", "x" * 5000, [], [None], [[]], ["x"], {}, {"x": 1}, {"": None}),
)
"""Tried at every node of a report."""


def nodes(value: Any, at: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value within `value`, with the way to it."""
    yield at, value
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from nodes(item, (*at, key))


def put(value: Any, at: Path, new: Any) -> Any:
    """A copy of `value` with `new` at the end of the way."""
    if not at:
        return new
    found = copy.copy(value)
    found[at[0]] = put(value[at[0]], at[1:], new)
    return found


def dotted(at: Path) -> str:
    return ".".join(map(str, at)) or "the whole"


def field_of(at: Path) -> str:
    """The last name on the way: what a refusal must say."""
    return next((part for part in reversed(at) if isinstance(part, str)), REPORT)


def report_fields(base: Base) -> Iterator[tuple[Path, Mutant | None]]:
    """(way to the field, mutant)."""
    report = json.loads(base.files[REPORT])

    def mutant(what: str, at: Path, changed: Any) -> tuple[Path, Mutant | None]:
        raw = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
        if not isinstance(changed, bytes) and raw == json.dumps(report).encode():
            return at, None
        return at, single(base, f"{dotted(at)}: {what}", REPORT, raw, field_of(at), *(part for part in at if isinstance(part, str)))

    for at, value in nodes(report):
        for wrong in WRONG:
            if wrong != value or type(wrong) is not type(value):
                yield mutant(f"= {str(wrong)[:30]!r}", at, put(report, at, wrong))
        for what, other in variants(value):
            yield mutant(what, at, put(report, at, other))
        if isinstance(value, dict):
            yield mutant("an unknown field more", (*at, "unknown"), put(report, at, {**value, "unknown": {"a": [1]}}))
            for key in value:
                left = {name: item for name, item in value.items() if name != key}
                yield mutant("removed", (*at, key), put(report, at, left))
                yield mutant(
                    "renamed", (*at, key), put(report, at, {f"{name}x" if name == key else name: item for name, item in value.items()})
                )
                yield mutant("twice", (*at, key), doubled(report, at, key))
        if isinstance(value, list) and value:
            yield mutant("the first again", at, put(report, at, [value[0], *value]))
            yield mutant("without the first", at, put(report, at, value[1:]))
            yield mutant("reversed", at, put(report, at, value[::-1]))


def variants(value: Any) -> Iterator[tuple[str, Any]]:
    """Neighbours of one value."""
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, int):
        yield from ((f"+ {step}", value + step) for step in (-1, 1, 8))
        yield "as a float", float(value)
        yield "as text", str(value)
    elif isinstance(value, float):
        yield from ((f"· {factor}", value * factor) for factor in (-1, 1 + 2**-50, 2))
    elif isinstance(value, str):
        yield "in capitals", value.upper() if value.upper() != value else value + "A"
        yield "its last character changed", value[:-1] + ("0" if not value.endswith("0") else "1")
        yield "cut", value[:-1]
        yield "and a blank", value + " "
        if len(value) == 64:
            yield "no hex digit", "g" + value[1:]
            yield "not ASCII digits", "\uff10" * 64
        if value.endswith(".uqff"):
            for name in (
                f"../{value}",
                f"./{value}",
                f"/{value}",
                f"..\\{value}",
                f"{value}\0",
                f"x/../{value}",
                ".",
                "..",
                "residual.safetensors",
            ):
                yield f"as {name!r}", name


def doubled(report: Any, at: Path, key: str) -> bytes:
    """The report with one key twice in its object, equal values."""
    marker = "\u0001twice"
    target: Any = report
    for part in at:
        target = target[part]
    text = json.dumps(put(report, at, {**target, marker: target[key]}))
    return text.replace(json.dumps(marker), json.dumps(key)).encode()


def report_texts(base: Base, file: str) -> Iterator[Mutant | None]:
    """A JSON file as text."""
    raw = base.files[file]
    inner = raw.strip()[1:-1]
    spelt = {
        "blanks": b" \n\t" + raw + b"\r\n",
        "a BOM": b"\xef\xbb\xbf" + raw,
        "UTF-16": raw.decode().encode("utf-16"),
        "NUL after": raw + b"\0",
        "a comma at the end": b"{" + inner + b",}",
        "junk after": raw + b"x",
        "NaN": b'{"x":NaN,' + inner + b"}",
        "Infinity": b'{"x":-Infinity,' + inner + b"}",
        "a number past every float": b'{"x":1e999,' + inner + b"}",
        "digits past every limit": b'{"x":' + b"1" * 100_000 + b"," + inner + b"}",
        "half a surrogate pair": b'{"x":"\\ud800",' + inner + b"}",
        "half a surrogate pair as a name": b'{"\\udc00":1,' + inner + b"}",
        "nested": b'{"x":' + b"[" * 100_000,
        "nested 65 deep": b'{"x":' + b"[" * 65 + b"]" * 65 + b"," + inner + b"}",
        "a list": b"[" + raw + b"]",
        "null": b"null",
        "empty": b"",
        "every key twice": b"{" + inner + b"," + inner + b"}",
        "Latin-1": b'{"\xe4":1,' + inner + b"}",
    }
    for name, text in spelt.items():
        yield single(base, name, file, text)


def moves(base: Base) -> Iterator[Mutant | None]:
    """Files renamed, exchanged, added and put in another's place."""
    shards = base.shards
    for file, raw in base.files.items():
        for other in (
            file + ".bak",
            file.upper(),
            "x" + file,
            file.replace("-0.", "-00."),
            file.replace("-0.", "-1."),
            file.replace("-1.", "-2."),
        ):
            if other not in base.files:
                yield Mutant(
                    f"{base.name}: {file} renamed {other}", {file: None, other: raw}, (file, other, f"shard {file[-6:-5]}", "no .uqff")
                )
                yield Mutant(f"{base.name}: {file} again as {other}", {other: raw}, (file, other, "holds 2 outputs"))
        for other, content in base.files.items():
            if other != file:
                yield Mutant(f"{base.name}: {other} in the place of {file}", {file: content}, (file, other))
                if other > file:
                    yield Mutant(f"{base.name}: {file} ⇄ {other}", {file: content, other: raw}, (file, other))
    for name in ("model.safetensors", "pytorch_model.bin", "a.gguf", "notes.json", "qtip2b-9.uqff", ".hidden.uqff"):
        for content in (b"", base.files[shards[0]], b"{}"):
            yield Mutant(f"{base.name}: {name} added, {len(content)} bytes", {name: content}, (name, "holds 2 outputs", *shards, "shard"))
    for other in ("config.json", REPORT):
        if other in base.files:
            emptied = json.dumps({}).encode()
            yield Mutant(f"{base.name}: {other} emptied", {other: emptied}, (other,))


def stripped(base: Base) -> Iterator[Mutant]:
    """The hashes taken out of the report, in every way, and one payload bit flipped: what a forger would do first."""
    report = json.loads(base.files[REPORT])
    file = base.shards[0]
    parts = Parts.of(base.files[file])
    name = next(name for name, _ in parts.entries if name.endswith(".weight"))
    payload, info = parts.payload(name), dict(parts.entries)[name]
    flipped = parts.with_payloads({name: (info["dtype"], info["shape"], bytes((payload[0] ^ 1,)) + payload[1:])})
    own = report["arctool"]
    forged: dict[str, Any] = {
        "no arctool part": {key: value for key, value in report.items() if key != "arctool"},
        "arctool: null": {**report, "arctool": None},
        "another tool and no arctool part": {
            **{key: value for key, value in report.items() if key != "arctool"},
            "generated_by": {"tool": "mistralrs quantize"},
        },
        "no sha256": {**report, "arctool": {key: value for key, value in own.items() if key != "sha256"}},
        "sha256: null": {**report, "arctool": {**own, "sha256": None}},
        "sha256: {}": {**report, "arctool": {**own, "sha256": {}}},
        **{f"sha256.{part}: {{}}": {**report, "arctool": {**own, "sha256": {**own["sha256"], part: {}}}} for part in own["sha256"]},
    }
    for what, changed in forged.items():
        yield Mutant(f"{base.name}: {what}, {name} flipped", {REPORT: json.dumps(changed).encode(), file: flipped}, (REPORT, name, file))
