"""Mutants of a small artifact: one change each, made from the files alone and without the code under test.

Nothing here knows families or layer names: entries are found in the files, and what is tried on one depends on its suffix, dtype and
shape. So a family that is added to `uqff_samples.layers` is swept without a word here. `mutation_bench` says what must become of them.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

WIDTHS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
SUBBYTE = ("F4", "F6_E2M3", "F6_E3M2", "u8", "U4", "F128", "", "float32")

Pair = tuple[str, Any]


@dataclass(frozen=True)
class Mutant:
    """`files`: new content by file name, None for a file that is gone. A refusal must hold one of `places`."""

    name: str
    files: Mapping[str, bytes | None]
    places: tuple[str, ...]


@dataclass(frozen=True)
class Base:
    """An artifact as bytes by file name. `common`: whether what every artifact has alike is to be changed too."""

    name: str
    files: Mapping[str, bytes]
    common: bool = True

    @property
    def tensor_files(self) -> tuple[str, ...]:
        return tuple(sorted(name for name in self.files if name.endswith((".uqff", ".safetensors"))))

    @property
    def shards(self) -> tuple[str, ...]:
        return tuple(sorted(name for name in self.files if name.endswith(".uqff")))


@dataclass(frozen=True)
class Parts:
    """A safetensors file taken apart: the header's pairs in their order (names may repeat, values may be anything), and the data."""

    pairs: tuple[Pair, ...]
    data: bytes

    @classmethod
    def of(cls, raw: bytes) -> Parts:
        length = int.from_bytes(raw[:8], "little")
        pairs: list[Pair] = []
        json.loads(raw[8 : 8 + length], object_pairs_hook=lambda found: pairs.__setitem__(slice(None), found) or dict(found))
        return cls(tuple(pairs), raw[8 + length :])

    @property
    def entries(self) -> tuple[Pair, ...]:
        return tuple(pair for pair in self.pairs if pair[0] != "__metadata__")

    def payload(self, name: str) -> bytes:
        begin, end = dict(self.pairs)[name]["data_offsets"]
        return self.data[begin:end]

    def build(self) -> bytes:
        """The file; a pair's value that is bytes is JSON already."""
        body = ",".join(f"{json.dumps(k)}:{v.decode() if isinstance(v, bytes) else json.dumps(v)}" for k, v in self.pairs)
        return framed(b"{" + body.encode() + b"}") + self.data

    def with_info(self, name: str, info: Any) -> bytes:
        """The file with another header value for `name` and the same data."""
        return Parts(tuple((key, info if key == name else value) for key, value in self.pairs), self.data).build()

    def with_payloads(
        self, changed: Mapping[str, tuple[str, list[int], bytes] | None], order: Callable[[list[Pair]], object] | None = None
    ) -> bytes:
        """The file laid out anew, in which entries are replaced, added, or (None) left out; all offsets agree."""
        whole: dict[str, tuple[str, Any, bytes] | None] = {
            name: (info["dtype"], info["shape"], self.payload(name)) for name, info in self.entries
        }
        whole |= changed
        items = [(name, item) for name, item in whole.items() if item is not None]
        if order is not None:
            order(items)
        pairs: list[Pair] = [pair for pair in self.pairs if pair[0] == "__metadata__"]
        data = b""
        for name, (dtype, shape, payload) in items:
            pairs.append((name, {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(payload)]}))
            data += payload
        return Parts(tuple(pairs), data).build()


def framed(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def layer_of(entry: str) -> str:
    """The layer that an entry belongs to, or the entry itself."""
    for part in (".weight", ".bias"):
        if part in entry:
            return entry[: entry.index(part)]
    return entry


def foreign(base: Base) -> Base:
    """The artifact as another program would leave it: no report, no hash, another producer."""
    files = {name: raw for name, raw in base.files.items() if name != "uqff_report.json"}
    for name in base.tensor_files:
        parts = Parts.of(files[name])
        pairs = tuple((k, {"uqff.producer": "another"} if k == "__metadata__" else v) for k, v in parts.pairs)
        files[name] = Parts(pairs, parts.data).build()
    return replace(base, files=files)


def own(base: Base, file: str, parts: Parts) -> tuple[Pair, ...]:
    """The entries of a file that are worth a mutant here: versions and the residual are the same in every artifact of one layer."""
    return (
        parts.entries if base.common else tuple(pair for pair in parts.entries if file in base.shards and not pair[0].startswith("uqff."))
    )


def single(base: Base, name: str, file: str, raw: bytes | None, *places: str) -> Mutant | None:
    """A mutant of one file, None where nothing would change."""
    return None if raw == base.files.get(file) else Mutant(f"{base.name}: {file}: {name}", {file: raw}, (file, *places))


# ---- bytes of files ------------------------------------------------------------------------------------------------------------


def lengths(base: Base) -> Iterator[Mutant | None]:
    """Every file cut at each boundary of its structure and inside, made longer, or empty; the u64 header length set to lies."""
    for file, raw in base.files.items():
        cuts = {0, 1, len(raw) // 2, len(raw) - 1}
        if file in base.tensor_files:
            start = 8 + int.from_bytes(raw[:8], "little")
            cuts |= {4, 7, 8, 9, 8 + start // 2, start - 1, start, start + 1}
            for _, info in Parts.of(raw).entries:
                begin, end = info["data_offsets"]
                cuts |= {start + begin, start + (begin + end) // 2, start + end - 1}
            size = len(raw)
            claims = (0, 1, 2, start - 16, start - 9, start - 7, start, size - 9, size - 8, size - 7, size, size + 1)
            for claim in (*claims, 100_000_000, 100_000_001, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1):
                yield single(base, f"header length {claim}", file, claim.to_bytes(8, "little") + raw[8:])
        for cut in sorted(cuts):
            if 0 <= cut < len(raw):
                yield single(base, f"cut at {cut} of {len(raw)}", file, raw[:cut])
        for more in (1, 8, 4096):
            yield single(base, f"{more} zeros more", file, raw + bytes(more))
            yield single(base, f"{more} bytes 0xff more", file, raw + b"\xff" * more)
        yield single(base, "twice", file, raw + raw)
        yield single(base, "a zero before", file, b"\0" + raw)
        inside = [layer_of(name) for name, _ in Parts.of(raw).entries] if file in base.tensor_files else []
        yield single(base, "gone", file, None, "no .uqff file in it", f"shard {file[-6:-5]} beside", *inside)


def flips(base: Base, step: int) -> Iterator[Mutant | None]:
    """One bit of every `step`-th byte of every file but tables' bytes, which `values` flips."""
    for file, raw in base.files.items():
        owners = owners_of(raw) if file in base.tensor_files else {}
        for at in range(0, len(raw), step):
            owner = owners.get(at, "")
            if owner.startswith("arctool.table."):
                continue
            changed = raw[:at] + bytes((raw[at] ^ 1 << at % 8,)) + raw[at + 1 :]
            line = changed[changed.rfind(b"\n", 0, at) + 1 :].partition(b"\n")[0].decode(errors="replace")  # of a JSON file
            places = (owner, layer_of(owner)) if owner else tuple(re.findall(r"[^\s\"]{4,}", line)) if file.endswith(".json") else ()
            yield single(base, f"bit {at % 8} of byte {at}", file, changed, *places)


def owners_of(raw: bytes) -> dict[int, str]:
    """Byte of a tensor file → the entry that it belongs to."""
    start = 8 + int.from_bytes(raw[:8], "little")
    spans = [(name, *info["data_offsets"]) for name, info in Parts.of(raw).entries]
    return {start + at: name for name, begin, end in spans for at in range(begin, end)}


# ---- headers -------------------------------------------------------------------------------------------------------------------


def headers(base: Base) -> Iterator[Mutant | None]:
    """The header's JSON as a whole: spelling, metadata, order, encodings."""
    for file in base.tensor_files:
        raw = base.files[file]
        length = int.from_bytes(raw[:8], "little")
        text, data = raw[8 : 8 + length], raw[8 + length :]
        parts = Parts.of(raw)
        inner = text.rstrip()[1:-1]
        spelt = {
            "one blank more": text + b" ",
            "tabs and newlines": b"\n\t" + text + b"\r\n",
            "blanks inside": text.replace(b":", b" : "),
            "NUL padding": text + b"\0" * 8,
            "a BOM": b"\xef\xbb\xbf" + text,
            "UTF-16": text.decode().encode("utf-16"),
            "UTF-16-LE": text.decode().encode("utf-16-le"),
            "UTF-32": text.decode().encode("utf-32"),
            "Latin-1": b'{"\xe4":1,' + inner + b"}",
            "overlong UTF-8": b'{"\xc0\xae":1,' + inner + b"}",
            "a comma at the end": b"{" + inner + b",}",
            "a comment": b"{" + inner + b"/* */}",
            "a second object": text.rstrip() + b"{}",
            "a list around": b"[" + text + b"]",
            "a string": json.dumps(text.decode()).encode(),
            "null": b"null",
            "a number": b"1",
            "an empty object": b"{}",
            "blanks only": b" " * 16,
            "NaN": b'{"x":NaN,' + inner + b"}",
            "-Infinity": b'{"x":-Infinity,' + inner + b"}",
            "nested 100,000 deep": b'{"x":' + b"[" * 100_000,
            "nested 65 deep": b'{"x":' + b"[" * 65 + b"]" * 65 + b"," + inner + b"}",
            "10,000 digits": b'{"x":' + b"9" * 10_000 + b"," + inner + b"}",
            "an empty name": b'{"":{},' + inner + b"}",
            "every key twice": b"{" + inner + b"," + inner + b"}",
            "the first key again, escaped": b"{" + inner + b',"\\u005f\\u005fmetadata__":{}}',
            "metadata after": Parts(parts.entries + tuple(p for p in parts.pairs if p[0] == "__metadata__"), b"").build()[8:],
            "pairs reversed": Parts(parts.pairs[::-1], b"").build()[8:],
            "pairs sorted": Parts(tuple(sorted(parts.pairs, key=lambda p: p[0])), b"").build()[8:],
        }
        for name, changed in spelt.items():
            yield single(base, f"header: {name}", file, framed(changed) + data)
        for value in (
            {},
            {"a": "b"},
            {"uqff.version": "9.9.9"},
            {"format": "pt"},
            None,
            [],
            "x",
            1,
            {"a": 1},
            {"a": None},
            {"a": {}},
            {"a": ["b"]},
        ):
            pairs = (("__metadata__", value), *parts.entries)
            yield single(base, f"metadata {json.dumps(value)}", file, Parts(pairs, data).build())
        yield single(base, "no metadata", file, Parts(parts.entries, data).build())
        for name, order in (
            ("reversed", lambda items: items.reverse()),
            ("by name", lambda items: items.sort()),
            ("by size", lambda items: items.sort(key=lambda item: len(item[1][2]))),
        ):
            yield single(base, f"data {name}, offsets with them", file, parts.with_payloads({}, order))


def infos(info: Mapping[str, Any], size: int) -> Iterator[tuple[str, Any]]:
    """(name, another header value) for one tensor whose data stay; `size`: bytes of all data."""
    dtype, shape, (begin, end) = info["dtype"], list(info["shape"]), info["data_offsets"]
    for other in (*WIDTHS, *SUBBYTE):
        yield f"dtype {other}", info | {"dtype": other}
        width = WIDTHS.get(other, 0)
        if width and width != WIDTHS[dtype] and (end - begin) % width == 0:
            count = (end - begin) // width
            yield f"dtype {other} with a shape to match", info | {"dtype": other, "shape": [count]}
            if shape and count % shape[0] == 0:
                yield f"dtype {other}, rows kept", info | {"dtype": other, "shape": [shape[0], count // shape[0]]}
    for wrong in (None, 1, [], ["U8"], {}, True, "U8\0", "\u0423\u0038"):
        yield f"dtype {wrong!r}", info | {"dtype": wrong}
    count = prod(shape)
    shapes: list[Any] = [
        shape[::-1],
        [1, *shape],
        [*shape, 1],
        [1, 1, *shape],
        [count],
        [],
        [0],
        [0, *shape],
        [*shape, 0],
        [count, 1],
        [1] * 8 + shape,
    ]
    shapes += [[1, count], [count * 2, 1], [-count], [-1], [1 << 62], [1 << 63], [1 << 64], [1 << 32, 1 << 32], [1 << 62, 4, 4], [10**400]]
    shapes += [
        [-1, -count],
        [count / 1],
        [True] * max(1, len(shape)),
        [str(count)],
        [None],
        [[count]],
        {},
        None,
        count,
        "",
        str(shape),
        [float(1 << 62)],
    ]
    for index in range(len(shape)):
        for change in (
            shape[index] + 1,
            shape[index] - 1,
            shape[index] * 2,
            -shape[index],
            1 << 62,
            1 << 63,
            float(shape[index]),
            str(shape[index]),
        ):
            shapes.append([*shape[:index], change, *shape[index + 1 :]])
    for other in shapes:
        if other != shape or type(other) is not list or [type(x) for x in other] != [int] * len(shape):
            yield f"shape {str(other)[:40]}", info | {"shape": other}
    pairs: list[Any] = [[begin + 1, end], [begin, end + 1], [begin + 1, end + 1], [begin - 1, end], [begin, end - 1], [begin - 1, end - 1]]
    pairs += [
        [end, begin],
        [0, end - begin],
        [size - (end - begin), size],
        [0, size],
        [0, 0],
        [size, size],
        [begin, begin],
        [begin, 1 << 62],
    ]
    pairs += [
        [begin, 1 << 63],
        [(1 << 64) + begin, (1 << 64) + end],
        [-8, end - begin - 8],
        [begin + size, end + size],
        [float(begin), float(end)],
    ]
    pairs += [
        [str(begin), str(end)],
        [begin],
        [begin, end, end],
        [],
        None,
        {},
        end,
        [True, True],
        [None, None],
        [[begin, end]],
        [begin, 10**400],
    ]
    for other in pairs:
        if other != [begin, end] or [type(x) for x in other] != [int, int]:
            yield f"offsets {str(other)[:40]}", info | {"data_offsets": other}
    for field in info:
        yield f"without {field}", {key: value for key, value in info.items() if key != field}
        yield f"{field} in capitals", {key.upper() if key == field else key: value for key, value in info.items()}
        body = ",".join(f"{json.dumps(key)}:{json.dumps(value)}" for key, value in info.items())
        yield f"{field} twice", f"{{{body},{json.dumps(field)}:{json.dumps(info[field])}}}".encode()
    for wrong in (None, [], "", 0, {}, [info], {"x": info}, info | {"crc32": 1}):
        yield f"header value {str(wrong)[:30]}", wrong


def header_values(base: Base) -> Iterator[Mutant | None]:
    """Each tensor's dtype, shape and offsets replaced, the data left alone."""
    for file in base.tensor_files:
        parts = Parts.of(base.files[file])
        for name, info in own(base, file, parts):
            for what, other in infos(info, len(parts.data)):
                if other != info:
                    yield single(base, f"{name}: {what}", file, parts.with_info(name, other), name, layer_of(name))


# ---- entries -------------------------------------------------------------------------------------------------------------------


def entries(base: Base) -> Iterator[Mutant | None]:
    """Each entry removed, renamed, repeated here and in the other files, and cut or lengthened with its header."""
    for file in base.tensor_files:
        parts = Parts.of(base.files[file])
        names = [name for name, _ in parts.entries]
        layer_names = [name for name in names if ".weight" in name]
        for name, info in own(base, file, parts):
            payload, dtype, shape = parts.payload(name), info["dtype"], info["shape"]
            places = (name, layer_of(name))
            yield single(base, f"{name}: removed", file, parts.with_payloads({name: None}), *places)
            pairs = tuple(pair for pair in parts.pairs if pair[0] != name)
            yield single(base, f"{name}: removed from the header only", file, Parts(pairs, parts.data).build(), *places)
            for other in renamings(name, names[names.index(name) - 1]):
                changed = {name: None, other: (dtype, shape, payload)}
                yield single(base, f"{name}: renamed {other[:60]!r}", file, parts.with_payloads(changed), *places, other[:40])
                if other not in names:
                    added = parts.with_payloads({other: (dtype, shape, payload)})
                    yield single(base, f"{name}: repeated as {other[:60]!r}", file, added, *places, other[:40], ascii(other)[1:30])
            if name.endswith(".bias"):
                for other in {layer_of(entry) for shard in base.shards for entry, _ in Parts.of(base.files[shard]).entries} - {
                    layer_of(name)
                }:
                    added = parts.with_payloads({f"{other}.bias": (dtype, shape, payload)})
                    yield single(base, f"{name}: repeated as {other}.bias", file, added, *places, other)
            twice = Parts((*parts.pairs, (name, info)), parts.data).build()
            yield single(base, f"{name}: twice in the header", file, twice, *places)
            shared = Parts((*parts.pairs, (f"{name}.x", info)), parts.data).build()
            yield single(base, f"{name}: two names for the same bytes", file, shared, *places)
            for target in base.tensor_files:
                if target != file:
                    added = Parts.of(base.files[target]).with_payloads({name: (dtype, shape, payload)})
                    yield single(base, f"{name}: repeated from {file}", target, added, *places)
                    moved = {file: parts.with_payloads({name: None}), target: added}
                    yield Mutant(f"{base.name}: {name}: moved from {file} to {target}", moved, (file, target, *places))
            for what, other_payload in resized(payload, WIDTHS[dtype]):
                count = len(other_payload) // WIDTHS[dtype]
                for other_shape in ([count], [1, count], [*shape[:-1], count // max(1, prod(shape[:-1]))]):
                    if prod(other_shape) == count:
                        changed = {name: (dtype, other_shape, other_payload)}
                        yield single(base, f"{name}: {what} as {other_shape}", file, parts.with_payloads(changed), *places)
        for left, right in pairwise(layer_names):
            a, b = (dict(parts.entries)[name] for name in (left, right))
            swapped = {left: (b["dtype"], b["shape"], parts.payload(right)), right: (a["dtype"], a["shape"], parts.payload(left))}
            yield single(base, f"{left} ⇄ {right}", file, parts.with_payloads(swapped), left, right, layer_of(left), layer_of(right))


def renamings(name: str, neighbour: str) -> tuple[str, ...]:
    """Other names for an entry: near ones, another layer's, and such as no name may be."""
    near = (name + "x", name + ".x", name.upper(), name + " ", "x." + name, name[:-1], name + ".", name.replace(".", "/"), "../" + name)
    odd = (
        "",
        "\0",
        name + "\0",
        name + "\x1b[2J",
        "\u202e" + name,
        "a" * 600,
        "0",
        "__metadata_",
        "uqff.version.build",
        "arctool.table." + "0" * 16,
    )
    other = neighbour + ".shape", layer_of(neighbour) + ".bias", layer_of(name) + ".weight.signs_in", name.replace("weight", "weights")
    return tuple(dict.fromkeys(item for item in (*near, *odd, *other) if item != name))


def resized(payload: bytes, width: int) -> Iterator[tuple[str, bytes]]:
    """The payload with elements missing or added."""
    yield "empty", b""
    if len(payload) > width:
        yield "one element short", payload[:-width]
        yield "half", payload[: len(payload) // width // 2 * width]
        yield "without its first element", payload[width:]
    yield "one zero more", payload + bytes(width)
    yield "twice", payload + payload


# ---- values --------------------------------------------------------------------------------------------------------------------

_INTS = sorted({*range(70), 126, 127, 128, 129, 254, 255, 256, 257, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 2, (1 << 32) - 1})
_FLOATS = {
    **{"NaN": 0x7FC00000, "-NaN": 0xFFC00000, "signalling NaN": 0x7F800001, "inf": 0x7F800000, "-inf": 0xFF800000},
    **{"-0": 0x80000000, "0": 0, "largest": 0x7F7FFFFF, "-largest": 0xFF7FFFFF, "denormal": 1, "-denormal": 0x80000001, "1e30": 0x7149F2CA},
}
_BYTES = (0, 1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 17, 63, 64, 127, 128, 255)


def values(base: Base) -> Iterator[Mutant | None]:
    """Each entry's own bytes: scalars to every neighbour and extreme, sections byte by byte, floats to what is no number, bits flipped."""
    for file in base.tensor_files:
        parts = Parts.of(base.files[file])
        for name, info in own(base, file, parts):
            payload = parts.payload(name)
            for what, other in revalued(name, info["dtype"], info["shape"], payload):
                shape = info["shape"] if len(other) == len(payload) else [len(other)]
                changed = parts.with_payloads({name: (info["dtype"], shape, other)})
                yield single(base, f"{name}: {what}", file, changed, name, layer_of(name))


def revalued(name: str, dtype: str, shape: list[int], payload: bytes) -> Iterator[tuple[str, bytes]]:
    suffix = name.rpartition(".weight.")[2] if ".weight." in name else name.rpartition(".")[2]
    if dtype == "U8" and not shape:
        yield from ((f"= {value}", bytes((value,))) for value in range(256))
    elif dtype == "U32":
        yield from words(payload)
    elif dtype in ("F32", "F16", "BF16"):
        yield from numbers(payload, dtype)
    elif suffix == "sections" or (dtype == "U8" and len(payload) <= 64 and suffix not in ("weight", "signs_in", "signs_out")):
        yield from sections(payload)
    else:
        yield from bits(payload)


def words(payload: bytes) -> Iterator[tuple[str, bytes]]:
    found = struct.unpack(f"<{len(payload) // 4}I", payload)
    for index, value in enumerate(found):
        for other in sorted({*_INTS, *(max(0, value + step) for step in (-2, -1, 1, 2, 4)), value * 2, value // 2, value ^ 1 << 31}):
            if other < 1 << 32:
                yield f"[{index}] = {other}", struct.pack(f"<{len(found)}I", *found[:index], other, *found[index + 1 :])
    if len(found) > 1:
        yield "reversed", struct.pack(f"<{len(found)}I", *found[::-1])


def numbers(payload: bytes, dtype: str) -> Iterator[tuple[str, bytes]]:
    width, keep = (4, 4) if dtype == "F32" else (2, 2)
    for at in {0, len(payload) // width // 2 * width, len(payload) - width}:
        for what, pattern in _FLOATS.items():
            number = pattern.to_bytes(4, "little")[4 - keep :]
            if dtype == "F16":
                number = struct.pack("<H", (pattern >> 16 & 0x8000) | min(pattern >> 13 & 0x7C00, 0x7C00) | (pattern >> 13 & 0x3FF))
            yield f"value {at // width} = {what}", payload[:at] + number + payload[at + width :]


def sections(payload: bytes) -> Iterator[tuple[str, bytes]]:
    """Grammar and bytes of a small blob of tagged sections; the tags' lengths are written out here again."""
    for at, byte in enumerate(payload):
        wide = _BYTES if at < 8 or at >= len(payload) - 3 else ()  # in between lie the digits of a digest
        for other in sorted({*wide, *(max(0, min(255, byte + step)) for step in (-1, 1)), byte ^ 0x80} - {byte}):
            yield f"byte {at} = {other}", payload[:at] + bytes((other,)) + payload[at + 1 :]
    yield from ((f"cut at {at}", payload[:at]) for at in range(len(payload)))
    yield from (
        (f"and {more.hex()}", payload + more) for more in (b"\0", b"\1", b"\2", b"\3", b"\4", b"\xff", b"\4\0\0", b"\3\4\x10\2", bytes(300))
    )
    yield from ((f"{more.hex()} before", more + payload) for more in (b"\0", b"\2", b"\3\4\x10\2", b"\4\0\0", b"\xff"))
    sizes, at, found = {1: 36, 2: 1, 3: 4, 4: 3}, 0, []
    while at < len(payload):
        size = sizes.get(payload[at], 1)
        found.append(payload[at : at + size])
        at += size
    yield "sections reversed", b"".join(found[::-1])
    yield "sections twice", payload + payload
    for index, section in enumerate(found):
        yield f"section {index} removed", b"".join(found[:index] + found[index + 1 :])
        yield f"section {index} repeated", b"".join((*found[: index + 1], section, *found[index + 1 :]))
        yield f"section {index} moved to the end", b"".join((*found[:index], *found[index + 1 :], section))


def bits(payload: bytes) -> Iterator[tuple[str, bytes]]:
    """Bits of packed bytes and tables: each bit of the first and last four bytes, one bit of some sixty others, numbers that are none."""
    step = max(1, len(payload) // 60)
    for at in sorted({*range(min(4, len(payload))), *range(max(0, len(payload) - 4), len(payload)), *range(0, len(payload), step)}):
        for bit in range(8) if at < 4 or at >= len(payload) - 4 else (at % 8,):
            yield f"bit {bit} of byte {at}", payload[:at] + bytes((payload[at] ^ 1 << bit,)) + payload[at + 1 :]
    for pattern in (b"\0\x7c", b"\xff\xff", b"\0\xfe", b"\x80\x7f", b"\0\0\x80\x7f", b"\0\0\xc0\xff", b"\0\0\0\x80"):
        for at in (0, len(payload) - len(pattern)):
            if at >= 0:
                yield f"{pattern.hex()} at {at}", payload[:at] + pattern + payload[at + len(pattern) :]
    yield "all zero", bytes(len(payload))
    yield "all ones", b"\xff" * len(payload)
    yield "reversed", payload[::-1]
