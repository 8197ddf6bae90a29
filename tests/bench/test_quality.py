"""A whole study on a tiny model: rows against numbers made another way, failures that stay rows, and what an interrupted study keeps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp_stand_in import StandIn
from tiny_gguf import write_gguf

from arctool.bake.calibration.token_set import choose_calibration
from arctool.bake.pipeline import bake, bake_in_memory
from arctool.bake.recipe import Recipe
from arctool.bake.search.ldlq import METHOD, Method
from arctool.bake.source.checkpoint import open_checkpoint
from arctool.bench import quality, study
from arctool.bench.evaluation import evaluate
from arctool.bench.quality import measure, parser, run, run_study
from arctool.bench.rows import LADDER, Made, Work
from arctool.bench.study import BAKED, PEER, ROUNDED, SOURCE, WEIGHTED, Row, Study
from arctool.errors import InterruptedByUser, SourceError, StorageError, UsageError
from arctool.kernels.registry import default_registry
from arctool.run.divergence import Reference, compare, reference
from arctool.run.reading import built_in_text
from arctool.run.tokenizer import Tokenizer
from arctool.run.weights import load_model

WINDOWS = tuple(tuple(int(i) for i in np.random.default_rng(seed).integers(3, 512, 30)) for seed in range(2))
TEXT = ["--windows", "2", "--window", "64", "--calib-tokens", "512", "--jobs", "1"]


@pytest.fixture(scope="module")
def base(tiny_llama: Path) -> Reference:
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        return reference(load_model(checkpoint, default_registry()), WINDOWS)


@pytest.fixture(scope="module")
def gguf(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tiny_llama, tmp_path_factory.mktemp("gguf") / "tiny.gguf", "llama")


@pytest.fixture
def stand_in(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn(tiny_llama)
    monkeypatch.setitem(sys.modules, "llama_cpp", made.module())
    return made


def study_of(*arguments: str | Path) -> Study:
    return run(parser().parse_args([*TEXT, *map(str, arguments)]))


def numbers(row: Row | None) -> tuple[float | None, ...]:
    assert row is not None
    return row.perplexity, row.kl, row.kl_p99, row.same_top1


def work(name: str, base: Reference, calls: list[str], error: BaseException | None = None, **options: Any) -> Work:
    """A row whose logits are the base's, the first one of each token a little off."""

    def predict(ids: Any) -> Iterator[np.ndarray]:
        calls.append(name)
        window = next(at for at, other in enumerate(base.windows) if other[:-1] == tuple(ids))
        rows = base.logits(window, 0, len(ids)).copy()
        rows[:, 0] += 0.5
        yield rows

    @contextmanager
    def make() -> Iterator[Made]:
        if error is not None:
            raise error
        yield Made(10, 2.0, {"x": 1}, predict, lambda: {"calls": len(calls)}, 1.5)

    return Work(name, BAKED, make, **options)


def test_every_row_of_ours_has_the_numbers_and_the_size_of_an_artifact(tiny_llama: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    found = study_of(tiny_llama, "--only", "llama,*", "qtip2-v4, rounded", "qtip4, rounded", "--work", work)
    assert [row.name for row in found.rows] == ["llama, source", "qtip2-v4, rounded", "qtip4, rounded"]
    truth, *rounded = found.rows
    assert (truth.kl, truth.kl_p99, truth.same_top1, truth.linear_bits) == (0.0, 0.0, 1.0, 32.0)
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        made = [bake(checkpoint, tmp_path / row.model, Recipe.uniform(row.model), measured=False).path for row in rounded]
    expected = evaluate([str(path) for path in made], against=str(tiny_llama), window=64, tokens=128, layers=False)
    for row, path, other in zip(rounded, made, expected.rows, strict=True):
        model = other.comparison
        assert model is not None
        assert numbers(row) == (model.perplexity, model.kl, model.kl_p99, model.same_top1)
        assert row.nbytes == sum(file.stat().st_size for file in path.iterdir())
        assert row.linear_bits == other.model.linear_bits_per_weight
        assert sum(row.stored.values()) == 14
        assert any("trellis" in kernel for kernel in row.ran)
    assert os.listdir(work) == []


def test_each_step_of_the_ladder_is_another_model_and_has_one_part_more(tiny_llama: Path, tmp_path: Path) -> None:
    found = study_of(tiny_llama, "--only", "qtip2-v4*", "--work", tmp_path)
    assert len({numbers(row) for row in found.rows}) == len(found.rows) == 2 + len(LADDER)
    assert [row.nbytes is None for row in found.rows] == [False, *[True] * len(LADDER), False]
    assert len({row.linear_bits for row in found.rows}) == 1
    steps: list[Method] = [*LADDER.values(), METHOD]
    changed = [{f.name for f in fields(Method) if getattr(a, f.name) != getattr(b, f.name)} for a, b in pairwise(steps)]
    assert changed == [{"blocks"}, {"gains", "refit"}, {"quantised_prefix"}, {"share"}, {"shrinkage"}]


def test_a_baked_row_is_calibrated_with_the_text_that_was_asked_for(tiny_llama: Path, tmp_path: Path) -> None:
    asked = ["--only", "qtip3, baked", "--calib-tokens", "2048", "--work", str(tmp_path)]
    committed, sampled = (study_of(tiny_llama, *asked, *more) for more in ((), ("--self",)))
    described = [(part["tokens"], part["sampled"]) for part in (found.settings["calibration"] for found in (committed, sampled))]
    assert described == [(7 * 256, 0), (8 * 256, 256)]
    with open_checkpoint(str(tiny_llama)) as checkpoint:
        chosen = choose_calibration(checkpoint, "auto", 2048)
        model = load_model(bake_in_memory(checkpoint, Recipe.uniform("qtip3"), jobs=1, calibration=chosen), default_registry())
        ids = Tokenizer(checkpoint.assets, checkpoint.config.vocab_size).encode(built_in_text(), add_special_tokens=False)[:128]
        expected = compare(load_model(checkpoint, default_registry()), model, (ids[:64], ids[64:]))
    assert numbers(sampled.rows[0]) == (expected.perplexity, expected.kl, expected.kl_p99, expected.same_top1)
    assert numbers(sampled.rows[0]) != numbers(committed.rows[0])


def test_llama_cpp_is_held_to_the_same_windows_and_base(tiny_llama: Path, gguf: Path, stand_in: StandIn, tmp_path: Path) -> None:
    found = study_of(tiny_llama, "--gguf", gguf, "--only", "Q4_K_M, llama.cpp*", "--work", tmp_path)
    assert [row.name for row in found.rows] == ["F16, llama.cpp, check", f"Q4_K_M, {PEER}", f"Q4_K_M, {WEIGHTED}"]
    check, plain, weighted = found.rows
    assert (check.kl, check.nbytes) == (0.0, gguf.stat().st_size)
    assert check.ran == {"llama.cpp.tokens": 2 * 63}
    coarse = write_gguf(tiny_llama, tmp_path / "q4.gguf", "llama", tensor_type=2)
    expected = evaluate([str(coarse)], against=str(tiny_llama), window=64, tokens=128, layers=False).rows[0]
    assert expected.comparison is not None
    assert plain.kl == weighted.kl == pytest.approx(expected.comparison.kl, rel=1e-6)
    assert (plain.nbytes, plain.linear_bits, plain.stored) == (coarse.stat().st_size, 4.5, {"q4_0": 14})
    assert [ftype for ftype, _, _ in stand_in.quantised] == [1, 15, 15]
    assert len(stand_in.imatrix) == 14
    assert found.facts["llama.cpp"] == {"llama-cpp-python": "0.0.stand-in", "system": "AVX = 1 |"}
    assert os.listdir(tmp_path) == ["q4.gguf"]


def test_a_nearly_lossless_file_that_diverges_fails_all_rows_of_llama_cpp(
    tiny_llama: Path, gguf: Path, stand_in: StandIn, tmp_path: Path
) -> None:
    stand_in.shift = 3.0
    found = study_of(tiny_llama, "--gguf", gguf, "--only", "*llama*", "--work", tmp_path)
    assert [row.failure is None for row in found.rows] == [True, *[False] * 7]
    assert "its divergence is" in str(found.rows[1].failure)
    assert {row.failure for row in found.rows[2:]} == {"F16, llama.cpp, check: failed, so nothing of its kind can be compared"}
    assert [ftype for ftype, _, _ in stand_in.quantised] == [1]


def test_without_llama_cpp_its_rows_are_left_out_and_the_file_says_why(
    tiny_llama: Path, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    found = study_of(tiny_llama, "--gguf", gguf, "--only", "*llama*", "--out", tmp_path / "out.json")
    assert [row.name for row in found.rows] == ["llama, source"]
    assert "llama_cpp" in json.loads((tmp_path / "out.json").read_text())["facts"]["llama.cpp"]


def test_what_fails_is_a_row_and_the_others_go_on(base: Reference) -> None:
    calls: list[str] = []
    works = [
        work("a", base, calls, SourceError("a.gguf: broken")),
        work("b", base, calls, ZeroDivisionError("of a kind")),
        work("c", base, calls, most=1e-9),
        work("d", base, calls),
    ]
    found = run_study(Study({}, {}), works, lambda _: True, base, lambda _: None)
    assert [row.failure for row in found.rows][:2] == ["a.gguf: broken", "ZeroDivisionError: of a kind"]
    assert "nats a token, expected at most 1e-09" in str(found.rows[2].failure)
    assert found.failed == found.rows[:3]
    assert [row.kl for row in found.failed] == [None] * 3
    row = found.rows[3]
    assert (row.nbytes, row.linear_bits, row.stored, row.seconds, row.failure) == (10, 2.0, {"x": 1}, 1.5, None)
    assert row.ran == {"calls": 4}
    assert row.kl is not None
    assert row.kl > 1e-9


@pytest.mark.parametrize("error", [InterruptedByUser("stopped"), KeyboardInterrupt()])
def test_an_interruption_ends_the_study_and_no_row_fails_for_it(base: Reference, tmp_path: Path, error: BaseException) -> None:
    calls: list[str] = []
    works = [work("a", base, calls), work("b", base, calls, error), work("c", base, calls)]
    out = tmp_path / "out.json"
    with pytest.raises(type(error)):
        run_study(Study({"x": 1}, {}), works, lambda _: True, base, lambda found: study.save(found, out))
    kept = study.resumed(out, Study({"x": 1}, {"now": 2}))
    assert [row.name for row in kept.rows] == ["a, baked"]
    assert kept.facts == {"now": 2}
    works[1] = work("b", base, calls)
    again = run_study(kept, works, lambda _: True, base, lambda found: study.save(found, out))
    assert calls == ["a", "a", "b", "b", "c", "c"]
    assert study.load(out) == again
    assert [row.name for row in again.rows] == ["a, baked", "b, baked", "c, baked"]


def test_a_failed_row_is_tried_again_and_stands_where_it_belongs(base: Reference) -> None:
    calls: list[str] = []
    works = [work("a", base, calls), work("b", base, calls)]
    other = Row("z", BAKED, kl=1.0)
    begun = Study({}, {}, (other, Row("b", BAKED, kl=0.5), Row("a", BAKED, failure="no")))
    found = run_study(begun, works, lambda _: True, base, lambda _: None)
    assert [row.name for row in found.rows] == ["a, baked", "b, baked", "z, baked"]
    assert (found.rows[1].kl, found.rows[2]) == (0.5, other)
    assert calls == ["a", "a"]


def test_rows_of_other_settings_are_not_mixed(tiny_llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    study_of(tiny_llama, "--only", "llama*", "--out", out)
    with pytest.raises(UsageError, match=r"out\.json: is there; --resume"):
        study_of(tiny_llama, "--only", "llama*", "--out", out)
    found = study_of(tiny_llama, "--only", "llama*", "--out", out, "--resume")
    assert len(found.rows) == 1
    changed = json.loads(out.read_text())
    changed["settings"]["calibration"]["tokens"] = 7
    out.write_text(json.dumps(changed))
    with pytest.raises(UsageError, match=r"--resume: .*out\.json: calibration: measured under .*'tokens': 7.* asked for"):
        study_of(tiny_llama, "--only", "llama*", "--out", out, "--resume")


def test_a_budget_is_an_artifact_within_it(tiny_llama: Path, tmp_path: Path) -> None:
    found = study_of(tiny_llama, "--only", "mixed*", "--bpw", "4", "0.1", "--work", tmp_path)
    assert [row.name for row in found.rows] == ["mixed 4, baked", "mixed 0.1, baked"]
    mixed, impossible = found.rows
    assert mixed.failure is None
    assert mixed.linear_bits is not None
    assert 3.5 < mixed.linear_bits <= 4
    assert mixed.kl is not None
    assert mixed.kl > 0
    assert "0.1" in str(impossible.failure)
    assert os.listdir(tmp_path) == []


SAMPLE = Study(
    {"model": "tiny", "text": {"predicted": 1023, "name": "t.txt", "window": 1024}},
    {},
    (
        Row("tiny", SOURCE, 270_800_000, 16.0, 10.28, 0.0, 0.0, 0.0, 1.0, 0.0),
        Row("qtip2-v4", ROUNDED, 62_812_345, 2.0497, 27936.4, 6.51377, 15.25, 30.0, 0.06573, 61.4),
        Row("qtip2-v4", "feedback between blocks", None, 2.0497, 40.0, 1.25, 5.0, 9.0, 0.5, 100.0),
        Row("qtip2-v4", BAKED, 62_812_345, 2.0497, 30.0, 0.75, 3.0, 9.0, 0.625, 120.0),
        Row("Q2_K", PEER, 88_000_000, 4.234, 14.15, 0.3565, 1.614, 2.0, 0.7, 2.0),
        Row("Q2_K", WEIGHTED, 88_000_000, 4.234, 12.43, 0.2466, 1.015, 2.0, 0.756, 20.0),
        Row("Q4_K_M", PEER, failure="because"),
    ),
)


def test_a_study_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.json"
    study.save(SAMPLE, path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(StorageError, match=r"out\.json: cannot write: No space left"):
        study.save(Study({}, {}), path)
    assert os.listdir(tmp_path) == ["out.json"]
    assert study.load(path) == SAMPLE


def test_the_table_has_a_line_for_every_row() -> None:
    assert study.table(SAMPLE).splitlines() == [
        "| model | how | MB | bits/weight | perplexity | mean KL | KL p99 | same top-1 | made in, s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| tiny | source | 270.8 | 16.000 | 10.28 | 0.0000 | 0.000 | 1.000 | 0 |",
        "| qtip2-v4 | rounded | 62.8 | 2.050 | 27936.40 | 6.5138 | 15.250 | 0.066 | 61 |",
        "| qtip2-v4 | feedback between blocks | — | 2.050 | 40.00 | 1.2500 | 5.000 | 0.500 | 100 |",
        "| qtip2-v4 | baked | 62.8 | 2.050 | 30.00 | 0.7500 | 3.000 | 0.625 | 120 |",
        "| Q2_K | llama.cpp | 88.0 | 4.234 | 14.15 | 0.3565 | 1.614 | 0.700 | 2 |",
        "| Q2_K | llama.cpp, importance matrix | 88.0 | 4.234 | 12.43 | 0.2466 | 1.015 | 0.756 | 20 |",
        "| Q4_K_M | llama.cpp | FAILED |  |  |  |  |  |  |",
    ]


def test_what_is_baked_and_what_llama_cpp_made_is_drawn_in_colours_of_its_own(tmp_path: Path) -> None:
    marks = study.points(SAMPLE)
    assert [(mark.label, mark.family, mark.nbytes, mark.kl) for mark in marks] == [
        ("qtip2-v4", "arctool", 62_812_345, 0.75),
        ("Q2_K", "llama.cpp", 88_000_000, 0.3565),
        ("Q2_K", "llama.cpp, importance matrix", 88_000_000, 0.2466),
    ]
    quality.picture(SAMPLE, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UsageError, match="no row has both"):
        quality.picture(Study(SAMPLE.settings, {}), tmp_path / "none.png")


def test_one_command_prints_the_table_of_the_readme_and_leaves_a_code_where_a_row_failed(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    study.save(SAMPLE, path)
    assert os.listdir(tmp_path) == ["out.json"]
    arguments = [sys.executable, "-m", "arctool.bench.quality", "--table", str(path), "--plot", str(tmp_path / "out.png")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.stdout == f"<!-- measured: {path} -->\n{study.table(SAMPLE)}"
    assert done.stderr == "FAILED Q4_K_M, llama.cpp: because\n"
    assert done.returncode == 5
    assert (tmp_path / "out.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--table", "none.json"], 6, "error: none.json: cannot read: No such file or directory"),
        (["model", "--plot", "x.gif"], 2, "error: --plot: x.gif: expected a name that ends in .png, .svg, .pdf"),
    ],
)
def test_an_error_is_one_line_and_its_code(
    arguments: list[str], code: int, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert main_of(arguments, monkeypatch) == code
    assert [record.getMessage() for record in caplog.records] == [words]


def test_ctrl_c_is_one_line_and_its_code(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def stop(_: object) -> Study:
        raise KeyboardInterrupt

    monkeypatch.setattr(quality, "run", stop)
    assert main_of(["model"], monkeypatch) == 130
    assert [record.getMessage() for record in caplog.records] == ["interrupted; --resume goes on with the rows that are in --out"]


def main_of(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(sys, "argv", ["quality", *arguments])
    with pytest.raises(SystemExit) as left:
        quality.main()
    return left.value.code


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: [], "expected an object with settings, facts and rows, found list"),
        (lambda d: {**d, "rows": {}}, "rows: expected a list, found dict"),
        (lambda d: {**d, "settings": None}, "settings: expected a dict, found NoneType"),
        (lambda d: {k: v for k, v in d.items() if k != "facts"}, "facts: expected a dict, found NoneType"),
        (lambda d: {**d, "rows": [{"model": "x"}]}, "rows: 0: expected the fields of a row"),
        (lambda d: {**d, "rows": [{"model": "x", "how": "y", "kll": 1}]}, "rows: 0: expected the fields of a row.*kll"),
        (lambda d: {**d, "rows": ["x"]}, "rows: 0: expected the fields of a row.*str"),
    ],
)
def test_a_file_that_is_no_study_is_refused_by_field(tmp_path: Path, change: Callable[[Any], Any], words: str) -> None:
    path = tmp_path / "out.json"
    study.save(SAMPLE, path)
    assert study.load(path) == SAMPLE
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(UsageError, match=rf"out\.json: {words}"):
        study.load(path)
    path.write_bytes(b"\xff{")
    with pytest.raises(UsageError, match=r"out\.json: expected the JSON"):
        study.load(path)


def test_a_study_is_refused_before_it_measures(tiny_llama: Path, artifacts: dict[str, Path], tmp_path: Path) -> None:
    for arguments, error, words in (
        ([], UsageError, "expected a model"),
        ([artifacts["qtip4"]], UsageError, "is an artifact; expected the checkpoint"),
        ([tiny_llama, "--out", tmp_path / "no" / "x.json"], StorageError, r"x\.json: cannot write"),
        ([tiny_llama, "--gguf", tmp_path / "no.gguf"], StorageError, r"no\.gguf: cannot read"),
    ):
        with pytest.raises(error, match=words):
            study_of(*arguments)


def test_a_row_that_needs_another_waits_for_it(base: Reference) -> None:
    calls: list[str] = []
    works = [work("a", base, calls), work("b", base, calls, after="a, baked"), work("c", base, calls)]
    found = run_study(Study({}, {}), works, lambda work: work.model == "b", base, lambda _: None)
    assert [row.name for row in found.rows] == ["a, baked", "b, baked"]
    assert measure(works[0], base).kl == found.rows[0].kl
