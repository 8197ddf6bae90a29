"""A GGUF file as a source: llama.cpp's names, metadata and row order turned back into those of the Hugging Face checkpoint.

Architectures `llama` (Llama and Mistral, and Mixtral where it has experts), `qwen2`, `qwen3` and `qwen3moe`; the stacks of their experts
are given out as stacks (`expert_store` takes them apart). Anything in the file whose meaning is not known is refused by name, because
a tensor or field that is silently left out changes the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from arctool.bake.source.gguf_file import GgufArray, GgufFile, GgufTensor, read_gguf
from arctool.bake.source.gguf_tokenizer import tokenizer_assets
from arctool.bake.source.stored import ALL_ROWS, Source, StoredTensor
from arctool.bake.source.terms import terms_of
from arctool.errors import SourceError
from arctool.run.layers.rope import inverse_frequencies
from arctool.run.rope_config import RopeConfig

OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EXPERT_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
ROUTER = re.compile(r"blk\.(\d+)\.ffn_gate_inp\.weight")
Row = TypeVar("Row", bound=np.generic)

ROPE_FACTORS = "rope_freqs.weight"
LARGEST = float(np.finfo(np.float32).max)

MAPPED = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon"),
    *("rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"),
    *("rope.scaling.finetuned", "vocab_size"),
)
"""Metadata `<arch>.*` that our config holds, or that says nothing about the computation (the last three)."""

MAPPED_EXPERTS = ("expert_count", "expert_used_count", "expert_feed_forward_length")
"""The same of a mixture of experts."""

SOFTMAX = 1
"""llama.cpp's `expert_gating_func` for a softmax over all experts."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "tensor_data_layout": ("Meta AI original pth",),
    "attention.causal": (True,),
    "rope.scale_linear": (1.0, 0.0),
    "rope.scaling.attn_factor": (1.0,),
    **dict.fromkeys((*MAPPED_EXPERTS, "leading_dense_block_count", "attention.sliding_window"), (0,)),
    **dict.fromkeys(("expert_shared_count", "expert_group_count", "expert_group_used_count", "expert_shared_feed_forward_length"), (0,)),
    **{"expert_gating_func": (SOFTMAX,), "expert_weights_norm": (True,), "expert_weights_scale": (1.0, 0.0)},
    **dict.fromkeys(("attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias", "residual_scale", "embedding_scale"), (0.0,)),
    **dict.fromkeys(("logit_scale", "final_logit_softcapping", "attn_logit_softcapping"), (0.0,)),
}
"""Metadata `<arch>.*` that our config cannot hold, with the values that change nothing (in llama.cpp 0 mostly means: not used)."""


@dataclass(frozen=True)
class Family:
    """What an architecture of GGUF is in Hugging Face terms. `interleaved`: llama.cpp permuted the rows of q and k; `experts`: it is a
    mixture, the layers without a router being dense, and llama.cpp always divides the weights of the chosen ones by their sum."""

    class_name: str
    model_type: str
    interleaved: bool
    extra: Mapping[str, Any]
    experts: bool = False


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", True, {"attention_bias": False, "mlp_bias": False}),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", False, {"use_sliding_window": False}),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", False, {"attention_bias": False, "use_sliding_window": False}),
    "qwen3moe": Family("Qwen3MoeForCausalLM", "qwen3_moe", False, {"attention_bias": False, "use_sliding_window": False}, True),
}
MIXTRAL = Family("MixtralForCausalLM", "mixtral", True, {}, True)
"""What `llama` is where it counts experts."""


class GgufStore:
    """The tensors of a GGUF file under their Hugging Face names, rows in Hugging Face order."""

    def __init__(self, file: GgufFile, names: Mapping[str, str], heads: Mapping[str, int]) -> None:
        """`names`: Hugging Face name → name in the file; `heads`: number of heads of every interleaved tensor."""
        self._file = file
        self._tensors: dict[str, GgufTensor] = {hf: file.tensors[name] for hf, name in names.items()}
        self._heads = heads
        self.entries = {hf: StoredTensor(hf, t.shape, t.type_name, file.path) for hf, t in self._tensors.items()}

    def check_readable(self, name: str) -> None:
        """Raise SourceError where the block type of tensor `name` cannot be dequantised."""
        self._file.check_readable(self._tensors[name])

    def blocks(self, name: str, rows: slice = ALL_ROWS) -> NDArray[np.uint8] | None:
        """The blocks of tensor `name`, or of some rows of it, None where it holds plain numbers. Whole rows move, so no value changes."""
        tensor = self._tensors[name]
        if tensor.type_name in ("F32", "BF16") or len(tensor.shape) < 2:
            return None
        if name in self._heads:
            return deinterleave(self._file.raw(tensor), self._heads[name])[rows]
        return self._file.raw(tensor, rows)

    def read(self, name: str, rows: slice = ALL_ROWS) -> NDArray[np.float32]:
        """The values f32 of tensor `name`, or of some rows of it."""
        if name not in self._heads:
            return self._file.read(self._tensors[name], rows)
        # Rows of a head lie apart, and heads do not: those that the wanted rows are in are read whole.
        count = self.entries[name].shape[0]
        height = count // self._heads[name]
        start, stop, _ = rows.indices(count)
        first, last = start // height, -(-max(start, stop) // height)
        heads = self._file.read(self._tensors[name], slice(first * height, last * height))
        return deinterleave(heads, last - first)[start - first * height : max(start, stop) - first * height] if last > first else heads


def deinterleave(values: NDArray[Row], heads: int) -> NDArray[Row]:
    """Undo llama.cpp's row order of q and k: per head it alternates the two rotary halves that Hugging Face keeps apart."""
    half = values.shape[0] // heads // 2
    return np.ascontiguousarray(values.reshape(heads, half, 2, *values.shape[1:]).swapaxes(1, 2)).reshape(values.shape)


def open_gguf(path: Path) -> Source:
    """The checkpoint in the GGUF file at `path`. Raises SourceError naming the field or tensor that we cannot use."""
    file = read_gguf(path)
    fields = Metadata(file)
    arch = fields.text("general.architecture")
    family = FAMILIES.get(arch)
    if family is None:
        raise SourceError(f"{path}: general.architecture: {arch!r} is not one that we read; known: {', '.join(FAMILIES)}")
    if arch == "llama" and fields.metadata.get("llama.expert_count", 0) != 0:
        family = MIXTRAL
    config = config_json(fields, family, arch)
    names = tensor_names(file, LAYER_NAMES | EXPERT_NAMES if family.experts else LAYER_NAMES)
    heads = interleaved_heads(config, names) if family.interleaved else {}
    store = GgufStore(file, names, heads)
    terms = terms_of({name.replace(".", "_"): file.metadata.get(f"general.{name}") for name in ("license", "license.name", "license.link")})
    return Source(str(path), config, store, tokenizer_assets(file), (path,), terms)


class Metadata:
    """Typed access to the metadata; errors name the file and the key."""

    def __init__(self, file: GgufFile) -> None:
        self.path = file.path
        self.metadata = file.metadata
        self.tensors = file.tensors
        self.file = file

    def text(self, key: str) -> str:
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise SourceError(f"{self.path}: {key}: expected text, found {'nothing' if value is None else repr(value)[:60]}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A positive whole number. A list (one value a layer) is refused: layers of different shape are not read."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            found = "nothing" if value is None else "one value for each layer" if isinstance(value, GgufArray) else repr(value)[:60]
            raise SourceError(f"{self.path}: {key}: expected one positive whole number, found {found}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number, as the shortest decimal that gives the stored f32 (1e-5, not 9.999999747378752e-06)."""
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
            raise SourceError(f"{self.path}: {key}: expected a number, found {'nothing' if value is None else repr(value)[:60]}")
        return float(str(np.float32(value)))


def config_json(fields: Metadata, family: Family, arch: str) -> dict[str, Any]:
    """The config.json that the Hugging Face checkpoint would have."""
    hidden, heads = fields.count(f"{arch}.embedding_length"), fields.count(f"{arch}.attention.head_count")
    head_dim = fields.count(f"{arch}.attention.key_length", hidden // heads)
    _refuse_unmapped(fields, arch, head_dim, MAPPED + MAPPED_EXPERTS if family.experts else MAPPED)
    embedding = fields.tensors.get("token_embd.weight")
    if embedding is None:
        raise SourceError(f"{fields.path}: tensor token_embd.weight is missing; the file is no language model or incomplete")
    config: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": fields.count(f"{arch}.feed_forward_length"),
        "num_hidden_layers": fields.count(f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.count(f"{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": fields.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number(f"{arch}.rope.freq_base", 10000.0),
        "rope_scaling": rope_scaling(fields, arch),
        "max_position_embeddings": fields.count(f"{arch}.context_length"),
        "tie_word_embeddings": "output.weight" not in fields.tensors,
        "torch_dtype": "bfloat16",
        **family.extra,
        **(expert_fields(fields, family, arch) if family.experts else {}),
    }
    for field, key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        value = fields.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is not None:
            config[field] = value
    return config


def expert_fields(fields: Metadata, family: Family, arch: str) -> dict[str, Any]:
    """The fields of config.json that say which experts there are. Raises SourceError for dense layers in an architecture without."""
    layers = fields.count(f"{arch}.block_count")
    routed = {int(match.group(1)) for name in fields.tensors if (match := ROUTER.fullmatch(name))}
    dense = [layer for layer in range(layers) if layer not in routed]
    counts = {"num_experts": fields.count(f"{arch}.expert_count"), "num_experts_per_tok": fields.count(f"{arch}.expert_used_count")}
    if family is MIXTRAL:
        if dense:
            raise SourceError(f"{fields.path}: blk.{dense[0]}.ffn_gate_inp.weight is missing; every layer of Mixtral has experts")
        width = fields.count(f"{arch}.expert_feed_forward_length", fields.count(f"{arch}.feed_forward_length"))
        if width != fields.count(f"{arch}.feed_forward_length"):
            raise SourceError(f"{fields.path}: {arch}.expert_feed_forward_length: {width} is not {arch}.feed_forward_length")
        return {"num_local_experts": counts["num_experts"], "num_experts_per_tok": counts["num_experts_per_tok"]}
    width = fields.count(f"{arch}.expert_feed_forward_length")
    return {**counts, "moe_intermediate_size": width, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": dense}


def _refuse_unmapped(fields: Metadata, arch: str, head_dim: int, mapped: tuple[str, ...]) -> None:
    """Refuse metadata that no field of our config expresses, unless its value changes nothing."""
    same_as_head = {"rope.dimension_count": (head_dim,), "attention.value_length": (head_dim,)}
    neutral: dict[str, tuple[Any, ...]] = {**NEUTRAL, **same_as_head}
    for key, value in fields.metadata.items():
        name = key.removeprefix(f"{arch}.")
        if name == key or name in mapped:
            continue
        if name not in neutral:
            raise SourceError(
                f"{fields.path}: {key}: the meaning of this field is not known here, and leaving it out might change the model; "
                "use the original checkpoint"
            )
        if value not in neutral[name]:
            raise SourceError(f"{fields.path}: {key}: {value!r} is not supported, only {neutral[name][0]!r}; use the original checkpoint")


def rope_scaling(fields: Metadata, arch: str) -> dict[str, Any] | None:
    """The `rope_scaling` of config.json: from the metadata, or recognised from llama.cpp's table of frequency factors."""
    key = f"{arch}.rope.scaling"
    # llama.cpp takes a factor without a type for a linear one.
    kind = fields.metadata.get(f"{key}.type", "linear" if f"{key}.factor" in fields.metadata else "none")
    if kind not in ("none", "linear"):
        raise SourceError(f"{fields.path}: {key}.type: {kind!r} is not supported, only none and linear")
    if ROPE_FACTORS in fields.tensors:
        if kind != "none":
            raise SourceError(f"{fields.path}: {key}.type: {kind!r} beside a table {ROPE_FACTORS} is not supported")
        return _llama3_scaling(fields, arch)
    return None if kind == "none" else {"rope_type": kind, "factor": fields.number(f"{key}.factor")}


def _llama3_scaling(fields: Metadata, arch: str) -> dict[str, Any]:
    """Llama 3's scaling survives in GGUF only as its result; the published parameters that give that result are put back."""
    stored = fields.file.read(fields.tensors[ROPE_FACTORS]).ravel()
    theta = fields.number(f"{arch}.rope.freq_base", 10000.0)
    for factor in (8.0, 32.0):
        scaling = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        if np.allclose(stored, frequency_factors(theta, 2 * stored.size, scaling), rtol=1e-4, atol=0):
            return scaling
    raise SourceError(
        f"{fields.path}: {ROPE_FACTORS}: these rotary frequency factors are not those of Llama 3.1 or 3.2; use the original checkpoint"
    )


def frequency_factors(theta: float, head_dim: int, scaling: Mapping[str, Any]) -> NDArray[np.float32]:
    """By what `scaling` divides each rotary frequency: f32 [head_dim / 2], from the engine's own frequencies."""
    plain, scaled = (inverse_frequencies(RopeConfig(theta, how), head_dim) for how in (None, scaling))
    factors: NDArray[np.float32] = (plain / scaled).numpy()
    return factors


def tensor_names(file: GgufFile, layer_names: Mapping[str, str] = LAYER_NAMES) -> dict[str, str]:
    """Hugging Face name → name in the file, for every tensor but the rotary factors. Raises SourceError for an unknown one."""
    names = {}
    for name in file.tensors:
        if name == ROPE_FACTORS:
            continue
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        layer, stem, suffix = match.groups() if match else (None, "", "")
        module = (OUTER_NAMES if layer is None else layer_names).get(stem)
        if module is None:
            raise SourceError(f"{file.path}: tensor {name}: unknown; the model has parts that this version does not read from GGUF")
        prefix = "" if layer is None else f"model.layers.{int(layer)}."
        names[f"{prefix}{module}.{suffix}"] = name
    return names


def interleaved_heads(config: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, int]:
    """Into how many heads the rows of every q and k tensor (weight and bias) fall."""
    counts = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    return {name: counts[part] for name in names for part in counts if name.split(".")[-2] == part}
