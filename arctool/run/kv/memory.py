"""Amounts of memory as people write them."""

from __future__ import annotations

import re

from arctool.errors import UsageError

UNITS = {"": 1, "b": 1}
UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)}
UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)}


def parse_memory(value: int | str, option: str) -> int:
    """Bytes of "2GiB", "512 MB", "1.5GiB" or "1000"; a number stays as it is. Raises UsageError, which names `option`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    found = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([a-z]*)\s*", value, re.IGNORECASE) if isinstance(value, str) else None
    if found is None or found[2].lower() not in UNITS:
        raise UsageError(f"{option}: expected bytes like 512MB or 2GiB, found {value!r:.40}")
    return int(float(found[1]) * UNITS[found[2].lower()])
