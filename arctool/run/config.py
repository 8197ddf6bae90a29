"""What a model is in numbers: `ModelConfig`, read from the `config.json` form of Hugging Face and checked field by field.

It knows the *meaning* of the fields for the architectures we run (whose window rule, whose biases) and refuses anything whose
meaning it does not know. It must not know tensors, files, kernels or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from arctool.run.dialects import DIALECTS, Dialect
from arctool.run.fields import Fields, short
from arctool.run.moe_config import MAX_WIDTH, MoeConfig
from arctool.run.rope_config import MAX_POSITIONS, RopeConfig, read_rope

# An upper bound that no real model reaches; it keeps a lying config from asking for the machine's whole memory.
MAX_LAYERS = 4096


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer. Widths in elements.

    `sliding_windows[layer]`: None, or how many keys a query sees, itself included. `moe`: None where every layer is dense.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    hidden_act: str
    moe: MoeConfig | None = None

    def sparse(self, layer: int) -> MoeConfig | None:
        """The experts of a layer, None where it is dense."""
        return self.moe if self.moe is not None and self.moe.sparse[layer] else None

    @staticmethod
    def from_hf(config: Mapping[str, Any], where: str) -> ModelConfig:
        """Read a `config.json` mapping (transformers 4 or 5 spelling). Raises SourceError `where: field: expected, found`."""
        fields = Fields(config, where)
        name = _architecture_name(fields)
        dialect = DIALECTS[name]
        hidden = fields.count("hidden_size", MAX_WIDTH)
        heads = fields.count("num_attention_heads", MAX_WIDTH)
        kv_heads = _kv_heads(fields, heads, dialect)
        layers = fields.count("num_hidden_layers", MAX_LAYERS)
        vocab = fields.count("vocab_size", MAX_WIDTH)
        return ModelConfig(
            architecture=name,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=fields.count("intermediate_size", MAX_WIDTH),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=_head_dim(fields, hidden, heads, dialect),
            rms_norm_eps=fields.positive("rms_norm_eps"),
            rope=read_rope(fields, dialect.default_theta),
            max_position_embeddings=fields.count("max_position_embeddings", MAX_POSITIONS),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            attention_bias=dialect.attention_bias(fields),
            mlp_bias=dialect.mlp_bias(fields),
            qk_norm=dialect.qk_norm,
            sliding_windows=dialect.windows(fields, layers),
            bos_token_id=next(iter(_token_ids(fields, "bos_token_id", vocab)), None),
            eos_token_ids=_token_ids(fields, "eos_token_id", vocab),
            hidden_act=fields.choice("hidden_act", ("silu",), "silu"),
            moe=dialect.experts(fields, layers),
        )


def _architecture_name(fields: Fields) -> str:
    names = fields.required("architectures")
    if not isinstance(names, list | tuple) or not names or not isinstance(names[0], str):
        raise fields.error("architectures", f"expected a list of names, found {short(names)}")
    if names[0] not in DIALECTS:
        raise fields.error("architectures", f"unknown architecture {short(names[0])}; known: {', '.join(sorted(DIALECTS))}")
    return names[0]


def _kv_heads(fields: Fields, heads: int, dialect: Dialect) -> int:
    # Null means "as many as the query heads" in the configuration classes; an absent field means the class's own number.
    value = dialect.default_kv_heads if fields.absent("num_key_value_heads") else fields.get("num_key_value_heads")
    kv_heads = heads if value is None else fields.check_count("num_key_value_heads", value, MAX_WIDTH)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"expected a divisor of num_attention_heads = {heads}, found {kv_heads}")
    return kv_heads


def _head_dim(fields: Fields, hidden: int, heads: int, dialect: Dialect) -> int:
    value = fields.get("head_dim")
    if value is None:
        value = dialect.default_head_dim
    if value is None:
        if hidden % heads:
            raise fields.error("num_attention_heads", f"expected a divisor of hidden_size = {hidden} (no head_dim is given), found {heads}")
        value = hidden // heads
    head_dim = fields.check_count("head_dim", value, MAX_WIDTH)
    if head_dim % 2:
        raise fields.error("head_dim", f"expected an even number (rotary pairs), found {head_dim}")
    return head_dim


def _token_ids(fields: Fields, field: str, vocab: int) -> tuple[int, ...]:
    value = fields.get(field)
    ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            raise fields.error(field, f"expected token ids from 0 to {vocab - 1}, found {short(token)}")
    return tuple(dict.fromkeys(ids))
