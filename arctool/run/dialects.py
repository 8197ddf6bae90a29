"""How each architecture reads the fields that the others read differently: windows, biases, head width, experts.

The rules are those of the architecture's configuration and modelling code in transformers. No tensors, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from arctool.run.fields import Fields, short
from arctool.run.moe_config import MoeConfig, mixtral_experts, no_experts, qwen3_experts
from arctool.run.rope_config import MAX_POSITIONS

# What the configuration classes of transformers put where a file lacks the field; null is a statement, absence is not.
# `sliding_window` of Mistral, Qwen2 and Qwen3; `max_window_layers` of both Qwens.
DEFAULT_WINDOW = 4096
DEFAULT_FULL_LAYERS = 28


def _full_attention(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Llama: every layer sees the whole context. A window in the file would be something we do not know."""
    if fields.get("sliding_window") is not None:
        raise fields.error("sliding_window", f"this architecture has none, found {short(fields.get('sliding_window'))}")
    return _by_layer_types(fields, layers, None) or (None,) * layers


def _window_everywhere(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Mistral: `sliding_window` holds for all layers; null is no window, an absent field is not null."""
    window = _window(fields)
    return _by_layer_types(fields, layers, window) or (window,) * layers


def _window_if_used(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Qwen: no window unless `use_sliding_window`, whatever `sliding_window` says; then layers from `max_window_layers` on."""
    used = fields.flag("use_sliding_window", False)
    window = _window(fields) if used else None
    by_type = _by_layer_types(fields, layers, window)
    if by_type is not None or window is None:
        return by_type or (None,) * layers
    first = DEFAULT_FULL_LAYERS if fields.absent("max_window_layers") else fields.required("max_window_layers")
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise fields.error("max_window_layers", f"expected an integer of at least 0, found {short(first)}")
    return tuple(window if layer >= first else None for layer in range(layers))


def _window_if_given(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Mixtral: `sliding_window` holds for all layers, and an absent one is none."""
    return _one_window(fields, layers, None if fields.absent("sliding_window") else _window(fields))


def _one_window_if_used(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Qwen3-MoE: no window unless `use_sliding_window`, and then in every layer: transformers does not read `max_window_layers` here."""
    return _one_window(fields, layers, _window(fields) if fields.flag("use_sliding_window", False) else None)


def _one_window(fields: Fields, layers: int, window: int | None) -> tuple[int | None, ...]:
    """The same for all layers. Raises SourceError for `layer_types` that say otherwise: these architectures' code does not read them."""
    windows = (window,) * layers
    if _by_layer_types(fields, layers, window) not in (None, windows):
        raise fields.error("layer_types", "this architecture has one window for all layers, or none")
    return windows


def _window(fields: Fields) -> int | None:
    value = DEFAULT_WINDOW if fields.absent("sliding_window") else fields.get("sliding_window")
    return None if value is None else fields.check_count("sliding_window", value, MAX_POSITIONS)


def _by_layer_types(fields: Fields, layers: int, window: int | None) -> tuple[int | None, ...] | None:
    """Windows by `layer_types`, or None if the config has no such list."""
    kinds = fields.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list | tuple) or len(kinds) != layers:
        found = len(kinds) if isinstance(kinds, list | tuple) else short(kinds)
        raise fields.error("layer_types", f"expected a list of {layers} layers, found {found}")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.error("layer_types", f"expected full_attention or sliding_attention, found {short(kind)}")
        if kind == "sliding_attention" and window is None:
            raise fields.error("layer_types", "a layer is sliding_attention, but no sliding_window is in use")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _never(field: str) -> Callable[[Fields], bool]:
    """The architecture's code has no such bias: a file that asks for one describes some other model."""

    def rule(fields: Fields) -> bool:
        if fields.flag(field, False):
            raise fields.error(field, "this architecture has no such biases, found true")
        return False

    return rule


@dataclass(frozen=True)
class Dialect:
    """One architecture's rules for the fields that the others read differently.

    `default_kv_heads`, `default_head_dim`: what an absent field means; None: it follows from the other fields. `experts`: which layers
    are mixtures of experts, and of which, given how many layers there are.
    """

    attention_bias: Callable[[Fields], bool]
    mlp_bias: Callable[[Fields], bool]
    qk_norm: bool
    windows: Callable[[Fields, int], tuple[int | None, ...]]
    default_kv_heads: int | None = None
    default_head_dim: int | None = None
    # 10000 is the paper's base (RoFormer) and what configs that predate the field mean.
    default_theta: float = 10000.0
    experts: Callable[[Fields, int], MoeConfig | None] = no_experts


DIALECTS: Mapping[str, Dialect] = {
    "LlamaForCausalLM": Dialect(
        attention_bias=lambda f: f.flag("attention_bias", False),
        mlp_bias=lambda f: f.flag("mlp_bias", False),
        qk_norm=False,
        windows=_full_attention,
    ),
    "MistralForCausalLM": Dialect(
        attention_bias=_never("attention_bias"),
        mlp_bias=_never("mlp_bias"),
        qk_norm=False,
        windows=_window_everywhere,
        default_kv_heads=8,
    ),
    # Qwen2 always has biases on q, k and v (never on o), and no field that says so.
    "Qwen2ForCausalLM": Dialect(
        attention_bias=lambda _: True,
        mlp_bias=_never("mlp_bias"),
        qk_norm=False,
        windows=_window_if_used,
        default_kv_heads=32,
    ),
    "Qwen3ForCausalLM": Dialect(
        attention_bias=lambda f: f.flag("attention_bias", False),
        mlp_bias=_never("mlp_bias"),
        qk_norm=True,
        windows=_window_if_used,
        default_kv_heads=32,
        default_head_dim=128,  # Qwen3Config's own default: head_dim never follows from hidden_size there
    ),
    "MixtralForCausalLM": Dialect(
        attention_bias=_never("attention_bias"),
        mlp_bias=_never("mlp_bias"),
        qk_norm=False,
        windows=_window_if_given,
        default_kv_heads=8,
        default_theta=1e6,
        experts=mixtral_experts,
    ),
    "Qwen3MoeForCausalLM": Dialect(
        attention_bias=lambda f: f.flag("attention_bias", False),
        mlp_bias=_never("mlp_bias"),
        qk_norm=True,
        windows=_one_window_if_used,
        default_kv_heads=4,
        experts=qwen3_experts,
    ),
}
