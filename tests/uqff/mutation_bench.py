"""What must become of a mutant: refused with an error that names the place, or harmless, or (rarely, without hashes) another artifact.

A mutant is *refused* where `verify` does not pass; its failures must name the file, the entry, the layer or the field. It is *harmless*
where `verify` passes and every layer, bias and residual tensor is the original, bit for bit. Without a report and its hashes a third
verdict exists, *other*: a well-formed artifact that was simply not written by us. It is allowed by this rule and no wider:

* the files' names, and in each file the names, dtypes and shapes of the entries are those of the original (header text, order and
  alignment may differ), so that nothing but bytes of entries changed; and
* each changed entry is one whose every value means something, and nothing in the file says which was meant:
  - payload: `<key>.weight`, `<key>.weight.scales`, other value entries of a family (`VALUES`), `<key>.bias`, signs, residual tensors;
  - the three scales of an FP8 layer (`FP8`), where all of them changed and agree: two equal numbers and their reciprocal;
  - code points between readings of equal size (`CODES`): `<key>.weight.dtype` between the types of a row of `TWINS`; in
    `<key>.weight.sections` the last two bytes, the block sizes of a rotation, and the K of a geometry where so short a row has the same
    stride; and
* every layer whose entries are unchanged decodes to the original's bits, and the changed ones keep their shape and, but for `CODES`,
  their label; what they decode to is finite.

One header field joins the code points: the dtype F16 ⇄ BF16 of a residual tensor, of a bias, of a layer of tag 1 (whose own dtype it
is), and of the scales and offsets of an AFQ layer where both change. Nothing else of AFQ does: its `.bits` and `.group_size` follow from
the lengths of three entries and the shape that the model needs.
"""

from __future__ import annotations

import signal
import struct
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import numpy as np
import uqff_samples as samples
from mutants import Base, Mutant, Parts, layer_of
from test_uqff_verify import SHIPPED, Oracle

from arctool.errors import ArctoolError
from arctool.uqff.container import open_artifact
from arctool.uqff.verify import verify

SECONDS = 5.0
"""Processor time that one mutant may take: a hundred times what the slowest needs."""

VALUES = ("weight", "weight.scales", "weight.biases", "bias", "weight.signs_in", "weight.signs_out")
CODES = ("weight.dtype", "weight.sections")
FP8 = ("weight.dequant_w_scale", "weight.dequant_x_scale", "weight.quant_scale")
FACTORS = ("weight.scales", "weight.biases")

TWINS = ({1, 30}, {2, 12}, {6, 13})
"""ggml's numbers of types whose rows take the same bytes: f16 and bf16; q4_0 and q4k, 8 · 18 = 144; q5_0 and q5k, 8 · 22 = 176."""

BIAS = "a layer's bias"

Bits = dict[str, tuple[str, tuple[int, ...], bytes]]
"""Layer, bias or residual tensor → label, shape, its values' bytes."""


class Hung(BaseException):
    """Past `SECONDS`."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise Hung after that much processor time: a timer of its own, so that pytest-timeout keeps the other."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Hung

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


@dataclass
class Sweep:
    """What became of a group of mutants. `faults`: those that no rule allows, in words."""

    verdicts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    by_verdict: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, verdict: str, mutant: Mutant, words: str = "") -> None:
        self.verdicts[verdict] += 1
        self.by_verdict.setdefault(verdict, []).append(mutant.name)
        if verdict == "fault":
            self.faults.append(f"{mutant.name}: {words}")

    def check(self, least: Mapping[str, int]) -> None:
        """Fail with the mutants that no rule allows, or where the sweep was emptier than it must be: `least` by verdict."""
        assert not self.faults, f"{len(self.faults)} of {self.verdicts.total()} mutants:\n" + "\n".join(self.faults[:40])
        assert {"refused", *least} == {*least}
        few = {verdict: self.verdicts[verdict] for verdict, number in least.items() if self.verdicts[verdict] < number}
        assert not few, f"{few} mutants, expected at least {dict(least)}"


def base_of(directory: Path, name: str) -> Base:
    return Base(name, {item.name: item.read_bytes() for item in sorted(directory.iterdir())})


def write_base(directory: Path, base: Base) -> None:
    directory.mkdir(parents=True)
    for name, raw in base.files.items():
        (directory / name).write_bytes(raw)


def truth(only: Iterable[str] | None = None, known: samples.Layers | None = None) -> Bits:
    """What the tensors of the sample (`layers`, or others that are `known`) are, by the oracle alone: no file is involved."""
    found: Bits = {}
    for key, (weight, bias) in (known or samples.layers()).items():
        if only is None or key in only:
            found[f"{key}.weight"] = (weight.label, weight.shape, weight.dense().tobytes())
            if bias is not None:
                found[f"{key}.bias"] = (BIAS, bias.shape, bias.tobytes())
    for key, tensor in (("model.norm.weight", samples.dense(12, dtype=np.float32)), ("model.layers.0.norm.weight", samples.dense(7))):
        found[key] = (tensor.label, tensor.shape, tensor.dense().tobytes())
    return found


def read(directory: Path) -> Bits:
    """The same from a file."""
    found: Bits = {}
    with open_artifact(directory) as artifact:
        keys = artifact.keys()
        for key in keys:
            weight, bias = artifact.weight(key), artifact.bias(key)
            found[f"{key}.weight"] = (weight.label, weight.shape, weight.dense().tobytes())
            if bias is not None:
                found[f"{key}.bias"] = (BIAS, bias.shape, bias.tobytes())
        for name in artifact.residual_names():
            tensor = artifact.residual(name)
            found[name] = (tensor.label, tensor.shape, tensor.dense().tobytes())
        for name in artifact.assets:
            artifact.assets[name]
    return found


class Bench:
    """A directory in which one mutant after the other stands for the artifact."""

    def __init__(self, directory: Path, base: Base, known: Bits, *, sealed: bool) -> None:
        self.directory, self.base, self.known, self.sealed = directory, base, known, sealed
        self.expected = {name: shape for name, (_, shape, _) in known.items()}
        write_base(directory, base)

    def sweep(self, mutants: Iterable[Mutant | None], into: Sweep | None = None, *, every: int = 1) -> Sweep:
        """Try the mutants, or about one of `every`, chosen by their names."""
        result = Sweep() if into is None else into
        start = time.perf_counter()
        for mutant in filter(None, mutants):
            if every == 1 or hash_of(mutant.name) % every == 0:
                self.try_one(mutant, result)
        result.seconds += time.perf_counter() - start
        return result

    def try_one(self, mutant: Mutant, result: Sweep) -> None:
        """Judge one mutant; the files are put back."""
        with self.holding(mutant):
            try:
                with limited(SECONDS):
                    result.add(*self._judge(mutant))
            except Hung:
                result.add("fault", mutant, f"took more than {SECONDS} s")

    @contextmanager
    def holding(self, mutant: Mutant) -> Iterator[None]:
        """The mutant's files in the directory. New inodes: an old one may still be mapped, and must not shrink under its reader."""
        try:
            self._put(mutant.files)
            yield
        finally:
            self._put({name: self.base.files.get(name) for name in mutant.files})

    def _put(self, files: Mapping[str, bytes | None]) -> None:
        for name, raw in files.items():
            (self.directory / name).unlink(missing_ok=True)
            if raw is not None:
                (self.directory / name).write_bytes(raw)

    def failures(self) -> list[str]:
        """What `verify` has to say; empty where it passes. Anything that escapes but ArctoolError is the caller's to see."""
        try:
            report = verify(self.directory, implementations=[Oracle()], shipped=SHIPPED, expected=self.expected, jobs=1)
        except ArctoolError as error:
            return [str(error)]
        return [] if report.passed else [words for answer in report.answers for words in answer.failures] or ["nothing"]

    def _judge(self, mutant: Mutant) -> tuple[str, Mutant, str]:
        found: Bits | None
        refusal = ""
        try:
            found = read(self.directory)
        except ArctoolError as error:
            found, refusal = None, str(error)
        except Exception as error:
            return "fault", mutant, f"reading raised {type(error).__name__}: {error}"
        try:
            failures = self.failures()
        except Exception as error:
            return "fault", mutant, f"verify raised {type(error).__name__}: {error}"
        if found is None and not failures:
            return "fault", mutant, f"verify passes what cannot be read: {refusal}"
        if failures:
            for text in ([refusal] if refusal else []), failures:
                said = "\n".join(text).replace(str(self.directory), "")
                if text and not any(place in said for place in mutant.places if place):
                    return "fault", mutant, f"the refusal does not name the place {mutant.places[:3]}: {said[:300]}"
            return "refused", mutant, ""
        if found is not None and same_bits(self.known, found):
            return "harmless", mutant, ""
        if self.sealed:
            return "fault", mutant, "passes in spite of the hashes, and decodes to other bits"
        words = forbidden(self.base, mutant, self.known, found or {})
        return ("fault", mutant, words) if words else ("other", mutant, "")


def same_bits(known: Bits, found: Bits) -> bool:
    """Whether every tensor is the original. What the residual file has besides is read by nobody; a bias that was none would be."""
    return {**found, **known} == found and not any(found[name][0] == BIAS for name in found.keys() - known.keys())


def forbidden(base: Base, mutant: Mutant, known: Bits, found: Bits) -> str:
    """Why the rule of this room's docstring does not allow a mutant to be another artifact; empty where it does."""
    changed: set[str] = set()
    coded: set[str] = set()
    for file, raw in mutant.files.items():
        if raw is None or file not in base.files:
            return f"{file} is not among the files"
        if file not in base.tensor_files:
            continue
        before, after = Parts.of(base.files[file]), Parts.of(raw)
        old, new = dict(before.entries), dict(after.entries)
        if set(old) != set(new):
            return f"{file}: other entries"
        for name in old:
            kinds = (old[name]["dtype"], new[name]["dtype"])
            swap = set(kinds) == {"F16", "BF16"} and (file not in base.shards or swappable(name, before, after))
            if old[name]["shape"] != new[name]["shape"] or (kinds[0] != kinds[1] and not swap):
                return f"{file}: {name}: another header and other bits"
            if before.payload(name) != after.payload(name) or swap:
                changed.add(name)
                why = "" if file not in base.shards else allowed(name, before, after)
                if why:
                    return f"{name}: {why}"
                if swap or name.endswith(CODES):
                    coded.add(layer_of(name))
    if set(known) != set(found):
        return f"other tensors: {sorted(set(known) ^ set(found))}"
    touched = {layer_of(name) for name in changed}
    for name, (label, shape, values) in known.items():
        if layer_of(name) not in touched and found[name] != (label, shape, values):
            return f"{name} decodes otherwise, and none of its bytes changed"
        if found[name][1] != shape or (found[name][0] != label and layer_of(name) not in coded):
            return f"{name} became {found[name][0]} {found[name][1]}"
        if not np.isfinite(np.frombuffer(found[name][2], "<f4")).all():
            return f"{name} is not finite, and passes"
    return ""


def swappable(name: str, before: Parts, after: Parts) -> bool:
    """Whether nothing in a shard says which of two dtypes of equal size the entry was meant to have."""
    key = layer_of(name)
    rest, dtypes = name[len(key) + 1 :], {entry: info["dtype"] for entry, info in after.entries}
    if rest in FACTORS:
        return len({dtypes[f"{key}.{factor}"] for factor in FACTORS}) == 1
    return rest == "bias" or (rest == "weight" and before.payload(f"{key}.weight.format") == b"\1")


def allowed(name: str, before: Parts, after: Parts) -> str:
    """Why one entry of a layer may not change unseen; empty where it may."""
    old, new = before.payload(name), after.payload(name)
    key = layer_of(name)
    rest = name[len(key) + 1 :]
    if rest in VALUES:
        return ""
    if rest == "weight.dtype" and any({int.from_bytes(old, "little"), int.from_bytes(new, "little")} == twins for twins in TWINS):
        return ""
    if rest in FP8:
        scales = [struct.unpack("<f", after.payload(f"{key}.{part}"))[0] for part in FP8]
        changed = all(after.payload(f"{key}.{part}") != before.payload(f"{key}.{part}") for part in FP8)
        return "" if changed and scales[0] == scales[1] and abs(scales[0] * scales[2] - 1) <= 2.0**-7 else f"scales {scales} unseen"
    if rest == "weight.sections" and len(old) == len(new):
        if old[:-2] == new[:-2] and old[-3] == 4:
            return ""
        inner = int.from_bytes(before.payload(f"{key}.weight.shape")[4:8], "little")
        if old[0] == 3 and old[2:] == new[2:] and stride(old[1], old[3], inner) == stride(new[1], new[3], inner):
            return ""
    return f"{old[:40].hex()} became {new[:40].hex()} unseen"


def stride(k: int, v: int, inner: int) -> int:
    """Bytes of a row: ceil(k · inner / v / 8), rounded up to 4 (DESIGN §3)."""
    return -(-(k * inner // v) // 32) * 4


def hash_of(name: str) -> int:
    return zlib.crc32(name.encode())
