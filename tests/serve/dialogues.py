"""What the tests of the newer protocols talk about: one model that calls tools, thinks, and answers by what it is asked."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call them as <tool_call></tool_call>.<|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% if reasoning_effort is defined %}effort {{ reasoning_effort }}
{% endif %}{% endif %}"""
"""In the manner of Hermes and Qwen3."""

PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
"""Knows neither tools nor thinking."""


def call(name: str, **arguments: Any) -> str:
    """A call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


REPLIES = {
    "19 degrees": "Mild in Paris.",
    "Error: no such town": "I do not know that town.",
    "both towns": f"I look twice.\n{call('weather', town='Paris')}\n{call('weather', town='Oslo')}",
    "a bad call": '<tool_call>\n{"name": "weather", "arguments": {"town": "Paris", "days": oops}}\n</tool_call>',
    "which town": call("weather", town="Rome"),
    "the weather": f"I look.\n{call('weather', town='Paris', days=[1, 2])}",
    "think hard": "<think>\nSix times seven.\n</think>\n\nForty-two.",
    "numbers": "one two three four five six",
    "as JSON": '{"answer": 42, "sure": true}',
    "hello": "Good day, wörld 🎉.",
    "without end": "word " * 3000,
    "": "Pardon?",
}

TOWN = {"type": "object", "properties": {"town": {"enum": ["Paris", "Oslo"]}}, "required": ["town"], "additionalProperties": False}


def post(url: str, body: Any, **headers: str) -> bytes:
    """The raw answer, for what clients do not show of it."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: bytes = answer.read()
    return found


def events_of(raw: bytes) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream: name and data of each. Nothing else may be in it."""
    found = []
    for frame in raw.decode().removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        assert name.startswith("event: ")
        assert data.startswith("data: ")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found
