"""The section [model] and its tables: GPT-2, Llama and Qwen are settings of the same keys (docs/models.md)."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from megamix.config.fields import Section

FFN_MULTIPLE = 64  # matrix units work in tiles; a ragged inner width would leave part of the last one idle


class RopeScaling(Section):
    """How rotary wavelengths are stretched, so that a model reads further than it was first trained to."""

    model_config = ConfigDict(validate_default=True)  # high_freq_factor's may be too small for a low_freq_factor

    rule: Annotated[Literal["linear", "llama3"], Field(examples=["llama3"])]
    """linear stretches every wavelength by factor; llama3 only the long ones, as Llama 3.1 does."""
    factor: Annotated[float, Field(ge=1, examples=[8.0])]
    """What a wavelength is multiplied by."""
    low_freq_factor: PositiveFloat = 1.0
    """llama3: wavelengths above original_seq_len / low_freq_factor are stretched in full."""
    high_freq_factor: PositiveFloat = 4.0
    """llama3: wavelengths below original_seq_len / high_freq_factor stay; above low_freq_factor."""
    original_seq_len: PositiveInt = 8192
    """llama3: the sequence length of the training before."""

    @field_validator("high_freq_factor")
    @classmethod
    def _above_low(cls, value: float, info: ValidationInfo) -> float:
        low = info.data.get("low_freq_factor", 0.0)  # absent if it failed a check of its own
        if value <= low:
            raise ValueError(f"must be greater than low_freq_factor {low}")
        return value


class ModelConfig(Section):
    """The decoder-only transformer."""

    vocab_size: Annotated[PositiveInt, Field(examples=[2048])]
    """Rows of the embedding table; at least the number of tokens the tokenizer knows."""
    seq_len: Annotated[PositiveInt, Field(examples=[256])]
    """Tokens in one training sequence."""
    hidden_size: Annotated[PositiveInt, Field(examples=[192])]
    """Width of the residual stream; a multiple of num_heads, unless head_dim is set."""
    num_layers: Annotated[PositiveInt, Field(examples=[4])]
    """Number of transformer blocks."""
    num_heads: Annotated[PositiveInt, Field(examples=[6])]
    """Query heads of each attention."""
    num_kv_heads: PositiveInt | None = None
    """Key and value heads (grouped-query attention); divides num_heads. Not set: num_heads."""
    head_dim: PositiveInt | None = None
    """Width of one head. Not set: hidden_size / num_heads."""
    ffn_hidden_size: PositiveInt | None = None
    """Inner width of the feed-forward part. Not set: 4 * hidden_size for gelu and gelu_tanh, 8/3 * hidden_size rounded
    up to a multiple of 64 for swiglu."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalisation in front of attention, feed-forward part and head."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the mean square (rmsnorm) or variance (layernorm) before its root."""
    position: Literal["rotary", "learned"] = "rotary"
    """How a token learns its place: rotated queries and keys, or an added table of seq_len rows."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary wavelengths; only with position = "rotary"."""
    rope_scaling: Annotated[RopeScaling | None, Field(examples=[{"rule": "llama3", "factor": 8.0}])] = None
    """How rotary wavelengths are stretched. Not set: not at all."""
    activation: Literal["swiglu", "gelu", "gelu_tanh"] = "swiglu"
    """The feed-forward part's nonlinearity; gelu is the exact one, gelu_tanh the approximation of GPT-2."""
    bias: bool = False
    """Whether linear layers and layernorm carry a bias."""
    qkv_bias: bool | None = None
    """Whether the projections to query, key and value carry one. Not set: bias."""
    qk_norm: bool = False
    """Whether each head's query and key pass an RMSNorm before they are rotated."""
    tie_embeddings: bool = True
    """Whether the head reads the embedding table instead of its own weight."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the embedding's and each branch's outputs that training sets to zero, drawn by training.seed, sample
    and try."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""
    scaled_init: bool = True
    """Whether the weights that end a branch start smaller by sqrt(2 * num_layers), as GPT-2's."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What backward computes again instead of keeping it: nothing, the outputs of norms and activation function, or
    whole blocks; the same gradients."""
    compile: bool = False
    """Whether each block runs through torch.compile."""


def default_ffn_hidden_size(activation: str, hidden_size: int) -> int:
    """Where model.ffn_hidden_size is not set. SwiGLU's has as many weights as GELU's, three matrices for two."""
    if activation == "swiglu":
        return -(-8 * hidden_size // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE
    return 4 * hidden_size
