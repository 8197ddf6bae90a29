"""`arctool doctor`: what this machine can do, what it lacks, and whether the parts that ship are whole."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numba
import torch
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

import arctool
from arctool.bake.choices import CHOICES
from arctool.errors import ArctoolError
from arctool.kernels.cpu.jit import cache_directory
from arctool.kernels.registry import Implementation, default_registry
from arctool.quant.codebooks import SHIPPED_TABLES, shipped_table
from arctool.terminal.tables import plain

PACKAGES = ("torch", "numba", "numpy", "safetensors", "tokenizers", "huggingface_hub", "gguf")


@dataclass(frozen=True)
class Check:
    """One line: `ok` is False only for something that will fail; a missing GPU is no failure."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class Diagnosis:
    """Everything the doctor found. `rungs`: what `--isq` accepts."""

    checks: tuple[Check, ...]
    rungs: tuple[str, ...]
    implementations: tuple[Implementation, ...]

    @property
    def healthy(self) -> bool:
        return all(check.ok for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        return {"healthy": self.healthy, **asdict(self)}


def diagnose() -> Diagnosis:
    """Look at interpreter, packages, processor, memory, compile cache, tables and devices."""
    checks = [
        Check("arctool", True, f"{arctool.__version__}, Python {sys.version.split()[0]} on {platform.platform()}"),
        Check("packages", True, ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)),
        Check("processor", True, f"{os.cpu_count()} cores, {numba.get_num_threads()} used by kernels, {_features()}"),
        Check("memory", True, f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.1f} GB"),
        _compile_cache(),
        *(_table(name) for name in SHIPPED_TABLES),
        _gpu(),
    ]
    return Diagnosis(tuple(checks), CHOICES, default_registry().implementations)


def _features() -> str:
    known = torch.backends.cpu.get_cpu_capability()
    return f"vector unit {known}"


def _compile_cache() -> Check:
    try:
        path = cache_directory()
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        return Check("compile cache", True, f"none ({error}): kernels are compiled anew at each start")
    detail = str(path) if os.access(path, os.W_OK) else f"{path} cannot be written: kernels are compiled anew at each start"
    return Check("compile cache", True, detail)


def _table(name: str) -> Check:
    try:
        return Check(f"table {name}", True, f"SHA-256 {shipped_table(name).digest[:16]}… as pinned")
    except (ArctoolError, OSError) as error:
        return Check(f"table {name}", False, str(error))


def _gpu() -> Check:
    if torch.cuda.is_available():
        return Check("GPU", True, f"{torch.cuda.get_device_name()}; this version runs on the CPU only")
    return Check("GPU", True, "none; everything runs on the CPU")


def _but_for_its_name(item: Implementation) -> tuple[str, str, str, str]:
    return item.operation, item.backend, item.accepts, item.unavailable


def _names(names: list[str]) -> str:
    """Names of kernels that differ only in the kind of weight that they take: `cpu.linear.{fp8, afq}`."""
    stems = {name.rpartition(".")[0] for name in names}
    if len(names) == 1 or len(stems) > 1:
        return ", ".join(names)
    return f"{stems.pop()}.{{{', '.join(name.rpartition('.')[2] for name in names)}}}"


def diagnosis(found: Diagnosis) -> RenderableType:
    """The findings as tables."""
    checks = Table(box=None, show_header=False)
    for check in found.checks:
        checks.add_row(Text("✓" if check.ok else "✗", "green" if check.ok else "bold red"), plain(check.name, "bold"), plain(check.detail))
    kernels = Table(Column("kernel", overflow="fold"), "operation", "backend", "accepts", "", box=None, title="kernels")
    for (operation, backend, accepts, unavailable), items in groupby(found.implementations, _but_for_its_name):
        state = Text("ready", "green") if not unavailable else plain(unavailable, "dim")
        kernels.add_row(*map(plain, (_names([item.name for item in items]), operation, backend, accepts)), state)
    return Group(checks, Text(f"rungs: {', '.join(found.rungs)}"), Text(), kernels)
