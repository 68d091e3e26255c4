"""Fixed states of layers that do not grow: convolutions, state spaces, linear attention.

Invariant: elements as the `update_conv_state` and `update_recurrent_state` of transformers 5.24 keep them: convolution
windows in the model's number format, recurrent states in float32 whatever that is. A state whose size the config does
not tell in a way known here is None, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from compaction.kv.geometry.fields import Config, hidden_size, optional, positive

__all__ = ["State", "state_of"]

_MAMBA1 = {"mamba", "falcon_mamba", "jamba", "zamba"}
_MAMBA2 = {"mamba2", "bamba", "granitemoehybrid", "falcon_h1", "zamba2", "nemotron_h"}


@dataclass(frozen=True, slots=True)
class State:
    """Elements of one layer's state: the convolution's window, and what is carried on in float32."""

    convolution: int
    recurrent: int = 0

    def bytes(self, element_bytes: float) -> int:
        """Bytes, given those of one of the model's own elements; quantising keys and values does not touch a state."""
        return int(self.convolution * max(2, element_bytes)) + 4 * self.recurrent


def state_of(config: Config, name: str) -> State | None:
    """The state of a layer of this type; None where it is not known."""
    if name == "conv":
        return State(hidden_size(config) * positive(config, "conv_L_cache"))
    kind = config.get("model_type")
    if kind in _MAMBA1 | _MAMBA2:
        return _state_space(config, grouped=kind in _MAMBA2)
    if config.get("linear_num_value_heads"):
        return _gated_delta(config)
    if kind == "kimi_linear":
        return _kimi(config)
    return None


def _state_space(config: Config, grouped: bool) -> State:
    """Mamba (arXiv:2312.00752) convolves x alone, Mamba-2 (arXiv:2405.21060) x, B and C of all groups."""
    inner = _inner(config)
    size = positive(config, "mamba_d_state", "ssm_state_size", "state_size")
    kernel = positive(config, "mamba_d_conv", "conv_kernel")
    groups = positive(config, "mamba_n_groups", "mamba_ngroups", "n_groups") if grouped else 0
    return State((inner + 2 * groups * size) * kernel, inner * size)


def _inner(config: Config) -> int:
    given = optional(config, "mamba_d_ssm")
    if given is not None:
        return given
    if config.get("model_type") == "nemotron_h":
        return positive(config, "mamba_num_heads") * positive(config, "mamba_head_dim")
    expand = config.get("mamba_expand", config.get("expand", 2))
    return int(expand * hidden_size(config))


def _gated_delta(config: Config) -> State:
    """Gated DeltaNet (arXiv:2412.06464): a key by value matrix for each value head, a window over q, k and v."""
    keys = positive(config, "linear_num_key_heads") * positive(config, "linear_key_head_dim")
    heads, width = positive(config, "linear_num_value_heads"), positive(config, "linear_value_head_dim")
    convolution = (2 * keys + heads * width) * positive(config, "linear_conv_kernel_dim")
    return State(convolution, heads * positive(config, "linear_key_head_dim") * width)


def _kimi(config: Config) -> State:
    """Kimi Delta Attention (arXiv:2510.26692); checkpoints keep the sizes in `linear_attn_config`."""
    inner = config.get("linear_attn_config") or {}
    heads = positive({**config, **inner}, "linear_num_heads", "num_heads")
    width = positive({**config, **inner}, "linear_head_dim", "head_dim")
    kernel = positive({**config, **inner}, "linear_conv_kernel_dim", "short_conv_kernel_size")
    return State(3 * heads * width * kernel, heads * width * width)
