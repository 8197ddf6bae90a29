"""One layer under one Hessian: the identity behind error feedback, what it is worth, when it is given up, and that sizes do not matter."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from arctool.bake.search.ldlq import GAIN_FACTORS, Method, damped, factor, feed_layer, feedback, rotate_hessian
from arctool.bake.search.rounding import RoundedLayer, RungTools, round_layer
from arctool.errors import SourceError
from arctool.quant.codebooks import RUNGS
from arctool.quant.hadamard import Rotation
from arctool.quant.trellis import Geometry, decode_rows

Matrix = NDArray[np.float64]

UNIT = 2.0**-24
"""Half a unit in the last place of an f32."""

TOOLS = {name: RungTools.of(RUNGS[name]) for name in ("qtip2-v4", "qtip2", "qtip4")}


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


@dataclass(frozen=True)
class Layer:
    """A weight f32 [out, in], a Hessian f32 [in, in], the rotation of both."""

    weight: NDArray[np.float32]
    hessian: NDArray[np.float32]
    rotation: Rotation

    def feed(self, name: str, pool: ThreadPoolExecutor, method: Method | None = None) -> RoundedLayer:
        return feed_layer(self.weight, self.hessian, "a.b", TOOLS[name], self.rotation, pool, *([] if method is None else [method]))

    def round(self, name: str, pool: ThreadPoolExecutor) -> RoundedLayer:
        return round_layer(self.weight, "a.b", TOOLS[name], self.rotation, pool)

    def damped(self) -> Matrix:
        """H in the basis of the rows by an explicit matrix, its mean diagonal's hundredth added."""
        size = self.rotation.block_in
        block = np.array([[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]) / np.sqrt(size)
        turn = np.kron(np.eye(len(self.hessian) // size), block) * self.rotation.signs_in
        whole = turn @ self.hessian.astype(np.float64) @ turn.T
        return np.asarray(whole + 0.01 * np.eye(len(whole)) * np.diag(whole).mean())

    def errors(self, layer: RoundedLayer) -> Matrix:
        """Rotated weights less what the file holds, f64 [out, in]."""
        t = layer.tensor
        stored = decode_rows(t.packed, t.geometry, t.codebook.values(t.geometry), t.scales, t.in_features)
        return np.asarray(self.rotation.rotate(self.weight).astype(np.float64) - stored)


def quadratic(errors: Matrix, hessian: Matrix) -> float:
    """tr(E H Eᵀ)."""
    return float(np.einsum("ri,ij,rj->", errors, hessian, errors))


def layer(outputs: int, inputs: int, hessian: Matrix | None = None, seed: int = 0) -> Layer:
    generator = np.random.default_rng([seed, outputs, inputs])
    weight = generator.standard_normal((outputs, inputs)).astype(np.float32)
    made = correlated(inputs, generator) if hessian is None else hessian
    return Layer(weight, made.astype(np.float32), Rotation.seeded(seed, "a.b", outputs, inputs))


def correlated(inputs: int, generator: np.random.Generator) -> Matrix:
    """Second moments as layers have them: a few directions hold most, and some features are louder than others."""
    mixed = generator.standard_normal((4 * inputs, inputs)) @ (generator.standard_normal((inputs, inputs)) * np.geomspace(3, 0.05, inputs))
    mixed *= np.exp(generator.standard_normal(inputs) / 2)
    return np.asarray(mixed.T @ mixed / len(mixed))


def kinds(inputs: int) -> dict[str, Matrix]:
    generator = np.random.default_rng(inputs)
    loud = generator.standard_normal(inputs)
    basis = np.linalg.qr(generator.standard_normal((inputs, inputs)))[0]
    one = np.zeros(inputs)
    one[3] = 1e3
    return {
        "random": correlated(inputs, generator),
        "identity": np.eye(inputs),
        "rank 1": np.outer(loud, loud),
        "nearly singular": (basis * np.logspace(0, -12, inputs)) @ basis.T,
        "huge range": np.diag(np.logspace(-18, 18, inputs)),
        "one loud channel": np.eye(inputs) * 1e-6 + np.outer(one, one),
    }


@pytest.mark.parametrize("step", [1, 2, 4, 16])
def test_h_is_m_d_mt_with_m_block_unit_upper_and_d_positive(step: int) -> None:
    whole = correlated(48, np.random.default_rng(1))
    unit, blocks = factor(whole.copy(), step)
    assert (unit.dtype, unit.shape, blocks.shape) == (np.float32, (48, 48), (48 // step, step, step))
    wide = unit.astype(np.float64)
    for t in range(48 // step):
        at = slice(t * step, t * step + step)
        assert not wide[at.stop :, at].any()
        np.testing.assert_allclose(wide[at, at], np.eye(step), atol=1e-12)
        np.testing.assert_array_equal(blocks[t], blocks[t].T)
        assert np.linalg.eigvalsh(blocks[t])[0] > 0
    middle = np.zeros((48, 48))
    for t in range(48 // step):
        middle[t * step : t * step + step, t * step : t * step + step] = blocks[t]
    # M is rounded once to f32 on either side; what f64 adds is far smaller.
    bound = 2.1 * UNIT * np.abs(wide) @ np.abs(middle) @ np.abs(wide).T
    assert (np.abs(wide @ middle @ wide.T - whole) <= bound).all()
    assert np.abs(np.triu(wide, step)).max() > 0.1, "the fixture must have something to feed back"


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_a_matrix_that_is_not_positive_definite_has_no_factor(bad: float) -> None:
    whole = np.eye(8)
    whole[5, 5] = bad
    with pytest.raises(ValueError, match="not positive definite"):
        factor(whole, 2)


@pytest.mark.parametrize("name", list(TOOLS))
def test_the_loss_is_the_sum_of_the_steps_losses_behind_their_feedback(name: str, pool: ThreadPoolExecutor) -> None:
    """tr(E H Eᵀ) = Σ_t η_t D_t η_tᵀ with η_t = e_t + Σ_{i<t} e_i M_{i,t}, for the errors of what is stored."""
    given, v = layer(70, 64), RUNGS[name].geometry.v
    fed = given.feed(name, pool)
    assert fed.note is None
    errors, whole = given.errors(fed), given.damped()
    unit, blocks = factor(whole.copy(), v)
    total, bound = 0.0, 0.0
    for t in range(64 // v):
        at = slice(t * v, t * v + v)
        eta = errors[:, at] + errors[:, : at.start] @ unit[: at.start, at].astype(np.float64)
        total += float(np.einsum("ra,ab,rb->", eta, blocks[t], eta))
        most = np.abs(errors[:, : at.stop]) @ np.abs(unit[: at.stop, at]).astype(np.float64)
        bound += 2.1 * UNIT * float(np.einsum("ra,ab,rb->", most, np.abs(blocks[t]), most))
    loss = quadratic(errors, whole)
    assert abs(total - loss) <= bound < 1e-3 * loss
    # What the layer reports was computed from sums of 64 f32 products.
    assert fed.proxy_error is not None
    power = quadratic(given.rotation.rotate(given.weight).astype(np.float64), whole)
    slack = 66 * UNIT * quadratic(np.abs(errors), np.abs(whole))
    assert abs(fed.proxy_error * power - loss) <= slack + 66 * UNIT * loss < 0.05 * loss


@pytest.mark.parametrize("name", list(TOOLS))
def test_feedback_is_worth_having(name: str, pool: ThreadPoolExecutor) -> None:
    given = layer(70, 64)
    fed, rounded = (quadratic(given.errors(found), given.damped()) for found in (given.feed(name, pool), given.round(name, pool)))
    assert fed < 0.5 * rounded


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shape", [(1, 64), (5, 36), (66, 32)], ids=str)
@pytest.mark.parametrize("kind", list(kinds(32)))
def test_it_never_does_worse_than_rounding(kind: str, shape: tuple[int, int], pool: ThreadPoolExecutor) -> None:
    """Of the single rows, those of seed 4 at one loud channel and 6 at rank 1 are ones where rounding wins by chance."""
    for seed in (0, 4, 6) if shape[0] < 66 else (0,):
        given = layer(*shape, kinds(shape[1])[kind], seed)
        for name in ("qtip2-v4", "qtip4"):
            fed, rounded = given.feed(name, pool), given.round(name, pool)
            losses = [quadratic(given.errors(found), given.damped()) for found in (fed, rounded)]
            assert losses[0] <= losses[1] * (1 + 1e-5)
            if fed.note is not None:
                assert fed.note.startswith("rounded without feedback, which would lose ")
                assert fed.tensor.packed.tobytes() == rounded.tensor.packed.tobytes()


@pytest.mark.parametrize("outputs", [64, 200])
def test_weights_that_lie_on_a_rungs_own_grid_are_rounded(outputs: int, pool: ThreadPoolExecutor) -> None:
    """What another bake stored can be stored again as it is, while feedback would move it off its grid. 200 rows: it shows on a sample."""
    given = layer(outputs, 128)
    stored = given.round("qtip4", pool)
    again = Layer(stored.tensor.dense(), given.hessian, given.rotation)
    fed, rounded = again.feed("qtip4", pool), again.round("qtip4", pool)
    assert quadratic(again.errors(rounded), again.damped()) < 1e-6 * quadratic(given.errors(stored), given.damped())
    assert fed.tensor.packed.tobytes() == rounded.tensor.packed.tobytes()
    assert fed.note is not None


def test_where_nothing_can_be_fed_back_a_layer_is_rounded_and_says_so(pool: ThreadPoolExecutor) -> None:
    given = layer(66, 64, np.eye(64))
    fed, rounded = given.feed("qtip2-v4", pool), given.round("qtip2-v4", pool)
    assert fed.note is not None
    assert fed.note.startswith("rounded without feedback, which would lose 0.")
    assert fed.tensor.packed.tobytes() == rounded.tensor.packed.tobytes()
    assert fed.tensor.scales.tobytes() == rounded.tensor.scales.tobytes()
    assert fed.proxy_error == pytest.approx(fed.relative_error, rel=1e-5)


def indefinite() -> Matrix:
    whole = np.eye(64)
    whole[0, 1] = whole[1, 0] = 5
    return whole


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("whole", "reason"),
    [
        (np.full((64, 64), np.nan), "the second moments of its inputs are useless (mean square nan)"),
        (np.full((64, 64), np.inf), "the second moments of its inputs are useless (mean square nan)"),
        (np.zeros((64, 64)), "the second moments of its inputs are useless (mean square 0)"),
        (-np.eye(64), "the second moments of its inputs are useless (mean square -1)"),
        (indefinite(), "its Hessian is not positive definite, even with 100% of its mean diagonal added"),
    ],
    ids=["NaN", "infinite", "zero", "negative", "indefinite"],
)
def test_a_hessian_that_is_of_no_use_is_named_and_the_layer_is_rounded(whole: Matrix, reason: str, pool: ThreadPoolExecutor) -> None:
    given = layer(5, 64, whole)
    fed, rounded = given.feed("qtip4", pool), given.round("qtip4", pool)
    assert fed.note == f"rounded without feedback: {reason}"
    assert fed.proxy_error is None
    assert fed.tensor.packed.tobytes() == rounded.tensor.packed.tobytes()
    assert fed.tensor.scales.tobytes() == rounded.tensor.scales.tobytes()


def test_more_damping_is_tried_before_a_hessian_is_given_up() -> None:
    whole = np.eye(8)
    whole[0, 1] = whole[1, 0] = 1.05
    damped(whole, Geometry.parse("K4V1L12"), 0.01)
    np.testing.assert_allclose(np.diag(whole), whole[0, 1] / 1.05 * (1 + 10 * 0.01), rtol=1e-12)


def test_a_row_of_zeros_gets_the_scale_0_and_disturbs_no_other(pool: ThreadPoolExecutor) -> None:
    given = layer(7, 64)
    given.weight[2] = 0
    for name in TOOLS:
        fed = given.feed(name, pool)
        assert (fed.tensor.scales == 0).tolist() == [row == 2 for row in range(7)]
        assert not fed.tensor.dense()[2].any()


@pytest.mark.filterwarnings("error")
def test_a_layer_of_zeros_stays_one(pool: ThreadPoolExecutor) -> None:
    given = layer(4, 64)
    given.weight[:] = 0
    fed = given.feed("qtip4", pool)
    assert (fed.proxy_error, fed.relative_error, fed.note) == (0, 0, None)
    assert not fed.tensor.dense().any()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["qtip2-v4", "qtip4"])
def test_powers_of_two_in_weights_or_inputs_move_exponents_only(name: str, pool: ThreadPoolExecutor) -> None:
    """Up to where f32 ends: their product, its square and their sums must not meet it on the way."""
    given = layer(8, 64)
    plain = given.feed(name, pool)
    for weights in (-90, 0, 60, 99, 120):
        for inputs in (-60, 0, 60, 110):
            scaled = Layer(np.ldexp(given.weight / 4, weights), np.ldexp(given.hessian / 64, inputs), given.rotation)
            fed = scaled.feed(name, pool)
            np.testing.assert_array_equal(fed.tensor.packed, plain.tensor.packed)
            np.testing.assert_array_equal(fed.tensor.scales, np.ldexp(plain.tensor.scales, weights - 2))
            assert fed.proxy_error == pytest.approx(plain.proxy_error, rel=1e-6)


@pytest.mark.filterwarnings("error")
def test_a_layer_that_f32_cannot_hold_is_refused_by_name(pool: ThreadPoolExecutor) -> None:
    given = layer(64, 64)
    given.weight[:] = np.finfo(np.float32).max
    with pytest.raises(SourceError, match=r"^a\.b\.weight: holds values up to 3\.4e\+38"):
        given.feed("qtip4", pool)


@pytest.mark.parametrize("name", ["qtip2-v4", "qtip2"])
def test_any_number_of_threads_gives_the_same_bytes(name: str) -> None:
    given = layer(70, 64)
    found = []
    for jobs in (1, 2, 5):
        with ThreadPoolExecutor(jobs) as pool:
            fed = given.feed(name, pool)
        found.append((fed.tensor.packed.tobytes(), fed.tensor.scales.tobytes(), fed.proxy_error, fed.relative_error))
    assert found[0] == found[1] == found[2]


def test_a_rows_scale_is_the_one_that_loses_least_under_the_hessian(pool: ThreadPoolExecutor) -> None:
    given = layer(70, 64)
    fed = given.feed("qtip2-v4", pool)
    errors, whole = given.errors(fed), given.damped()
    stored = given.rotation.rotate(given.weight) - errors

    def losses(off: float) -> Matrix:
        gap = errors - off * stored
        return np.asarray(np.einsum("ri,ij,rj->r", gap, whole, gap))

    assert (losses(0) <= np.minimum(losses(1e-3), losses(-1e-3))).all()


def test_every_row_keeps_the_best_of_the_gains_that_are_tried(pool: ThreadPoolExecutor) -> None:
    given = layer(70, 64)

    def losses(gains: tuple[float, ...]) -> Matrix:
        fed = given.feed("qtip2-v4", pool, Method(gains=gains))
        assert fed.note is None
        errors = given.errors(fed)
        return np.asarray(np.einsum("ri,ij,rj->r", errors, given.damped(), errors))

    tried = np.stack([losses((gain,)) for gain in GAIN_FACTORS])
    np.testing.assert_allclose(losses(GAIN_FACTORS), tried.min(axis=0), rtol=1e-4)
    assert len(set(tried.argmin(axis=0))) == len(GAIN_FACTORS), "the fixture must have rows that want different gains"


def test_feedback_from_whole_blocks_only_is_there_to_be_compared_with_and_is_worse(pool: ThreadPoolExecutor) -> None:
    given = layer(70, 64)
    whole = given.damped()
    blocks = feedback(whole, RUNGS["qtip2-v4"].geometry, blocks=True)
    inside = np.kron(np.eye(4), np.ones((16, 16))) > 0
    np.testing.assert_allclose(blocks.far[inside], np.eye(64)[inside], atol=1e-12)
    fed, published = (
        quadratic(given.errors(given.feed("qtip2-v4", pool, Method(gains=(1.0,), refit=False, blocks=found))), whole)
        for found in (False, True)
    )
    assert fed < 0.9 * published


def test_without_a_refit_the_scale_is_that_of_the_search(pool: ThreadPoolExecutor) -> None:
    given = layer(70, 64)
    fed = given.feed("qtip4", pool, Method(gains=(0.9,), refit=False))
    rows = given.rotation.rotate(given.weight).astype(np.float64)
    np.testing.assert_allclose(fed.tensor.scales, np.sqrt((rows**2).mean(axis=1)) / (0.9 * RUNGS["qtip4"].gain), rtol=1e-6)


def test_a_target_is_searched_for_in_place_of_the_weight_to_which_the_error_still_refers(pool: ThreadPoolExecutor) -> None:
    given = layer(70, 64)
    noise = np.random.default_rng(8).standard_normal(given.weight.shape).astype(np.float32)
    aimed = Layer(given.weight + np.float32(0.2) * noise, given.hessian, given.rotation)
    fed = feed_layer(given.weight, given.hessian, "a.b", TOOLS["qtip4"], given.rotation, pool, target=aimed.weight)
    wanted = aimed.feed("qtip4", pool)
    assert fed.tensor.packed.tobytes() == wanted.tensor.packed.tobytes()
    assert (fed.proxy_error, fed.note) == (wanted.proxy_error, wanted.note)
    gap = (given.errors(fed) ** 2).sum() / (given.weight.astype(np.float64) ** 2).sum()
    assert fed.relative_error == pytest.approx(gap, rel=1e-5)
    assert fed.relative_error > 3 * wanted.relative_error


def test_a_rotated_hessian_is_that_of_the_rotated_inputs() -> None:
    """Two blocks of 16, signs on both sides; against the inputs themselves, turned as the engine turns them."""
    generator = np.random.default_rng(5)
    inputs = generator.standard_normal((300, 48)).astype(np.float32) * np.geomspace(1, 30, 48, dtype=np.float32)
    rotation = Rotation.seeded(1, "a.b", 8, 48)
    assert (rotation.block_in, set(rotation.signs_in.tolist())) == (16, {1, -1})
    turned = rotation.rotate_input(inputs).astype(np.float64)
    hessian = (inputs.astype(np.float64).T @ inputs / 300).astype(np.float32)
    found = rotate_hessian(hessian, rotation)
    np.testing.assert_allclose(found, turned.T @ turned / 300, rtol=0, atol=1e-6 * np.abs(hessian).max())
    given = Layer(np.zeros((8, 48), np.float32), hessian, rotation)
    explicit = given.damped() - 0.01 * np.eye(48) * np.trace(hessian.astype(np.float64)) / 48
    np.testing.assert_allclose(found, explicit, rtol=0, atol=1e-12 * np.abs(explicit).max())
