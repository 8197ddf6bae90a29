"""The mutation sweep: one change to one field of a small artifact, thousands of times, and nothing that is misread passes for right.

`mutants`, `report_mutants` and `family_mutants` make them, `mutation_bench` judges them. Each layer of the sample is an artifact of its
own (so that a mutant costs milliseconds), and all of them together are one of several shards. Both are swept twice: *sealed* as they were
written, and *bare*, without the report and with a foreign producer, so that no hash can be what saves us. The families that only others
write are swept bare.
"""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import family_mutants
import mutants
import numpy as np
import pytest
import report_mutants
import uqff_samples as samples
from mutants import Base, Mutant
from mutation_bench import Bench, Bits, Sweep, base_of, hash_of, read, truth

from arctool.quant.codebooks import Codebook
from arctool.quant.tensor import Weight
from arctool.quant.trellis import Geometry
from arctool.uqff.container import ArtifactWriter, BakeInfo

pytestmark = pytest.mark.timeout(300)

WHOLE = "the whole"
KEYS = tuple(samples.layers())
TABLED = "model.layers.0.k"

FAMILIES = "the families"
FOREIGN = tuple(samples.families())
WRITTEN = samples.WRITTEN
SMALLEST = ("model.layers.0.fp8", "model.layers.0.afq3", "model.layers.0.experts.mxfp4", "model.layers.0.plain.bf16")
"""Layers of `families` of which every byte is worth a mutant."""

HARMLESS_FIELDS = (
    *(r"base_model", r"arctool\.(seed|algorithm|calibration|budget|tables|recipe|source)", r"arctool\.(recipe|source)\..*"),
    *(r"outputs\.0\.layer_details\.\d+\.(default|resolved)_target", r"arctool\.layers\..*\.(relative_error|proxy_error|dropped_rows|note)"),
)
"""What only the baker knows: no byte of the artifact says it, so that another value or none passes. No other field may."""


@pytest.fixture(autouse=True, scope="module")
def sum2_once() -> Iterator[None]:
    """The 65,536 values of a sum2 codebook are computed once instead of several times for each mutant: nine tenths of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Codebook, "values", remembered(Codebook.values))
        yield


def remembered(values: Callable[[Codebook, Geometry], np.ndarray]) -> Callable[[Codebook, Geometry], np.ndarray]:
    known: dict[Geometry, np.ndarray] = {}

    def found(self: Codebook, geometry: Geometry) -> np.ndarray:
        if self.kind != "sum2":
            return values(self, geometry)
        return known[geometry] if geometry in known else known.setdefault(geometry, values(self, geometry))

    return found


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Base]:
    """By layer key and whether it is sealed, the artifact that holds that layer alone; under `WHOLE` and `FAMILIES`, all in some shards."""
    place = tmp_path_factory.mktemp("bases")
    found = {}
    for index, key in enumerate(KEYS):
        samples.write(place / str(index), (key,))
        found[key, True] = replace(base_of(place / str(index), key), common=index == 0)
    samples.write(place / "whole", shard_bytes=300)
    found[WHOLE, True] = base_of(place / "whole", WHOLE)
    found |= {(key, False): mutants.foreign(base) for (key, _), base in found.items()}
    for key in FOREIGN:
        samples.write_foreign(place / key, (key,))
        found[key, False] = replace(base_of(place / key, key), common=False)
    for key in WRITTEN:
        samples.write(place / "own" / key, (key,), known=samples.families())
        found[key, True] = replace(base_of(place / "own" / key, key), common=False)
    samples.write(place / "own" / "all", WRITTEN, known=samples.families(), shard_bytes=300)
    samples.write_foreign(place / "all", shards=3)
    return found | {(FAMILIES, True): base_of(place / "own" / "all", FAMILIES), (FAMILIES, False): base_of(place / "all", FAMILIES)}


class Benches:
    """Makes a bench for one of the bases: sealed as it was written, or bare."""

    def __init__(self, bases: dict[tuple[str, bool], Base], place: Path) -> None:
        self.bases, self.place, self.count = bases, place, 0

    def __call__(self, key: str, sealed: bool) -> Bench:
        self.count += 1
        known = samples.layers() if key in (*KEYS, WHOLE) else samples.families()
        only = None if key == WHOLE else (WRITTEN if sealed else FOREIGN) if key == FAMILIES else (key,)
        return Bench(self.place / f"{self.count}", self.bases[key, sealed], truth(only, known), sealed=sealed)

    def sweep(self, keys: Iterable[str], sealed: bool, generate: Callable[[Base], Iterator[Mutant | None]], every: int = 1) -> Sweep:
        """One kind of mutants over several artifacts, or about one of `every`."""
        result = Sweep()
        for key in keys:
            bench = self(key, sealed)
            bench.sweep(generate(bench.base), result, every=every)
        return result


@pytest.fixture
def benches(bases: dict[tuple[str, bool], Base], tmp_path: Path) -> Benches:
    return Benches(bases, tmp_path)


SEALS = pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "bare"])


@SEALS
def test_the_artifacts_themselves_pass_and_are_the_oracles(benches: Benches, sealed: bool) -> None:
    for key in (*KEYS, WHOLE, FAMILIES, *(WRITTEN if sealed else FOREIGN)):
        one = benches(key, sealed)
        assert one.failures() == []
        assert read(one.directory) == one.known


class Case(NamedTuple):
    """A kind of mutants: over which artifacts, one of how many when sealed and when bare, and at least how many of each verdict."""

    generate: Callable[[Base], Iterator[Mutant | None]]
    keys: dict[bool, tuple[str, ...]]
    every: dict[bool, int]
    least: dict[bool, dict[str, int]]


def case(
    generate: Callable[[Base], Iterator[Mutant | None]], keys: tuple[str, ...], sealed: int, bare: int, *least: dict[str, int]
) -> Case:
    """`keys` that only others write are left out when sealed."""
    ours = tuple(key for key in keys if key not in FOREIGN or key in WRITTEN)
    return Case(generate, {True: ours, False: keys}, {True: sealed, False: bare}, {True: least[0], False: least[1]})


def about(generate: Callable[[Base], Iterator[Mutant | None]], words: str) -> Callable[[Base], Iterator[Mutant]]:
    """Those mutants whose names match."""
    return lambda base: (mutant for mutant in generate(base) if mutant is not None and re.search(words, mutant.name))


KINDS = {
    "lengths": case(mutants.lengths, KEYS, 3, 1, {"refused": 350}, {"refused": 800, "harmless": 100}),
    "lengths in shards": case(mutants.lengths, (WHOLE,), 3, 1, {"refused": 120}, {"refused": 340, "harmless": 20}),
    "headers": case(mutants.headers, KEYS, 3, 1, {"refused": 180}, {"refused": 400, "harmless": 150}),
    "headers in shards": case(mutants.headers, (WHOLE,), 3, 1, {"refused": 80}, {"refused": 180, "harmless": 70}),
    "dtype, shape, offsets": case(mutants.header_values, KEYS, 6, 1, {"refused": 900}, {"refused": 6000, "harmless": 5, "other": 1}),
    "entries": case(mutants.entries, KEYS, 6, 1, {"refused": 450}, {"refused": 3000}),
    "entries in shards": case(mutants.entries, (WHOLE,), 24, 6, {"refused": 100}, {"refused": 500, "harmless": 20}),
    "format tags": case(about(mutants.values, r"\.format: "), KEYS, 6, 1, {"refused": 200}, {"refused": 1700}),
    "values": case(
        about(mutants.values, r"^(?!.*\.format: )"), KEYS, 9, 2, {"refused": 450}, {"refused": 1700, "harmless": 20, "other": 250}
    ),
    "a bit of every byte": case(
        lambda b: mutants.flips(b, 1), KEYS[:2], 8, 1, {"refused": 300}, {"refused": 1800, "harmless": 150, "other": 150}
    ),
    "a bit of some bytes": case(
        lambda b: mutants.flips(b, 17), KEYS[2:], 4, 1, {"refused": 120}, {"refused": 300, "harmless": 20, "other": 20}
    ),
    "files moved": case(report_mutants.moves, (WHOLE,), 2, 1, {"refused": 60}, {"refused": 130, "harmless": 30}),
    "config": case(
        lambda b: report_mutants.report_texts(b, "config.json"), KEYS[:1], 1, 1, {"refused": 19}, {"refused": 16, "harmless": 1}
    ),
    "families: lengths": case(mutants.lengths, FOREIGN, 9, 3, {"refused": 110}, {"refused": 450, "harmless": 120}),
    "families: headers": case(mutants.headers, FOREIGN, 9, 3, {"refused": 65}, {"refused": 270, "harmless": 110}),
    "families: dtype, shape, offsets": case(
        mutants.header_values, FOREIGN, 12, 2, {"refused": 300}, {"refused": 3400, "harmless": 15, "other": 2}
    ),
    "families: entries": case(mutants.entries, FOREIGN, 12, 3, {"refused": 170}, {"refused": 1150}),
    "families: entries in shards": case(mutants.entries, (FAMILIES,), 48, 24, {"refused": 45}, {"refused": 170, "harmless": 4}),
    "families: format tags": case(about(mutants.values, r"\.format: "), FOREIGN, 12, 6, {"refused": 140}, {"refused": 520}),
    "families: values": case(about(mutants.values, r"^(?!.*\.format: )"), FOREIGN, 12, 9, {"refused": 200}, {"refused": 330, "other": 850}),
    "families: values together": case(
        family_mutants.together, FOREIGN, 9, 2, {"refused": 130}, {"refused": 950, "harmless": 1, "other": 3}
    ),
    "families: a bit of every byte": case(
        lambda b: mutants.flips(b, 1), SMALLEST, 8, 3, {"refused": 400}, {"refused": 1000, "harmless": 130, "other": 110}
    ),
}


@SEALS
@pytest.mark.parametrize("kind", KINDS)
def test_every_mutant_is_refused_by_place_or_harmless(benches: Benches, kind: str, sealed: bool) -> None:
    """Sealed, every change of a byte outside the report is refused; bare, by the rule of `mutation_bench`."""
    generate, keys, every, least = KINDS[kind]
    sweep = benches.sweep(keys[sealed], sealed, generate, every[sealed])
    sweep.check(least[sealed])


@pytest.mark.parametrize(("key", "every", "least"), [(TABLED, 1, 1000), (WHOLE, 20, 200)])
def test_every_field_of_the_report_is_held_to_its_word(benches: Benches, key: str, every: int, least: int) -> None:
    bench, passed = benches(key, True), set()
    sweep = Sweep()
    for at, mutant in report_mutants.report_fields(bench.base):
        before = sweep.verdicts["harmless"]
        bench.sweep([mutant], sweep, every=every)
        if sweep.verdicts["harmless"] > before:
            passed.add(report_mutants.dotted(at))
    sweep.check({"refused": least, "harmless": least // 20})
    assert sorted(field for field in passed if not any(re.fullmatch(pattern, field) for pattern in HARMLESS_FIELDS)) == []


def test_the_report_as_a_text(benches: Benches) -> None:
    benches.sweep((TABLED,), True, lambda b: report_mutants.report_texts(b, report_mutants.REPORT)).check({"refused": 17, "harmless": 1})


def test_hashes_that_were_taken_out_of_a_report_are_missed(benches: Benches) -> None:
    """Whoever can change a weight can change the report: our own artifact without our hashes is no artifact of another program."""
    keys = (*KEYS, WHOLE, *WRITTEN)
    benches.sweep(keys, True, report_mutants.stripped).check({"refused": 9 * len(keys)})


def test_the_bench_sees_what_no_rule_allows(benches: Benches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were `verify` to pass everything, or to name no place, the sweep would say so."""
    for words, sealed in (([], True), ([], False), (["it is damaged"], True)):
        bench = benches(TABLED, sealed)
        monkeypatch.setattr(Bench, "failures", lambda self, words=words: words)
        sweep = bench.sweep(about(mutants.values, r"\.(sections|shape): ")(bench.base))
        assert sweep.verdicts["fault"] > 0.9 * sweep.verdicts.total() > 100
        with pytest.raises(AssertionError, match="mutants:"):
            sweep.check({"refused": 0})


# ---- memory --------------------------------------------------------------------------------------------------------------------

SLACK = 300_000
"""Bytes that opening, reading and verifying may take beside twice the file: the headers' and reports' objects, the oracle's block."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Base, Bits]:
    """One dense layer of 1 MB, which is mapped, and small ones beside it."""
    place = tmp_path_factory.mktemp("large") / "a"
    tensors: dict[str, Weight] = {
        "model.big": samples.dense(512, 512, dtype=np.float32),
        "model.t": samples.trellis("K8V4L12", samples.table(Geometry.parse("K8V4L12"))),
        "model.b": samples.blocks("q8_0", 1, 32),
    }
    with ArtifactWriter(place, "q", config={}, assets={}) as writer:
        for key, weight in tensors.items():
            writer.add_layer(key, weight)
        writer.finish(BakeInfo("q", 0))
    return base_of(place, "large"), {f"{key}.weight": (w.label, w.shape, w.dense().tobytes()) for key, w in tensors.items()}


LIES = {
    "lengths": about(mutants.lengths, ""),
    "dtype, shape, offsets": about(mutants.header_values, r"dtype .* with|shape \[|offsets \["),
    "shapes and sections": about(mutants.values, r"\.shape: |\.sections: (byte [0-4] |cut|and)"),
}


@SEALS
@pytest.mark.parametrize("kind", LIES)
def test_no_lie_about_a_size_allocates_more_than_twice_the_file(large: tuple[Base, Bits], tmp_path: Path, kind: str, sealed: bool) -> None:
    base, known = large
    bench = Bench(tmp_path / "a", base if sealed else mutants.foreign(base), known, sealed=sealed)
    size = sum(map(len, base.files.values()))
    assert size > 1 << 20
    assert bench.failures() == []
    peaks: dict[str, int] = {}
    result = Sweep()
    tracemalloc.start()
    try:
        for mutant in LIES[kind](bench.base):
            if hash_of(mutant.name) % 3 and kind != "lengths":
                continue  # tracing costs ten times what the mutant does
            with bench.holding(mutant):
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
                result.add("refused" if bench.failures() else "harmless", mutant)
                peaks[mutant.name] = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert len(peaks) > 60
    assert result.verdicts["refused"] > 50
    greedy = {name: peak for name, peak in peaks.items() if peak > 2 * size + SLACK}
    assert not greedy, sorted(greedy.items(), key=lambda item: -item[1])[:20]
