"""What the penalties must know of a sequence: how often each token stands in its output, and which stand in its prompt.

It lives with the sequence, so it moves with the row and cannot meet another's. A token costs O(1), in either direction.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class History:
    """Counts of one sequence's tokens as arrays that the kernel can read, one entry for each different token."""

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        prompt = np.unique(np.fromiter(prompt_ids, np.int64))
        self._slots = {int(token): slot for slot, token in enumerate(prompt)}
        self._ids = prompt
        self._counts = np.zeros(len(prompt), np.int64)
        self._in_prompt = np.ones(len(prompt), np.bool_)

    def push(self, token: int) -> None:
        """`token` joined the output."""
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._grow()
        self._ids[slot] = token
        self._counts[slot] += 1

    def pop(self, token: int) -> None:
        """`token` left the output again (a speculation that failed)."""
        slot = self._slots.get(token, -1)
        if slot < 0 or self._counts[slot] == 0:
            raise ValueError(f"token {token} is not in the output")
        self._counts[slot] -= 1

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Token ids, how often each is in the output, whether it is in the prompt. Views: valid until the next change."""
        used = len(self._slots)
        return self._ids[:used], self._counts[:used], self._in_prompt[:used]

    def _grow(self) -> None:
        # Doubling keeps the cost of a token constant.
        more = max(len(self._ids), 16)
        self._ids = np.concatenate([self._ids, np.zeros(more, np.int64)])
        self._counts = np.concatenate([self._counts, np.zeros(more, np.int64)])
        self._in_prompt = np.concatenate([self._in_prompt, np.zeros(more, np.bool_)])
