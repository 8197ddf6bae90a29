"""`arctool bench bake` as a library: what is timed and how, errors against the oracle, the curve over the delay, the committed results."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
from locations import ROOT

from arctool.bake.search import survivors
from arctool.bake.search.survivor_ir import BLOCK
from arctool.bake.search.survivors import DELAY, LONG_DELAY
from arctool.bench import search
from arctool.bench.search import core_seconds, measure_speeds, measure_windows, parse_rungs
from arctool.errors import UsageError
from arctool.quant.codebooks import RUNGS, rung
from arctool.quant.trellis import Geometry, decode_rows, pack_symbols
from arctool.terminal.speeds import speeds
from arctool.terminal.tables import plain

DOC = (ROOT / "docs" / "quality.md").read_text(encoding="utf-8")
RESULTS = ROOT / "bench" / "results" / "lookahead.json"


def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock of the thread that stands still but for what the test adds."""
    now = 0.0

    def spend(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("time.thread_time", lambda: now)
    return spend


def test_the_first_round_is_no_measurement_and_the_rest_interleave(monkeypatch: pytest.MonkeyPatch) -> None:
    spend, order = clock(monkeypatch), []
    costs = {"a": iter((100.0, 3.0, 1.0, 2.0)), "b": iter((50.0, 7.0, 30.0, 8.0))}

    def call(name: str) -> Callable[[], None]:
        def run() -> None:
            order.append(name)
            spend(next(costs[name]))

        return run

    seen: list[tuple[int, int]] = []
    found = core_seconds([call("a"), call("b")], 3, lambda done, total: seen.append((done, total)))
    assert found == [2.0, 8.0]
    assert order == ["a", "b"] * 4
    assert seen == [(done, 8) for done in range(1, 9)]


def test_speeds_are_core_seconds_per_million_weights_of_both_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    spend = clock(monkeypatch)
    whole, fed = search._Fixture.whole, search._Fixture.fed

    def slow(real: Callable[..., object], seconds: float) -> Callable[..., object]:
        def run(*arguments: object) -> object:
            spend(seconds)
            return real(*arguments)

        return run

    monkeypatch.setattr(search._Fixture, "whole", slow(whole, 0.25))
    monkeypatch.setattr(search._Fixture, "fed", slow(fed, 2.0))
    found = measure_speeds(("qtip2-v4",), rows=2, width=64)
    (one,) = found.speeds
    assert (one.rung, one.geometry) == ("qtip2-v4", "K8V4L12")
    assert one.whole.seconds == pytest.approx(0.25 / 128 * 1e6)
    assert one.feedback.seconds == pytest.approx(2.0 / 128 * 1e6)
    assert (found.conditions.rows, found.conditions.width, found.conditions.rounds) == (2, 64, search.ROUNDS)


@pytest.mark.parametrize("name", ["qtip2-v4", "qtip4"])
def test_errors_are_those_of_the_streams_that_the_oracle_decodes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[np.ndarray] = []
    for method in ("whole", "fed"):
        real = getattr(search._Fixture, method)

        def keep(*arguments: object, real: Callable[..., np.ndarray] = real) -> np.ndarray:
            kept.append(real(*arguments))
            return kept[-1]

        monkeypatch.setattr(search._Fixture, method, keep)
    (one,) = measure_speeds((name,), rows=3, width=96).speeds
    wanted = rung(name)
    weights = np.random.default_rng(0).standard_normal((3, 96))
    errors = []
    for states in kept[-2:]:
        packed = pack_symbols(states >> (wanted.geometry.l - wanted.geometry.k), wanted.geometry)
        decoded = decode_rows(packed, wanted.geometry, wanted.codebook().values(wanted.geometry), np.ones(3, np.float32), 96)
        errors.append(((weights - decoded / wanted.gain) ** 2).sum() / (weights**2).sum())
    assert (one.whole.error, one.feedback.error) == pytest.approx(errors, rel=1e-5)
    assert one.ratio == one.feedback.error / one.whole.error >= 1.0


def test_all_rungs_are_measured_unless_some_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "RUNGS", {"qtip2-v4": None, "qtip4": None})
    assert [one.rung for one in measure_speeds(rows=1, width=32).speeds] == ["qtip2-v4", "qtip4"]
    assert [one.rung for one in measure_speeds(("qtip4",), rows=1, width=32).speeds] == ["qtip4"]


def test_a_longer_delay_has_less_error_until_it_hardly_matters() -> None:
    found = measure_windows(("qtip2-v4",), rows=32, width=256, delays=(0, 16, 32, 64)).windows
    assert [(one.geometry, one.commit, one.delay) for one in found] == [("K8V4L12", BLOCK, delay) for delay in (0, 16, 32, 64)]
    errors = [one.cost.error for one in found]
    assert errors == sorted(errors, reverse=True)
    assert len(set(errors)) == 4
    # The facts that the design was made from: no look-ahead costs 19 % at K8V4L12 and 16 columns 2 to 5 %.
    assert 1.10 < found[0].ratio < 1.25
    assert 1.0 < found[3].ratio < 1.02
    assert found[3].loss == 1.0
    assert found[0].loss > found[1].loss > 1.0
    assert all(one.cost.seconds > 0 for one in found)


def test_the_delay_of_a_bake_gives_the_very_streams_of_a_bake() -> None:
    fixture = search._fixture("qtip2-v4", 8, 128)
    geometry = Geometry(8, 4, 12)
    ours = search.feedback(np.eye(128), geometry)
    same = search.feedback(np.eye(128), geometry, delay=64)
    other = search.feedback(np.eye(128), geometry, delay=0)
    assert fixture.fed(ours).tolist() == fixture.fed(same).tolist() != fixture.fed(other).tolist()


def test_only_trellises_with_thousands_of_nodes_wait_for_96_columns() -> None:
    """A change moves the bytes of calibrated bakes, hence `provenance.FEEDBACK`."""
    waits = {rung.geometry.name: survivors.delay_of(rung.geometry) for rung in RUNGS.values()}
    assert waits == {"K4V2L16": 96} | dict.fromkeys(("K8V4L12", "K9V4L12", "K3V1L12", "K6V2L16", "K4V1L12", "K8V2L16"), 64)
    assert (survivors.delay_of(Geometry(4, 2, 15)), survivors.delay_of(Geometry(4, 2, 16))) == (64, 96)


@pytest.mark.parametrize("delay", [8, 24, -16, 1])
def test_a_delay_that_the_loops_cannot_take_is_refused(delay: int) -> None:
    with pytest.raises(ValueError, match=f"found {delay}$"):
        survivors.check_delay(delay)
    with pytest.raises(ValueError, match="a multiple of 16 columns"):
        survivors.feedback_kernel(Geometry(8, 4, 12), 1, delay)
    with pytest.raises(ValueError, match="a multiple of 16 columns"):
        search.feedback(np.eye(64), Geometry(8, 4, 12), delay=delay)


@pytest.mark.parametrize("rows", [0, -1, search.MOST_ROWS + 1])
def test_rows_that_are_none_or_too_many_are_refused(rows: int) -> None:
    with pytest.raises(UsageError, match=f"--rows: expected 1 to 16384, found {rows}"):
        measure_speeds(("qtip4",), rows=rows)


def test_rungs_are_named_with_commas() -> None:
    assert parse_rungs("qtip2-v4, qtip4,qtip2-v4,") == ("qtip2-v4", "qtip4")
    for wrong, words in (("qtip9", "unknown rung 'qtip9'"), ("", "--rungs: expected names"), (" , ", "--rungs: expected names")):
        with pytest.raises(UsageError, match=words):
            parse_rungs(wrong)


def test_json_and_table_have_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    found = measure_windows(("qtip4",), rows=2, width=32, delays=(16, 64))
    value = json.loads(json.dumps(found.to_json()))
    assert "rungs" not in value
    console = Console(width=200)
    console.print(speeds(found))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for one in value["windows"]:
        mark = ["*"] if one["delay"] == 64 else []
        figures = [f"{one['cost']['seconds']:.2f}", f"{one['cost']['error']:.4f}", f"{one['ratio']:.3f}", f"{one['loss']:.3f}"]
        assert ["qtip4", "K4V1L12", "16", str(one["delay"]), *mark, *figures] in lines
    assert str(plain(value["conditions"]["processor"])) in " ".join(lines[-1])


def test_the_curve_in_the_document_is_what_was_measured() -> None:
    value = json.loads(RESULTS.read_text())
    section = DOC.split("## Window and look-ahead")[1].split("\n## ")[0]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| K")]
    assert table == [
        [
            one["geometry"],
            str(one["delay"]),
            f"{one['cost']['seconds']:.2f}",
            f"{one['cost']['error']:.4f}",
            f"{one['ratio'] - 1:.1%}",
            f"{one['loss'] - 1:.1%}",
        ]
        for one in value["windows"]
    ]
    assert {one["geometry"] for one in value["windows"]} == {"K8V4L12", "K3V1L12", "K4V2L16"}
    assert value["conditions"]["rows"] >= 32
    assert value["conditions"]["processor"] in section
    assert f"a bake's delay is {DELAY} columns, {LONG_DELAY} at K4V2L16" in section
