"""The tests beside this file are skipped where mistral.rs has no wheel; this one is not, and sees to it that they run where it has."""

from __future__ import annotations

import importlib.util
import platform
import sys


def test_where_the_wheel_exists_it_is_installed() -> None:
    wheel = sys.platform == "linux" and platform.machine() == "x86_64"
    assert not wheel or importlib.util.find_spec("mistralrs") is not None, "pip install mistralrs: `make setup` does"
