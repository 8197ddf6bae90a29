"""What the bodies of all endpoints share: strictness, sampling fields, formats of the answer, and their translation for the engine."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator

from arctool.errors import RequestError
from arctool.run.sampling.constraint import Constraint
from arctool.run.sampling.params import MAX_CACHE_SALT, MAX_N, MAX_PENALTY, MAX_TEMPERATURE, SamplingParams
from arctool.serve.problems import Problem, of_request

MAX_FIELDS = 100
MAX_STOP_TOKENS = 1024
MAX_BIASES = 1 << 18
"""As many tokens as the largest vocabularies have."""
MAX_METADATA = 64
MAX_TIMEOUT = 1_000_000
MAX_MESSAGES = 8192
MAX_PARTS = 8192
MAX_TOOLS = 1024
MEDIA = ("image", "image_url", "input_image", "document", "file", "input_file", "audio", "input_audio")
"""Types of parts that other models read."""


class Body(BaseModel):
    """Unknown fields are refused, and nothing is coerced: "4" is no number."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _few(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:  # each unknown one would be complained about by itself
            raise ValueError(f"expected at most {MAX_FIELDS} fields, found {len(value)}")
        return value


def _stop(value: Any) -> Any:
    if isinstance(value, str):
        return [value]
    if value is not None and (not isinstance(value, list) or not all(isinstance(text, str) for text in value)):
        raise ValueError("expected a string or a list of strings")
    return value


def _bias(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("expected an object from token ids to numbers")
    if len(value) > MAX_BIASES:
        raise ValueError(f"expected at most {MAX_BIASES} tokens")
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise ValueError("expected token ids as keys")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise ValueError("expected numbers from -100 to 100")
    return value


def kinds_of(value: Any, kinds: Sequence[str], what: str, most: int) -> Any:
    """At most `most` objects whose `type` is among `kinds`; a text stands for one whose `type` is the first of them.

    Raises ValueError that says which type it cannot read; `what`: what such objects are called.
    """
    if isinstance(value, str):
        return [{"type": kinds[0], "text": value}]
    named = f"{what} of type {', '.join(kinds)}"
    if not isinstance(value, list):
        raise ValueError(f"expected a text or a list of {named}")
    if len(value) > most:
        raise ValueError(f"expected at most {most} {what}, found {len(value)}")
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            found = f"type {kind[:40]}" if isinstance(kind, str) and kind.isprintable() else "something else"
            raise ValueError(f"expected {named}, found {found}" + ("; this model reads text only" if found.endswith(MEDIA) else ""))
    return value


ToolName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")]
CallId = Annotated[str, Field(min_length=1, max_length=256)]
Stop = Annotated[list[str] | None, PlainValidator(_stop, json_schema_input_type=str | list[str] | None)]
Bias = Annotated[dict[str, float] | None, PlainValidator(_bias, json_schema_input_type=dict[str, float] | None)]


def within(**bounds: float) -> dict[str, Any]:
    """Bounds for the document only: `SamplingParams` checks them, in its own words."""
    return dict(bounds)


class SamplingFields(Body):
    """How tokens are chosen; the names are OpenAI's and vLLM's. Ranges are checked by `SamplingParams`, which knows their meaning."""

    temperature: float | None = Field(
        None, json_schema_extra=within(minimum=0, maximum=MAX_TEMPERATURE), description="0 always takes the likeliest token; at most 2."
    )
    top_p: float | None = Field(
        None, json_schema_extra=within(exclusiveMinimum=0, maximum=1), description="Keep the likeliest tokens up to this mass."
    )
    top_k: int | None = Field(
        None, json_schema_extra=within(minimum=-1), description="Keep this many of the likeliest tokens; 0 and -1 keep all."
    )
    min_p: float | None = Field(
        None, json_schema_extra=within(minimum=0, maximum=1), description="Drop tokens below this share of the likeliest one's probability."
    )
    typical_p: float | None = Field(
        None,
        json_schema_extra=within(exclusiveMinimum=0, maximum=1),
        description="Keep the tokens of the most typical surprise up to this mass.",
    )
    repetition_penalty: float | None = Field(
        None, json_schema_extra=within(exclusiveMinimum=0, maximum=MAX_PENALTY), description="More than 0, at most 2; 1 is off."
    )
    presence_penalty: float | None = Field(
        None, json_schema_extra=within(minimum=-MAX_PENALTY, maximum=MAX_PENALTY), description="-2 to 2."
    )
    frequency_penalty: float | None = Field(
        None, json_schema_extra=within(minimum=-MAX_PENALTY, maximum=MAX_PENALTY), description="-2 to 2."
    )
    logit_bias: Bias = Field(None, description="Token id to what is added to its logit, -100 to 100.")
    seed: int | None = Field(
        None,
        json_schema_extra=within(minimum=-(1 << 63), maximum=(1 << 64) - 1),
        description="Makes sampling repeatable, whoever else is served.",
    )
    n: int | None = Field(None, json_schema_extra=within(minimum=1, maximum=MAX_N), description="Samples of the same prompt.")
    min_tokens: int | None = Field(None, json_schema_extra=within(minimum=0), description="Before so many tokens nothing ends the text.")
    stop: Stop = Field(None, description="Up to 16 strings that end the text and are not part of it.")
    stop_token_ids: list[int] | None = Field(None, max_length=MAX_STOP_TOKENS, fail_fast=True)
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = Field(None, description="The model's own end tokens do not end the text.")
    priority: int | None = Field(
        None, json_schema_extra=within(minimum=-(1 << 31), maximum=(1 << 31) - 1), description="Lower is served first."
    )
    cache_salt: str | None = Field(
        None, max_length=MAX_CACHE_SALT, description="Cached prefixes are shared only with requests of the same salt."
    )
    timeout: float | None = Field(
        None,
        json_schema_extra=within(exclusiveMinimum=0, maximum=MAX_TIMEOUT),
        description="Seconds until the request is ended, finish_reason abort.",
    )


def _few_entries(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        raise ValueError(f"expected at most {MAX_METADATA} entries, found {len(value)}")
    return value


Metadata = Annotated[dict[str, str] | None, BeforeValidator(_few_entries)]


class ServiceFields(Body):
    """Fields of OpenAI's service that mean nothing here: what changes nothing is taken, all else refused."""

    user: str | None = None
    metadata: Metadata = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None


class StreamOptions(Body):
    include_usage: bool | None = None


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class JsonSchema(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class RegexFormat(Body):
    type: Literal["regex"]
    regex: str


class GrammarFormat(Body):
    type: Literal["grammar"]
    grammar: str = Field(description="A Lark grammar, in llguidance's dialect.")


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | GrammarFormat, Field(discriminator="type")]

DIRECT = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "n",
    "min_tokens",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "priority",
)
"""Fields that mean in SamplingParams what they mean here."""


def constraint_of(wanted: ResponseFormat | None) -> Constraint | None:
    """What `response_format` demands of the text. Raises Problem."""
    try:
        if isinstance(wanted, JsonObjectFormat):
            return Constraint("json_object")
        if isinstance(wanted, JsonSchemaFormat):
            return Constraint("json_schema", json.dumps(wanted.json_schema.schema_))
        if isinstance(wanted, RegexFormat):
            return Constraint("regex", wanted.regex)
        if isinstance(wanted, GrammarFormat):
            return Constraint("grammar", wanted.grammar)
    except RequestError as error:
        raise of_request(error).renamed(FORMAT_NAMES) from error
    return None


FORMAT_NAMES = {
    "json_schema": "response_format.json_schema",
    "json_object": "response_format",
    "regex": "response_format.regex",
    "grammar": "response_format.grammar",
}


def sampling_params(fields: SamplingFields, defaults: Mapping[str, Any], names: Mapping[str, str], **fixed: Any) -> SamplingParams:
    """The engine's parameters: what the body says, else the model's makers, else SamplingParams. `names`: the body's names of fields
    that the engine calls otherwise; `fixed`: what the endpoint decides. Raises Problem, by the body's field."""
    given: dict[str, Any] = {name: getattr(fields, name) for name in DIRECT if getattr(fields, name) is not None}
    if fields.stop is not None:
        given["stop"] = tuple(fields.stop)
    if fields.logit_bias is not None:
        given["logit_bias"] = {int(key): bias for key, bias in fields.logit_bias.items()}
        if len(given["logit_bias"]) != len(fields.logit_bias):
            raise Problem(400, "logit_bias: a token is given twice", param="logit_bias")
    try:
        return SamplingParams(**{**defaults, **given, **{name: value for name, value in fixed.items() if value is not None}})
    except RequestError as error:
        raise of_request(error).renamed(names) from error


def check_timeout(timeout: float | None) -> None:
    """Raise Problem for a timeout that is no time."""
    if timeout is not None and not (math.isfinite(timeout) and 0 < timeout <= MAX_TIMEOUT):
        raise Problem(400, f"timeout: expected more than 0 and at most {MAX_TIMEOUT} seconds", param="timeout")
