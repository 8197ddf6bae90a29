"""Fixtures of the server's tests: one thread for every kernel."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def _one_thread(one_thread: None) -> None:
    """For every test of this room."""
