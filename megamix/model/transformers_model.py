"""The family of transformers' own modules: most text models that transformers has, on data-parallel ranks.

transformers is imported where it is used: that takes two seconds.
"""

from __future__ import annotations

import copy
import inspect
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from megamix.base.git_lfs import refuse_pointer
from megamix.base.values import has_values
from megamix.config import DecoderConfig, TransformersConfig, architecture
from megamix.data.loader import IGNORE
from megamix.model.cross_entropy import Slopes, compiled_slopes, linear_cross_entropy, slopes
from megamix.model.language_model import Cache, Cost, Costs, Draw, LanguageModel, compile_blocks
from megamix.model.layers import ParamRule
from megamix.model.ops import Ops
from megamix.model.sizes import is_repeated

log = logging.getLogger("megamix")
_PREFIX = "hf."
_OLD_BUFFERS = r"rotary_emb\.inv_freq|(^|\.)position_ids$"  # of older files: no model of transformers reads them
# Logits may differ by these shares of the largest: in forwards of one shape, where only experts sum in another order,
# and of a document behind another one and alone.
_SAME, _ALIKE = 1e-5, 1e-4


class LossHead(nn.Linear):
    """The output embedding. Within `giving_losses` it returns a loss in place of logits, which it never holds."""

    targets: Tensor | None = None
    loss: Tensor | None = None  # the last one that it returned

    def __init__(self, weight: nn.Parameter, slopes: Slopes = slopes) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight, self.slopes = weight, slopes

    def forward(self, x: Tensor) -> Tensor:
        if self.targets is None:
            return super().forward(x)
        self.loss = linear_cross_entropy(x, self.weight, self.targets, self.slopes)
        return self.loss

    @contextmanager
    def giving_losses(self, targets: Tensor) -> Iterator[None]:
        self.targets = targets
        try:
            yield
        finally:
            self.targets = self.loss = None


@dataclass
class TheirCache:
    """A cache of transformers. `length`: the positions that it has seen; it stays 0 for a model that takes none."""

    kept: Any
    length: int = 0


class TransformersModel(LanguageModel):
    """A causal language model of transformers. Its parameters have transformers' names behind `hf.`."""

    name, section = "transformers", cast(type[DecoderConfig], TransformersConfig)  # it has the same sizes
    tables: ClassVar[Sequence[str]] = ("*embed*.weight", "*wte.weight", "*wpe.weight", "*lm_head.weight")
    runs_on_meta = False
    config: TransformersConfig

    def __init__(self, config: TransformersConfig, ops: Ops | None = None, like: Sequence[int] | None = None) -> None:
        """Build the modules, and give them their first weights unless they are on meta or fake. `like`: as in Decoder.
        `ops`: not used, the modules compute as transformers does.
        """
        super().__init__()
        like = range(config.num_layers) if like is None else like
        self.config, self.is_compiled = config, config.compile
        empty = torch.empty(0)
        self.hf = _first_weights(config, torch.initial_seed()) if has_values(empty) else _built(config.config_json)
        _refuse_untrained(self.hf)
        if empty.is_meta:
            _fill_buffers(self.hf)
        if [*like] != [*range(config.num_layers)]:
            self.config = config.with_layers(like)
            _take_blocks(self.hf, like, self.config.theirs)
        self.head = _put_loss_head(self.hf, config.compile) if _ends_with_head(config.config_json) else None
        if config.recompute != "none":
            theirs = self.hf  # the second name is that of transformers before 5.23
            enable = getattr(theirs, "activation_checkpointing_enable", None) or theirs.gradient_checkpointing_enable
            enable({"use_reentrant": False})
            for block, layer in zip(self.blocks, like, strict=True):
                block.gradient_checkpointing = is_repeated(config, layer)  # type: ignore[assignment]  # nn.Module takes any
        if config.compile:
            compile_blocks(self.blocks)
        self.rules = dict.fromkeys((name for name, _ in self.named_parameters(remove_duplicate=False)), _WHOLE)

    @property
    def blocks(self) -> nn.ModuleList:  # type: ignore[override]  # an attribute in the base class
        return _blocks(self.hf)

    @property
    def units(self) -> list[nn.Module]:
        head = self.hf.get_output_embeddings()
        return [self.hf.get_input_embeddings(), *self.blocks, *([] if head is None else [head])]

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        num_documents: int = 0,
        deal: Tensor | None = None,
        *,
        cache: Any = None,
        layers: range | None = None,
    ) -> Tensor:
        """Return logits or the loss, as a Decoder does. Positions that begin anew keep documents apart, if `draws` has
        found that they do. `num_documents`, `deal`, `layers`: not used.
        """
        num_positions = tokens.shape[1] + (0 if cache is None else cache.length)
        self.check_length(num_positions)
        given: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
        if positions is not None:
            given["position_ids"] = positions.expand(tokens.shape)
        if cache is not None and cache.kept is not None:
            given |= {"past_key_values": cache.kept, "use_cache": True}
            cache.length = num_positions
        if targets is None:
            logits: Tensor = self.hf(**given).logits
            return logits if cache is None else logits[:, -1:]
        if self.head is None:
            wide = self.hf(**given).logits.float().flatten(0, -2)
            return cross_entropy(wide, targets.flatten(), ignore_index=IGNORE, reduction="sum") / targets.numel()
        with self.head.giving_losses(targets):
            loss: Tensor = self.hf(**given).logits
        return loss

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # half() would round the tables, and to_empty() would leave them without values: they follow the device alone.
        modules = list(self.modules())
        kept = [(module._buffers, name, table) for module in modules for name, table in module._buffers.items()]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # untyped in torch
        for buffers, name, table in kept:
            moved = buffers[name]
            if table is not None and moved is not None and has_values(table):
                buffers[name] = table.to(moved.device)
        if next(self.parameters()).dtype == torch.float64 and getattr(self.hf.config, "_experts_implementation", None):
            self.hf.set_experts_implementation("eager")  # torch's grouped products have no FP64
        return self

    def place_buffers(self, device: torch.device) -> None:
        for module in self.modules():
            for name, table in module._buffers.items():
                module._buffers[name] = None if table is None else table.to(device)

    def new_cache(self, room: int) -> Cache:
        from transformers import DynamicCache

        takes = "past_key_values" in inspect.signature(self.hf.forward).parameters
        return TheirCache(DynamicCache(config=self.hf.config) if takes else None)

    def draws(self, seed: int, *, packed: bool) -> Draw:
        whole = _first_weights(self.config, seed)
        if packed and not _keeps_documents_apart(whole):
            raise ValueError(
                'data.packing: got "documents" or "best_fit", but the positions of a model of type '
                f"{self.hf.config.model_type} do not keep documents apart: a token sees the documents before its own; "
                'write packing = "none"'
            )
        values = {_PREFIX + name: param.detach().view(-1) for name, param in whole.named_parameters()}

        def draw(out: Tensor, *, name: str, first: int = 0, **_: Any) -> None:
            out.copy_(values[name][first : first + out.numel()])

        return draw

    def tie(self) -> None:
        self.hf.tie_weights()

    def save(self, folder: Path, shard_size: int) -> None:
        """Write a folder that transformers loads. `shard_size`: most bytes of a file, where a tensor is not larger."""
        if self.head is not None:  # transformers writes no class that it does not know
            output = nn.Linear(self.head.in_features, self.head.out_features, bias=False, device="meta")
            output.weight = self.head.weight
            self.hf.set_output_embeddings(output)
        self.hf.save_pretrained(folder, max_shard_size=shard_size)

    @classmethod
    def kind(cls, config: TransformersConfig, layer: int) -> int:
        return _kinds(config.config_json)[layer]

    @classmethod
    def effective(cls, config: TransformersConfig) -> dict[str, Any]:
        # What transformers reads in a config.json, which another version of transformers may have written.
        return dict(config) | {"config_json": config.theirs.to_dict() | {"transformers_version": None}}

    @classmethod
    def on_meta(cls, config: TransformersConfig, like: Sequence[int] | None = None) -> Self:
        from torch._subclasses.fake_tensor import unset_fake_temporarily  # takes a second

        with unset_fake_temporarily():  # their constants would be tensors of the device meta that are not fake
            return super().on_meta(config, like)

    @classmethod
    def part(cls, config: TransformersConfig, layers: Sequence[int]) -> Self:
        return cls(config)

    @classmethod
    def sketch(cls, config: TransformersConfig) -> Self:
        try:
            return cls.on_meta(config)
        except (RuntimeError, OverflowError, TypeError) as error:
            raise ValueError(f"config.json: transformers computes no such model: {_told(error)}") from None

    @classmethod
    def aliases(cls, config: TransformersConfig) -> dict[str, set[str]]:
        names = defaultdict[nn.Parameter, list[str]](list)
        for name, param in cls.sketch(config).named_parameters(remove_duplicate=False):
            names[param].append(name)
        return {first: set(others) for first, *others in names.values() if others}

    @classmethod
    def costs(cls, config: TransformersConfig) -> Costs:
        """Count 6 operations for each weight of a linear layer, and of a stack of experts for the share that a token
        uses; for attention as `flops_per_token` does, where the configuration names heads.
        """
        model = cls.sketch(config)
        theirs, head = model.hf.config, model.hf.get_output_embeddings()
        heads = getattr(theirs, "num_attention_heads", 0)
        head_dim = getattr(theirs, "head_dim", None) or config.hidden_size // max(heads, 1)
        experts = next((n for key in _EXPERTS if (n := getattr(theirs, key, None))), 1)
        used = (getattr(theirs, "num_experts_per_tok", None) or 1) / experts

        def flops(part: nn.Module) -> int:
            shares = {2: 1.0, 3: used}
            return int(sum(6 * shares.get(param.dim(), 0.0) * param.numel() for param in part.parameters()))

        attention = 12 * heads * head_dim * config.seq_len
        blocks = [Cost(Cost.of(block).params, flops(block) + attention) for block in model.blocks]
        last = Cost(0, 0) if head is None else Cost(head.weight.numel(), 6 * head.weight.numel())
        tied = last.params if config.tie_embeddings else 0
        whole = sum(param.numel() for param in model.parameters())
        first = Cost(whole - sum(block.params for block in blocks) - last.params + tied, 0)
        return Costs(first, blocks, last, tied)


_WHOLE = ParamRule("zeros")  # not divided; `draws` knows the values
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def _quiet() -> Any:
    """Return transformers, without its progress bars and advice."""
    import transformers

    logging: Any = transformers.utils.logging  # its functions have no types
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return transformers


def _built(config_json: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return the model with weights of its own rules, on torch's default device.

    Raises: ValueError saying what transformers does not take.
    """
    try:
        return _quiet().AutoModelForCausalLM.from_config(copy.deepcopy(architecture(config_json)), dtype=dtype)
    except Exception as error:  # whatever a config.json makes transformers' modules raise
        raise ValueError(f"config.json: transformers builds no such model: {_told(error)}") from None


def _told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def _refuse_untrained(hf: Any) -> None:
    """Refuse what a job would leave as it is. Raises: ValueError naming a parameter that gradients do not train, or a
    buffer that is saved with the parameters.
    """
    saved = hf.state_dict().keys()
    found = {name: "a parameter without a gradient" for name, param in hf.named_parameters() if not param.requires_grad}
    found |= {name: "a buffer that is saved" for name, _ in hf.named_buffers() if name in saved}
    for name, what in found.items():
        raise ValueError(
            f'model.family: got "transformers", but a model of type {hf.config.model_type} has {name}, {what}, which a '
            "job does not train; train such a model through the library (docs/library.md)"
        )


def _first_weights(config: TransformersConfig, seed: int) -> Any:
    """Return the model with the weights from which training starts, FP32, on the CPU.

    Raises: ValueError if the folder has no weights to start from, or other ones than those of its config.json; OSError.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        if not config.has_weights():
            return _predicting(_built(config.config_json))
        files = sorted(Path(config.folder).glob("*.safetensors"))
        try:
            for file in files:
                refuse_pointer(file)
            model, told = _quiet().AutoModelForCausalLM.from_pretrained(
                config.folder, config=copy.deepcopy(config.theirs), dtype=torch.float32, local_files_only=True,
                use_safetensors=True, trust_remote_code=False, output_loading_info=True,
            )  # fmt: skip
        except Exception as error:  # whatever broken files make transformers and safetensors raise
            raise ValueError(f"model.folder: transformers cannot load {config.folder}: {_told(error)}") from None
    if wrong := [f"{kind.removesuffix('_keys')} {sorted(map(str, keys))[:4]}" for kind, keys in told.items() if keys]:
        raise ValueError(
            f"model.folder: the weights in {config.folder} are not those of its config.json: {'; '.join(wrong)}; does "
            "that file lack a key, as tie_word_embeddings, or is one changed?"
        )
    _judge_stored(model, config, files)
    return _predicting(model)


def _judge_stored(hf: Any, config: TransformersConfig, files: list[Path]) -> None:
    """Log the stored tensors that transformers passes over. Raises: ValueError naming one that config.json ties to
    another, and that has other values: transformers keeps it, and such a model has no place for it.
    """
    with torch.device("meta"):
        tied = dict(_built(config.config_json).named_parameters())
    if own := [name for name, _ in hf.named_parameters() if name not in tied]:
        raise ValueError(
            f"model.folder: {own[0]} in {config.folder} is not the tensor that its config.json ties it to; write "
            "tie_word_embeddings = false into that file"
        )
    passed_over = re.compile("|".join([*(hf._keys_to_ignore_on_load_unexpected or []), _OLD_BUFFERS]))
    opened: list[Any] = [safe_open(path, "pt") for path in files]
    if names := [name for file in opened for name in file.keys() if passed_over.search(name)]:  # noqa: SIM118  # no mapping
        log.warning("%s: %d tensors are not read, as in transformers: %s", config.folder, len(names), names[:4])


@torch.no_grad()
def _fill_buffers(hf: Any) -> None:
    """Give the buffers of a model on meta their values, on the CPU.

    Raises: ValueError naming one that the model's own rules leave as memory was: it stays what it was filled with.
    """
    filled = list[dict[str, Tensor]]()
    for value in (0, 1):
        with torch.device("cpu"):
            for module in hf.modules():
                for name, table in module.named_buffers(recurse=False):
                    module._buffers[name] = torch.full_like(table, value, device="cpu")
            for module in hf.modules():  # of all: Falcon-H1's model sets the buffers of its layers
                with suppress(Exception):  # whatever it raises, a buffer that stays without values is told
                    hf._init_weights(module)
        filled.append(dict(hf.named_buffers()))
    for name, table in filled[0].items():
        if not torch.equal(table, filled[1][name]):
            raise ValueError(
                f"model.folder: transformers gives no values to {name}, a buffer of a model of type "
                f"{hf.config.model_type}, which no job can train right; take one that does not"
            )


def _blocks(hf: Any) -> nn.ModuleList:
    """Return the blocks: the first list of as many modules as there are layers. Raises: ValueError if there is none."""
    lists = (module for module in hf.modules() if isinstance(module, nn.ModuleList))
    layers = hf.config.num_hidden_layers
    if (found := next((each for each in lists if len(each) == layers > 0), None)) is None:
        raise ValueError(f"config.json: num_hidden_layers is {layers}, and the model has no list of as many blocks")
    return found


def _take_blocks(hf: Any, like: Sequence[int], theirs: Any) -> None:
    """Give a model copies of these blocks alone, in this order. `theirs`: the configuration of such a model."""
    blocks = _blocks(hf)
    taken = [copy.deepcopy(blocks[layer]) for layer in like]
    del blocks[:]
    blocks.extend(taken)
    hf.config.num_hidden_layers = len(like)
    if kinds := getattr(theirs, "layer_types", None):
        hf.config.layer_types = kinds


def _put_loss_head(hf: Any, compiles: bool) -> LossHead:
    head = LossHead(hf.get_output_embeddings().weight, compiled_slopes() if compiles else slopes)
    hf.set_output_embeddings(head)
    return head


@cache
def _ends_with_head(config_json: str) -> bool:
    """Return whether the logits are what a linear output embedding returns, without a bias and anything behind it."""
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily  # takes a second

    with unset_fake_temporarily(), FakeTensorMode(), torch.device("cpu"), torch.no_grad():
        hf = _built(config_json, torch.bfloat16)
        output = hf.get_output_embeddings()
        if type(output) is not nn.Linear or output.bias is not None:
            return False
        head = _put_loss_head(hf, compiles=False)
        tokens = torch.zeros(1, 2, dtype=torch.int64)
        with head.giving_losses(tokens):
            return hf(input_ids=tokens, use_cache=False).logits is head.loss


@cache
def _kinds(config_json: str) -> list[int]:
    """Return for each layer the first layer whose block has the same parameters and the same type of attention."""
    with torch.device("meta"):
        hf = _built(config_json)
    types = getattr(hf.config, "layer_types", None) or [""] * hf.config.num_hidden_layers
    first: dict[Any, int] = {}
    return [
        first.setdefault((kind, *((name, param.shape) for name, param in block.named_parameters())), layer)
        for layer, (kind, block) in enumerate(zip(types, _blocks(hf), strict=True))
    ]


@torch.no_grad()
def _predicting(hf: Any) -> Any:
    """Return the model. Raises: ValueError if logits depend on later tokens, or on noise in a forward of a training."""
    trains, tokens = hf.training, torch.arange(1, 17)[None] % hf.config.vocab_size
    changed = torch.where(torch.arange(16) < 8, tokens, (tokens + 1) % hf.config.vocab_size)
    logits, others = (hf.eval()(input_ids=each, use_cache=False).logits for each in (tokens, changed))
    in_training = hf.train()(input_ids=tokens, use_cache=False).logits
    hf.train(trains)
    for found, told in (
        ((others - logits)[:, :8], "sees later tokens"),
        (in_training - logits, "draws noise in training"),
    ):
        if float(found.abs().max()) > _SAME * float(logits.abs().max()):
            raise ValueError(
                f"model.folder: a model of type {hf.config.model_type} with this config.json {told}, which no job can "
                "train right; take one that does not"
            )
    return hf


@torch.no_grad()
def _keeps_documents_apart(hf: Any) -> bool:
    """Return whether a document's logits are the same behind another document, behind a changed one, and alone."""
    if "position_ids" not in inspect.signature(hf.forward).parameters:
        return False
    tokens = torch.arange(1, 17)[None] % hf.config.vocab_size
    changed = torch.where(torch.arange(16) < 7, (tokens + 1) % hf.config.vocab_size, tokens)
    positions = torch.cat((torch.arange(7), torch.arange(9)))[None]
    hf.eval()
    packed, other = (
        hf(input_ids=each, position_ids=positions, use_cache=False).logits[:, 7:] for each in (tokens, changed)
    )
    alone = hf(input_ids=tokens[:, 7:], use_cache=False).logits
    # A convolution reads a few tokens across a border: too little to see beside the rounding of another shape.
    most = alone.abs().max()
    return bool((packed - other).abs().max() <= _SAME * most and (packed - alone).abs().max() <= _ALIKE * most)
