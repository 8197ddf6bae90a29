"""Trains and writes the tables in `quant/tables/`: generalised Lloyd on the trellis with decaying noise.

Encode fresh Gaussian rows with the search, move every codeword to the (discounted) mean of the vectors that chose it, shake all
codewords by noise that decays to nothing over the first part of the run, and finish with plain Lloyd. Never sort a table: neighbouring
states share history, so their values must stay unrelated.

    python -m arctool.bake.search.codebook_training K8V4L12          # prints the error and the SHA-256 to pin in quant/codebooks.py
"""

from __future__ import annotations

import hashlib
import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from arctool.bake.search.viterbi import Searcher
from arctool.quant.bf16 import from_bf16, to_bf16
from arctool.quant.trellis import Geometry

log = logging.getLogger(__name__)

ROW = 4096
"""Weights of one training row: long enough that the fixed start state does not show."""


@dataclass(frozen=True)
class TrainingPlan:
    """One run. `rows` of 4096 weights a pass; noise falls linearly from `noise` to 0 over `noisy` passes; `memory` discounts old sums."""

    geometry: Geometry
    seed: int = 1
    start_scale: float = 1.05
    passes: int = 320
    noisy: int = 200
    rows: int = 384
    final_rows: int = 1024
    noise: float = 0.35
    memory: float = 0.3


PLANS: dict[str, TrainingPlan] = {
    name: TrainingPlan(Geometry.parse(name), start_scale=scale)
    for name, scale in (("K8V4L12", 1.05), ("K9V4L12", 1.07), ("K3V1L12", 1.1), ("K4V1L12", 1.1))
}


def gaussian_table(geometry: Geometry, seed: int, scale: float) -> NDArray[np.float32]:
    """Random normal codewords f32 [2^l, v]: the start of training, and itself the table of K4V2L16, which training does not improve."""
    generator = np.random.Generator(np.random.PCG64(seed))
    return (generator.standard_normal((geometry.states, geometry.v)) * scale).astype(np.float32)


def encode(table: NDArray[np.float32], geometry: Geometry, rows: NDArray[np.float32], jobs: int) -> NDArray[np.int32]:
    """States [rows, steps] of every row, the rows shared out over `jobs` threads."""
    searcher = Searcher(geometry, table)
    with ThreadPoolExecutor(jobs) as pool:
        return np.concatenate(list(pool.map(searcher.search, np.array_split(rows, 4 * jobs))))


def train(plan: TrainingPlan, jobs: int) -> NDArray[np.float32]:
    """The trained codewords f32 [2^l, v] before rounding to bf16."""
    geometry = plan.geometry
    generator = np.random.Generator(np.random.PCG64([plan.seed, 1]))
    table = gaussian_table(geometry, plan.seed, plan.start_scale)
    sums, counts = np.zeros((geometry.states, geometry.v)), np.zeros(geometry.states)
    for index in range(plan.passes):
        settled = index >= plan.noisy
        memory = 0.0 if index == plan.passes - 1 else plan.memory
        rows = generator.standard_normal((plan.final_rows if settled else plan.rows, ROW)).astype(np.float32)
        states = encode(table, geometry, rows, jobs)
        vectors = rows.reshape(-1, geometry.v)
        error = float(((vectors - table[states.reshape(-1)]) ** 2).mean())
        sums, counts = memory * sums, memory * counts
        np.add.at(sums, states.reshape(-1), vectors)
        counts += np.bincount(states.reshape(-1), minlength=geometry.states)
        used = counts >= 3
        table[used] = sums[used] / counts[used, None]
        table[~used] = vectors[generator.integers(0, len(vectors), int((~used).sum()))]
        if not settled:
            spread = plan.noise * (1 - index / plan.noisy)
            table += (generator.standard_normal(table.shape) * spread).astype(np.float32)
        log.info("%s pass %d: error %.5f", geometry.name, index, error)
    return table


TABLES = Path(__file__).parents[1] / "quant" / "tables"


def main(names: list[str], jobs: int = 2, folder: Path = TABLES) -> None:
    """Write the named tables (all of them by default) into `folder`."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for name in names or [*PLANS, "K4V2L16"]:
        if name == "K4V2L16":
            data = gaussian_table(Geometry.parse(name), 1, 1.0).astype("<f4").tobytes()
        else:
            table = train(PLANS[name], jobs)
            rounded = from_bf16(to_bf16(table))
            rows = np.random.Generator(np.random.PCG64(99)).standard_normal((128, ROW)).astype(np.float32)
            decoded = rounded[encode(rounded, PLANS[name].geometry, rows, jobs)].reshape(rows.shape)
            log.info("%s held-out error %.5f, rms %.4f", name, ((rows - decoded) ** 2).mean(), np.sqrt((rounded**2).mean()))
            data = to_bf16(table).astype("<u2").tobytes()
        file = folder / f"{name.lower()}.bin"
        file.write_bytes(data)
        log.info("%s sha256 %s", file.name, hashlib.sha256(data).hexdigest())


if __name__ == "__main__":
    main(sys.argv[1:])
