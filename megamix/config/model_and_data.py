"""The sections [model] and [data].

GPT-2, Llama and their relatives are settings of the same keys (docs/models.md); tokens are mixed and packed as
docs/data.md says.
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    Tag,
    WrapSerializer,
)
from pydantic_core.core_schema import ValidationInfo

from megamix.config.choices import ChosenTable, ExtendedTable, OneOf, left_out
from megamix.plugins import FAMILIES, SOURCES, Registry, Section
from megamix.settings.limits import Share

FFN_MULTIPLE = 64  # matrix units work in tiles; a ragged inner width would leave part of the last one idle
# Samples after which a blend repeats: its order is worked out for so many when a run starts, in under a second.
MOST_SAMPLES = 1_000_000

_SET_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")  # a validation set's: it becomes part of a tag
SPLIT_SET = "split"  # name of data.split's part beside sets of data.valid

Text = Annotated[str, Field(min_length=1)]
_Off = Literal[False]  # in place of a table
# A number that FP32 holds, and its inverse: models are computed with it.
Factor = Annotated[PositiveFloat, Field(ge=2.0**-126, le=2.0**126)]


def _above_low(value: float, info: ValidationInfo) -> float:
    low = (info.data or {}).get("low_freq_factor", 0.0)  # absent if it failed its own check, or if there is no table
    if value <= low:
        raise ValueError(f"must be greater than low_freq_factor {low}")
    return value


_SCALINGS = Registry("rule of rotary wavelengths")


class RopeScaling(Section):
    """Stretches rotary wavelengths, for longer sequences than in the first training."""

    rule: Annotated[str, OneOf(_SCALINGS), Field(examples=["llama3"])]
    """linear stretches every wavelength; llama3 and yarn only the long ones, as Llama 3.1 and YaRN."""
    factor: Annotated[float, Field(ge=1, examples=[8.0])]
    """Multiplies a wavelength."""


class Llama3Scaling(RopeScaling):
    """The rule of Llama 3.1."""

    # The default of high_freq_factor may be too small for a low_freq_factor.
    model_config = ConfigDict(validate_default=True)

    low_freq_factor: PositiveFloat = 1.0
    """Wavelengths above original_seq_len/low_freq_factor get the whole factor."""
    high_freq_factor: Annotated[PositiveFloat, AfterValidator(_above_low)] = 4.0
    """Wavelengths below original_seq_len/high_freq_factor stay; greater than low_freq_factor."""
    original_seq_len: PositiveInt = 8192
    """Sequence length of the earlier training."""


class YarnScaling(RopeScaling):
    """The rule of YaRN."""

    beta_fast: PositiveFloat = 32.0
    """Wavelengths that turn more often in original_seq_len stay."""
    beta_slow: PositiveFloat = 1.0
    """Wavelengths that turn less often get the whole factor."""
    attention_factor: PositiveFloat | None = None
    """Factor of rotated queries and keys. Not set: 1 + ln(factor)/10."""
    original_seq_len: PositiveInt = 8192
    """Sequence length of the earlier training."""


_SCALINGS.sections |= {"linear": RopeScaling, "llama3": Llama3Scaling, "yarn": YarnScaling}
SCALING = ChosenTable(_SCALINGS, RopeScaling, "rule")


class RopeConfig(Section):
    """Rotary positions: each position turns queries and keys by angles of its own."""

    theta: Factor = 10000.0
    """Base of the wavelengths."""
    dim: PositiveInt | None = None
    """First elements of each head, which positions turn. Not set: head_dim."""
    unrotated_layers: Annotated[tuple[NonNegativeInt, ...], Field(strict=False, examples=[[3, 7]])] = ()
    """Layers without rotary positions, counted from 0."""
    scaling: Annotated[Annotated[RopeScaling, SCALING] | None, Field(examples=[{"rule": "llama3", "factor": 8.0}])] = (
        None
    )
    """Rule by which wavelengths are stretched. Not set: they are not."""


class WindowConfig(Section):
    """Windows of attention: in some layers a query sees the last keys alone."""

    sizes: Annotated[tuple[NonNegativeInt, ...], Field(strict=False, min_length=1, examples=[[1024, 1024, 1024, 0]])]
    """Keys that a query sees, its own included, in each layer; 0: all. A shorter list repeats."""
    rope_theta: Factor | None = None
    """Base of the wavelengths in layers with a window, which are not stretched then. Not set: as in other layers."""


class LatentSizes(Section):
    """Multi-head latent attention (DeepSeek-V2, V3): keys and values come from a narrow latent. num_kv_heads, head_dim,
    rope.dim, qk_norm, qkv_bias and attention_gate are refused beside it."""

    kv_rank: Annotated[PositiveInt, Field(examples=[512])]
    """Width of keys' and values' latent (kv_lora_rank)."""
    query_rank: Annotated[PositiveInt | None, Field(examples=[1536])] = None
    """Width of queries' latent (q_lora_rank). Not set: none."""
    unrotated_dim: Annotated[PositiveInt, Field(examples=[128])]
    """Elements of a query and key without positions (qk_nope_head_dim)."""
    rotary_dim: Annotated[PositiveInt, Field(examples=[64])]
    """Further elements, which positions turn (qk_rope_head_dim); all heads share the key's."""
    value_dim: Annotated[PositiveInt, Field(examples=[128])]
    """Elements of a value (v_head_dim)."""


class ExpertGroups(Section):
    """Groups of neighbouring experts. A token's experts lie in its best groups, each judged by its two best experts."""

    count: Annotated[PositiveInt, Field(ge=2, examples=[8])]
    """Groups of a layer."""
    top: PositiveInt = 1
    """Groups in which a token's experts lie."""


class ExpertsConfig(Section):
    """A mixture of experts: each token passes a few of many feed-forward parts; none is dropped."""

    num_experts: Annotated[PositiveInt, Field(examples=[64])]
    """Experts of a layer."""
    top_k: Annotated[PositiveInt, Field(examples=[8])]
    """Experts that a token passes."""
    ffn_hidden_size: Annotated[PositiveInt, Field(examples=[768])]
    """Inner width of one expert."""
    shared_ffn_hidden_size: PositiveInt | None = None
    """Inner width of one more feed-forward part for every token. Not set: none."""
    dense_layers: NonNegativeInt = 0
    """First layers with the feed-forward part of model.ffn_hidden_size in place of experts."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Score of an expert, from the router's logit; softmax is over all experts."""
    normalize: bool = True
    """Whether the scores of a token's experts are divided by their sum; with softmax, the softmax over them."""
    scale: PositiveFloat = 1.0
    """Factor of those scores."""
    groups: Annotated[ExpertGroups | None, Field(examples=[{"count": 8, "top": 4}])] = None
    """Groups of experts, of which a token passes a few. Not set: a token's experts may be any."""
    bias_rate: NonNegativeFloat = 0.001
    """Step by which an update moves an expert's bias, which counts in the choice alone, towards equal loads. 0: no
    biases."""
    balance_loss: NonNegativeFloat = 0.0
    """Factor of the loss of unequal loads within each sequence."""
    z_loss: NonNegativeFloat = 0.0
    """Factor of the mean of logsumexp(router logits)^2 in the gradient; 1e-3 is usual."""


def _number_or_share(value: object) -> object:
    if isinstance(value, float) and value >= 1:  # 1.0 is no share: does it mean one layer, or all?
        raise ValueError("must be a whole number of layers, or a share below 1")
    return value


class FirstLayers(Section):
    """The first layers, whose blocks backward computes again."""

    full: Annotated[PositiveInt | PositiveFloat, BeforeValidator(_number_or_share), Field(examples=[12])]
    """Number of layers, or share of all."""


# pydantic puts the tag of a union's part into the place of an error, which leaves it out: nobody has written it.
RECOMPUTE_TAGS = ("a word", "a table")
_WORD, _TABLE = map(Tag, RECOMPUTE_TAGS)
_Words = TypeVar("_Words")
Recompute = Annotated[
    Annotated[_Words, _WORD] | Annotated[FirstLayers, _TABLE],
    Discriminator(lambda value: RECOMPUTE_TAGS[isinstance(value, Mapping | FirstLayers)]),
]


class FamilyConfig(Section):
    """Holds the one key that every model has: its family."""

    family: Annotated[str, OneOf(FAMILIES)] = "transformer"
    """Kind of model, which decides the other keys."""


class DecoderConfig(FamilyConfig):
    """Holds the keys that every family reads; a plugin's section begins with these keys."""

    vocab_size: Annotated[PositiveInt, Field(examples=[2048])]
    """Rows of the embedding table, at least the tokenizer's tokens."""
    seq_len: Annotated[PositiveInt, Field(examples=[256])]
    """Tokens in one training sequence."""
    hidden_size: Annotated[PositiveInt, Field(examples=[192])]
    """Width of the residual stream; a multiple of num_heads unless head_dim or latent_attention is set."""
    num_layers: Annotated[PositiveInt, Field(examples=[4])]
    """Transformer blocks."""
    tie_embeddings: bool = True
    """Whether the head reads the embedding table instead of its own weight."""
    dropout: Share = 0.0
    """Share of the outputs of embedding and branches that training zeroes; drawn by training.seed, sample and try."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""
    z_loss: NonNegativeFloat = 0.0
    """Factor of logsumexp(logits)^2 in the training loss, which keeps logits small; 1e-4 is usual."""
    recompute: Recompute[Literal["none", "selective", "full"]] = "none"
    """What backward recomputes: nothing, the outputs of norms and activation function, or whole blocks, {full=12} those
    of the first 12 layers, {full=0.5} of half. Gradients stay the same."""
    compile: bool = False
    """Whether torch.compile compiles each block, on a CPU by a C++ compiler."""


class ModelConfig(DecoderConfig):
    """The decoder-only transformer."""

    num_heads: Annotated[PositiveInt, Field(examples=[6])]
    """Query heads."""
    num_kv_heads: PositiveInt | None = None
    """Key and value heads (GQA); divides num_heads. Not set: num_heads."""
    head_dim: PositiveInt | None = None
    """Width of one head. Not set: hidden_size/num_heads."""
    ffn_hidden_size: PositiveInt | None = None
    """Inner width of the feed-forward part. Not set: 4*hidden_size, or for swiglu and geglu 8/3*hidden_size rounded up
    to a multiple of 64."""
    norm: Literal["rmsnorm", "rmsnorm_1p", "layernorm"] = "rmsnorm"
    """Norm of attention, feed-forward part and the head's input; rmsnorm_1p multiplies by 1 + weight."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the mean square (rmsnorm) or variance (layernorm)."""
    rope: Annotated[
        RopeConfig | None,
        BeforeValidator(lambda value: None if value is False else value, json_schema_input_type=RopeConfig | _Off),
        WrapSerializer(lambda rope, dump: False if rope is None else dump(rope)),
    ] = left_out()
    """Rotary positions. false: learned ones, an added table of seq_len rows."""
    activation: Literal["swiglu", "geglu", "gelu", "gelu_tanh", "relu2"] = "swiglu"
    """Nonlinearity of the feed-forward part: gelu is exact, gelu_tanh GPT-2's approximation, relu2 relu(x)^2; swiglu
    and geglu (of gelu_tanh) multiply by a second projection."""
    bias: bool = False
    """Whether linear layers and layernorm have a bias."""
    qkv_bias: bool | None = None
    """Whether the projections to query, key and value have a bias. Not set: as bias."""
    mlp_bias: bool | None = None
    """Whether the feed-forward part has a bias. Not set: as bias."""
    qk_norm: Literal["none", "head", "all"] = "none"
    """RMSNorm of queries and keys before rotation, over each head or all heads together."""
    norm_place: Literal["before", "after", "both"] = "before"
    """Norms of the inputs of attention and feed-forward part, of their outputs, or both."""
    window: Annotated[WindowConfig | None, Field(examples=[{"sizes": [1024, 1024, 1024, 0]}])] = None
    """Windows of attention. Not set: a query sees all keys before it."""
    attention_softcap: Factor | None = None
    """Scores of attention become cap*tanh(score/cap), which is slow: no GPU kernel has it. Not set: they stay."""
    logit_softcap: Factor | None = None
    """Logits become cap*tanh(logit/cap). Not set: they stay."""
    attention_gate: bool = False
    """Whether heads are multiplied by the sigmoid of a further projection before the last one."""
    latent_attention: Annotated[
        LatentSizes | None,
        Field(examples=[{"kv_rank": 512, "unrotated_dim": 128, "rotary_dim": 64, "value_dim": 128}]),
    ] = None
    """Sizes of multi-head latent attention. Not set: the attention of the keys above."""
    experts: Annotated[
        ExpertsConfig | None, Field(examples=[{"num_experts": 64, "top_k": 8, "ffn_hidden_size": 768}])
    ] = None
    """Experts in place of the feed-forward part. Not set: there are none."""
    attention_scale: Factor | None = None
    """Factor of attention's scores. Not set: 1/sqrt(elements of a head's query)."""
    embedding_scale: Factor = 1.0
    """Factor of embeddings."""
    residual_scale: Factor = 1.0
    """Factor of each attention and feed-forward part before the residual sum."""
    logit_divisor: Factor = 1.0
    """Divides the logits."""
    scaled_init: bool = True
    """Whether weights that end a branch start smaller by sqrt(2*num_layers), as in GPT-2."""


FAMILIES.sections |= {"transformer": ModelConfig}
FAMILY = ChosenTable(FAMILIES, FamilyConfig, "family")


def default_ffn_hidden_size(activation: str, hidden_size: int) -> int:
    """Return model.ffn_hidden_size where it is not set. Of three matrices it makes as many weights as of two."""
    if activation in ("swiglu", "geglu"):
        return -(-8 * hidden_size // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE
    return 4 * hidden_size


class DataSource(Section):
    """A source of samples, also in [[data.valid]]; "PREFIX" is short for one with that path."""

    path: Annotated[Text | None, Field(examples=["runs/data/train"])] = None
    """Prefix of the tokens: PREFIX.bin and PREFIX.idx."""
    markov: Annotated[PositiveInt | None, Field(examples=[4])] = None
    """Instead of path: a chain in which so many tokens may follow each, equally likely; no loss goes below ln(markov).
    """
    weight: Annotated[PositiveFloat | None, Field(examples=[1.0])] = None
    """Share of the samples, on any scale. Without weights all files are one corpus."""

    @property
    def name(self) -> str | int:
        """Return what it is, weight aside: equal for two spellings of one path."""
        if self.path is not None:
            return os.path.normpath(self.path)
        return self.markov or str(self.model_dump(exclude={"weight"}, exclude_none=True))


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest whole numbers in the same proportions, of the weights as they are written: 0.1 is a tenth."""
    exact = [Decimal(repr(weight)).as_integer_ratio() for weight in weights]
    common = math.lcm(*(denominator for _, denominator in exact))
    whole = [numerator * (common // denominator) for numerator, denominator in exact]
    unit = math.gcd(*whole)
    return tuple(number // unit for number in whole)


SOURCES.reserved = DataSource.model_fields
_SOURCE = ExtendedTable(SOURCES, DataSource)
_Source = Annotated[DataSource, _SOURCE]


def data_source(table: Mapping[str, Any]) -> DataSource:
    """Return one of the tables in data.train."""
    return cast(DataSource, _SOURCE.section(table, {}).model_validate(table))


def _as_list(value: object) -> object:
    """Return a list of tables; one prefix stands for a list with it alone."""
    if value == "":
        raise ValueError("must not be empty")
    if not isinstance(value, str | list | tuple):
        raise ValueError("must be text in quotes, or a list of tables")
    return [{"path": value}] if isinstance(value, str) else value


def _check_source(source: DataSource) -> DataSource:
    kinds = ("path", "markov", *SOURCES.sections)
    if sum(getattr(source, kind) is not None for kind in kinds) != 1:
        raise ValueError(f"must have either {' or '.join(kinds)}")
    return source


def _check_sources(sources: tuple[DataSource, ...]) -> tuple[DataSource, ...]:
    if not sources:
        raise ValueError("must not be empty")
    weights = [source.weight for source in sources if source.weight is not None]
    if weights and len(weights) < len(sources):
        raise ValueError("must have a weight in every table, or in none")
    if not weights and len(sources) > 1 and any(source.path is None for source in sources):
        raise ValueError("must have weights, because markov has no end")
    if len({source.name for source in sources}) < len(sources):
        raise ValueError("must have each path and each markov once, with the sum of its weights")
    if weights and (total := sum(whole := whole_weights(weights))) > MOST_SAMPLES:
        room = MOST_SAMPLES - len(sources)
        near = whole_weights([float(max(1, weight * room // total)) for weight in whole])
        shown = ", ".join(map(str, near[:20])) + (", and so on" if len(near) > 20 else "")
        raise ValueError(
            f"must have weights that are whole multiples of a {MOST_SAMPLES:,}th of their sum, such as {shown}"
        )
    return sources


Sources = Annotated[
    tuple[Annotated[_Source, AfterValidator(_check_source)], ...],
    BeforeValidator(_as_list, json_schema_input_type=str | list[_Source]),
    AfterValidator(_check_sources),
    Field(strict=False, examples=["runs/data/train"]),
]


def _as_sets(value: object) -> object:
    """Return a table of validation sets by name; "" names the only one, if it is written without a name."""
    if not isinstance(value, Mapping):
        return {"": value}
    taken = (*DataSource.model_fields, SPLIT_SET)  # a source's keys, for who forgets the list around a source
    wrong = [name for name in value if name in taken or not _SET_NAME.fullmatch(str(name))]
    if wrong or not value:
        unlike = f', unlike "{wrong[0]}"' if wrong else ""
        raise ValueError(
            f"must name each set by 1 to 40 letters, digits, _ and -, but not {' or '.join(taken)}{unlike}"
        )
    return value


def _as_written(sets: dict[str, Any], dump: SerializerFunctionWrapHandler) -> object:
    tables = dump(sets)
    return tables.get("", tables)


ValidSets = Annotated[
    dict[str, Sources],
    BeforeValidator(_as_sets, json_schema_input_type=Sources | dict[str, Sources]),
    WrapSerializer(_as_written),
]


class DataStage(Section):
    """Another mixture from a given sample on."""

    from_sample: Annotated[PositiveInt, Field(examples=[100000])]
    """First sample: the sequences that the run reads before."""
    train: Sources
    """Sources, as in data.train."""


def _check_stages(stages: tuple[DataStage, ...]) -> tuple[DataStage, ...]:
    starts = [stage.from_sample for stage in stages]
    if starts != sorted(set(starts)):
        raise ValueError("must have a larger from_sample in each table than in the one before")
    return stages


class DataConfig(Section):
    """Token files; paths are relative to the working folder."""

    train: Sources
    """Prefix of the training tokens, PREFIX.bin and PREFIX.idx; or tables, mixed by weight."""
    stages: Annotated[
        tuple[DataStage, ...],
        AfterValidator(_check_stages),
        Field(strict=False, examples=[[{"from_sample": 100000, "train": "runs/data/train"}]]),
    ] = ()
    """Mixtures that replace train later in the run."""
    valid: Annotated[ValidSets | None, Field(examples=["runs/data/valid"])] = None
    """The validation tokens, as train; or a table of sets by name, each with its own loss. Not set: no validation,
    unless split is set."""
    split: Annotated[tuple[PositiveFloat, PositiveFloat] | None, Field(strict=False, examples=[[95, 5]])] = None
    """Shares of each file's documents for training and validation, on any scale. Not set: train has all."""
    packing: Literal["none", "documents", "best_fit"] = "none"
    """none: a sequence continues into the next document. documents: attention stays within a document, positions
    restart, and its first token is not predicted. best_fit: so, and no document that fits in a sequence is cut."""
    tokenizer: Text | None = None
    """A tokenizer.json, for the sample of text at a run's end. Not set: no sample."""
