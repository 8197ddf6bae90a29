"""Speed of the matrix-vector kernels on this machine, rung by rung. (`arctool bench bake` measures the searches.)

    python -m arctool.bench.kernels          # or: make bench

Each figure is the median of interleaved rounds on one run, so a busy neighbour shifts all rows alike; the engagement counters of the
registry prove which kernel served. Quote ratios, and say what else ran.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from arctool.kernels.registry import Registry, default_registry
from arctool.quant.codebooks import RUNGS, Rung
from arctool.quant.tensor import TrellisTensor
from arctool.quant.trellis import pack_symbols

ROUNDS = 5
SHAPES = ((4096, 4096), (1536, 576), (576, 1536))
"""A square layer of an 8B model, and SmolLM2's two MLP shapes."""


def seconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def product_row(rung: Rung, shape: tuple[int, int], registry: Registry) -> Callable[[], object]:
    """One fused product with a single token, rotation left out: the matrix-vector kernel alone."""
    out_features, in_features = shape
    symbols = np.random.default_rng(1).integers(0, 1 << rung.geometry.k, (out_features, in_features // rung.geometry.v))
    weight = registry.prepare(
        TrellisTensor(
            rung.geometry,
            rung.codebook(),
            in_features,
            pack_symbols(symbols, rung.geometry),
            np.ones(out_features, np.float32),
            None,
        )
    )
    x = torch.ones((1, in_features))
    return lambda: registry.linear(x, weight)


def medians(calls: list[Callable[[], object]]) -> list[float]:
    """Median seconds of each call over interleaved rounds, after one round that compiles."""
    for call in calls:
        call()
    rounds = [[seconds(call) for call in calls] for _ in range(ROUNDS)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def main() -> None:
    """Print the table."""
    console, registry, rungs = Console(), default_registry(), list(RUNGS.values())
    console.print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before the run")
    products = Table("rung", *(f"{out}×{width}" for out, width in SHAPES), title="fused product, 10⁹ weights/s, all cores", box=None)
    took_by_shape = [medians([product_row(rung, shape, registry) for rung in rungs]) for shape in SHAPES]
    for index, rung in enumerate(rungs):
        rates = (shape[0] * shape[1] / took[index] / 1e9 for shape, took in zip(SHAPES, took_by_shape, strict=True))
        products.add_row(rung.name, *(f"{rate:.2f}" for rate in rates))
    console.print(products)
    console.print(f"engaged: {dict(registry.engagement())}; load {os.getloadavg()[0]:.1f} after the run")


if __name__ == "__main__":
    main()
