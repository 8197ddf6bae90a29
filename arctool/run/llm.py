"""`LLM`: a model, its tokenizer and its template behind two verbs, generate and chat. The public door of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arctool.errors import FormatError, RequestError, SourceError
from arctool.kernels.registry import Registry, default_registry
from arctool.quant.tensor import Weight, of_stack
from arctool.run.chat import ChatTemplate, Message, load_template
from arctool.run.config import ModelConfig
from arctool.run.engine import Completion, Engine, Update
from arctool.run.kv.cache import plan_cache
from arctool.run.models import architecture
from arctool.run.models.experts import as_stored, stack_shape, stacked
from arctool.run.runner import ModelRunner
from arctool.run.sampling.params import SamplingParams
from arctool.run.scheduler import MAX_STEP_TOKENS, PREFILL_FLOOR
from arctool.run.tokenizer import TOKENIZER_FILE, Tokenizer, json_asset
from arctool.run.weights import WeightSource, load_model
from arctool.uqff.container import Artifact, open_artifact
from arctool.uqff.discovery import CONFIG_NAME
from arctool.uqff.strangers import strangers

GENERATION_FILE = "generation_config.json"
MAX_PROMPT_CHARACTERS = 2_000_000
"""More than a context of 200,000 tokens holds of ordinary text."""

PARTS = 3
"""Stacks of one layer: so many are kept in hand while its experts are asked for one after the other."""

Prompt = str | Ordered[int]


@dataclass(frozen=True)
class EngineOptions:
    """Sizes of the engine. `max_model_len` None: the model's whole context, as far as the cache reaches (`kv.cache.plan_cache`).

    `max_seqs` run at once, if the cache has room: it takes `kv_memory` at most (bytes, or "2GiB", the default; touched only when used).
    `max_step_tokens` are computed in one step; prompts get at least half of it in every `prefill_floor`-th step. `resident`: an artifact's
    weights are read into memory instead of mapped.
    """

    max_model_len: int | None = None
    max_seqs: int = 256
    kv_memory: int | str | None = None
    block_size: int = 16
    kv_dtype: str = "f32"
    max_step_tokens: int = MAX_STEP_TOKENS
    prefill_floor: int = PREFILL_FLOOR
    enable_prefix_caching: bool = True
    resident: bool = False


class ArtifactSource:
    """A UQFF artifact as a source of weights. Raises FormatError where its config.json describes no model that we run.

    Experts may lie by themselves, or in the stacks [experts, out, in] that mistral.rs makes.
    """

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact
        try:
            self.config = ModelConfig.from_hf(artifact.config_json, str(artifact.directory / "config.json"))
        except SourceError as error:
            raise FormatError(str(error)) from error
        found = architecture(self.config.architecture, "config.json")
        self._places = stacked(self.config, found.experts, set(artifact.keys()))
        self._stacks: dict[str, Weight] = {}
        complaint = next(strangers(artifact, as_stored(self.config, found.tensors(self.config), self._places)), None)
        if complaint is not None:
            raise FormatError(f"{complaint}; leaving it out would change the model: `arctool verify` tells all")

    @property
    def assets(self) -> Mapping[str, bytes]:
        return self._artifact.assets

    def weight(self, key: str) -> Weight:
        place = self._places.get(key)
        if place is None:
            return self._artifact.weight(key)
        if place.stack not in self._stacks:
            stack = self._artifact.weight(place.stack)
            if stack.shape != (shape := stack_shape(self.config, place.stack)):
                raise FormatError(f"{place.stack}.weight: {CONFIG_NAME} implies shape {list(shape)}, found {list(stack.shape)}")
            self._stacks = {**dict(list(self._stacks.items())[1 - PARTS :]), place.stack: stack}
        return of_stack(self._stacks[place.stack], place.expert)

    def bias(self, key: str) -> NDArray[np.float32] | None:
        return self._artifact.bias(key)


class LLM:
    """A model ready to answer. Prompts are text or token ids; one `SamplingParams` serves all prompts, or give one for each.

    `source`: the path of a UQFF artifact, or any WeightSource (an opened checkpoint, say).
    """

    def __init__(self, source: str | Path | WeightSource, options: EngineOptions | None = None, registry: Registry | None = None) -> None:
        options = EngineOptions() if options is None else options
        weights = ArtifactSource(open_artifact(Path(source), resident=options.resident)) if isinstance(source, str | Path) else source
        self.config = weights.config
        self.registry = default_registry() if registry is None else registry
        self.tokenizer = Tokenizer(weights.assets, self.config.vocab_size) if TOKENIZER_FILE in weights.assets else None
        self.template: ChatTemplate | None = None
        if self.tokenizer is not None:
            self.template = load_template(weights.assets, self.tokenizer.special)
        self.eos_token_ids = stop_tokens(self.config, weights.assets, self.tokenizer)
        self.generation = generation_defaults(weights.assets)
        plan = plan_cache(
            self.config,
            max_model_len=options.max_model_len,
            max_seqs=options.max_seqs,
            kv_memory=options.kv_memory,
            block_size=options.block_size,
            kv_dtype=options.kv_dtype,
        )
        self.runner = ModelRunner(
            load_model(weights, self.registry),
            plan,
            max_tokens=options.max_step_tokens,
            max_seqs=options.max_seqs,
        )
        self.engine = Engine(
            self.runner,
            self.tokenizer,
            self.eos_token_ids,
            max_seqs=options.max_seqs,
            max_step_tokens=options.max_step_tokens,
            prefill_floor=options.prefill_floor,
            enable_prefix_caching=options.enable_prefix_caching,
        )

    def generate(self, prompts: Ordered[Prompt], params: SamplingParams | Ordered[SamplingParams] | None = None) -> list[Completion]:
        """Continue every prompt; completions come in the order of `prompts`. Raises RequestError before anything runs."""
        return self.engine.generate([self.encode(p) for p in prompts], _one_each(params, len(prompts)))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Update]:
        """Continue one prompt, yielding every token as it comes; the last update has the completion. Closing it cancels."""
        return self.engine.stream([self.encode(prompt)], _one_each(params, 1))

    def chat(self, messages: Ordered[Message], params: SamplingParams | None = None, **variables: Any) -> Completion:
        """The assistant's answer to `messages` ({"role", "content"}, ...). `variables` go to the template."""
        return self.engine.generate([self.encode_chat(messages, **variables)], _one_each(params, 1))[0]

    def stream_chat(self, messages: Ordered[Message], params: SamplingParams | None = None, **variables: Any) -> Iterator[Update]:
        """As `chat`, token by token."""
        return self.engine.stream([self.encode_chat(messages, **variables)], _one_each(params, 1))

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the tokenizer puts around text."""
        return self.encode_text(prompt) if isinstance(prompt, str) else list(prompt)

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; a rendered conversation brings its special tokens with it."""
        check_length(text, "prompt")
        if self.tokenizer is None:
            raise RequestError(f"prompt: this model came without {TOKENIZER_FILE}; give token ids")
        most = self.engine.max_model_len * self.tokenizer.longest
        if len(text) > most:  # tokenising it would take seconds, and say the same
            context = f"the context of {self.engine.max_model_len} tokens"
            raise RequestError(f"prompt: {len(text)} characters; {context} holds at most {most} characters, shorten it")
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def encode_chat(self, messages: Ordered[Message], /, **variables: Any) -> list[int]:
        """Token ids of a conversation, rendered by the model's own template."""
        return self.encode_text(self.render_chat(messages, **variables), add_special_tokens=False)

    def render_chat(self, messages: Ordered[Message], /, **variables: Any) -> str:
        """The text of the prompt for a conversation, by the model's own template. One thread at a time may ask."""
        for message in messages:
            if isinstance(message, Mapping):
                check_length(message.get("content"), "messages: content")
        if self.tokenizer is None or self.template is None:
            raise RequestError("messages: this model has no chat template; use plain completion of a prompt instead")
        return self.template.render(messages, **variables)


def check_length(text: object, what: str) -> None:
    """Raise RequestError for a text that no context could hold, before any template or tokenizer spends time on it."""
    if isinstance(text, str) and len(text) > MAX_PROMPT_CHARACTERS:
        raise RequestError(f"{what}: {len(text)} characters; at most {MAX_PROMPT_CHARACTERS} are accepted, shorten it")


def generation_defaults(assets: Mapping[str, bytes]) -> dict[str, float]:
    """What the model's makers advise for sampling (generation_config.json): field of SamplingParams → value. What cannot be is left out."""
    advice = json_asset(assets, GENERATION_FILE)
    found: dict[str, float] = {}
    for name in ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty"):
        value = advice.get(name)
        if value is None or isinstance(value, bool):
            continue
        try:
            SamplingParams(**{name: value})
        except RequestError:
            continue
        found[name] = value
    return found


def stop_tokens(config: ModelConfig, assets: Mapping[str, bytes], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Every token that ends a text: those of config.json, generation_config.json and the tokenizer together.

    Each of the three is incomplete in some published model; a missing one makes a chat run on past its end.
    """
    stated = json_asset(assets, GENERATION_FILE).get("eos_token_id")
    ids = [] if stated is None else stated if isinstance(stated, list) else [stated]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < config.vocab_size:
            raise SourceError(f"{GENERATION_FILE}: eos_token_id: expected token ids below {config.vocab_size}, found {token!r:.40}")
    named = () if tokenizer is None else tokenizer.eos_token_ids
    return tuple(dict.fromkeys((*config.eos_token_ids, *ids, *named)))


def _one_each(params: SamplingParams | Ordered[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"params: expected one for each of {count} prompts, found {len(params)}")
    return list(params)
