"""What a family of layers is to the container: a tag, the entries that its layers have, and how they become a weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from arctool.quant.codebooks import Codebook
from arctool.quant.tensor import Weight
from arctool.uqff.entries import Entry
from arctool.uqff.sections import TableRef

TablePool = Callable[[TableRef], Codebook]
"""Finds the table of a digest in the artifact and checks it; raises FormatError where it is missing or altered."""

Parts = Mapping[str, Entry]
"""The entries of a layer's weight by suffix: "" is `<key>.weight` itself."""


@dataclass(frozen=True)
class Family:
    """`required`, `optional`: suffixes that `<key>.weight` must and may have. `decode`: (parts, tables, where) → the weight.

    `decode` checks types, shapes and lengths, and reads no more than the small entries that say them.
    """

    name: str
    required: frozenset[str]
    optional: frozenset[str]
    decode: Callable[[Parts, TablePool, str], Weight]
