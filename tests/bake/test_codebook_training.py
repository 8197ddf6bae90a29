"""The training of the tables in miniature: deterministic, blind to threads, better than where it started."""

from __future__ import annotations

import hashlib

import numpy as np

from arctool.bake.search.codebook_training import PLANS, TrainingPlan, encode, gaussian_table, train
from arctool.quant.codebooks import SHIPPED_TABLES
from arctool.quant.trellis import Geometry

MINIATURE = TrainingPlan(Geometry(4, 2, 8), passes=12, noisy=6, rows=8, final_rows=32)


def test_training_is_a_function_of_its_plan_whatever_the_threads() -> None:
    first, second = train(MINIATURE, 1), train(MINIATURE, 2)
    np.testing.assert_array_equal(first, second)
    assert not np.array_equal(first, train(TrainingPlan(Geometry(4, 2, 8), seed=2, passes=12, noisy=6, rows=8, final_rows=32), 1))


def test_a_trained_table_codes_fresh_rows_better_than_the_random_one_that_it_grew_from() -> None:
    geometry = MINIATURE.geometry
    rows = np.random.default_rng(7).standard_normal((8, 4096)).astype(np.float32)
    errors = []
    for table in (gaussian_table(geometry, MINIATURE.seed, MINIATURE.start_scale), train(MINIATURE, 1)):
        errors.append(float(((table[encode(table, geometry, rows, 1)].reshape(rows.shape) - rows) ** 2).mean()))
    assert errors[1] < 0.95 * errors[0]


def test_every_shipped_table_has_a_recipe_and_the_random_one_is_remade_bit_for_bit() -> None:
    assert set(PLANS) | {"K4V2L16"} == set(SHIPPED_TABLES)
    data = gaussian_table(Geometry.parse("K4V2L16"), 1, 1.0).astype("<f4").tobytes()
    assert hashlib.sha256(data).hexdigest() == SHIPPED_TABLES["K4V2L16"].sha256
