"""How much a model is to think before it answers: a wish of the request, granted by variables of its chat template, or refused."""

from __future__ import annotations

from arctool.serve.problems import Problem
from arctool.serve.talk import Talk

SWITCH, EFFORT = "enable_thinking", "reasoning_effort"
"""What templates call it: whether to think at all (Qwen3 and its kin), and how much (gpt-oss)."""


def switched(talk: Talk, on: bool, field: str) -> dict[str, bool]:
    """Variables that switch thinking on or off; a model that does not think is off. Raises Problem, by `field`, without a switch."""
    if talk.reads(SWITCH):
        return {SWITCH: on}
    if not on and not talk.thinks:
        return {}
    raise Problem(400, f"{field}: this model's chat template has no switch for thinking ({SWITCH}); leave it out", param=field)


def strengthened(talk: Talk, effort: str, field: str) -> dict[str, str | bool]:
    """Variables for an effort; "none" is also what a switch can do. Raises Problem, by `field`, where the template knows none."""
    if talk.reads(EFFORT):
        return {EFFORT: effort}
    if effort == "none" and (talk.reads(SWITCH) or not talk.thinks):
        return {**switched(talk, False, field)}
    raise Problem(400, f"{field}: this model's chat template knows no such effort ({EFFORT}); leave it out", param=field)
