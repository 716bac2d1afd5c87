"""The section [model] of `family = "transformers"`: a config.json decides the model, and its sizes fill the keys.

No code that comes with a model is ever run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, PositiveInt, model_validator
from pydantic_core.core_schema import ValidationInfo

from megamix.base.git_lfs import refuse_pointer
from megamix.config.model_and_data import FamilyConfig, Recompute, Text
from megamix.plugins import FAMILIES

_UNREAD = ("auto_map", "return_dict")  # keys that name code, or the form of results


@cache
def architecture(text: str) -> Any:
    """Return transformers' configuration of a model, from the text of its config.json, without dropout and jitter.

    Keys that name code, as kernels of attention, are not read. Raises: ValueError saying what is wrong.
    """
    try:
        from transformers import AutoConfig  # takes 2 s
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError:
        raise ValueError("this family needs transformers 5; run pip install 'transformers>=5'") from None
    try:
        keys = {
            key: value for key, value in json.loads(text).items() if key not in _UNREAD and "_implementation" not in key
        }
        with TemporaryDirectory() as folder:  # of a file: transformers reads some keys from a file alone
            Path(folder, "config.json").write_text(json.dumps(keys), encoding="utf-8")
            found = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        kind, found.name_or_path = found.model_type, ""
    except Exception as error:  # whatever a file makes transformers raise
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"config.json: transformers does not take it: {told}") from None
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or found.get_text_config() is not found:
        raise ValueError(
            f"config.json: model_type {kind!r} is no text model of its own; save its text model alone "
            "(model.language_model.save_pretrained) and give that folder"
        )
    for key, value in found.to_dict().items():
        if ("drop" in key or "jitter" in key) and isinstance(value, float | int) and not isinstance(value, bool):
            setattr(found, key, 0.0)
    return found


def _text_in(folder: str) -> str:
    """Return the text of a folder's config.json on one line. Raises: OSError; ValueError for another content."""
    path = Path(folder, "config.json")
    refuse_pointer(path)
    return json.dumps(json.loads(path.read_text(encoding="utf-8")), separators=(",", ":"), sort_keys=True)


def _known(text: str) -> str:
    architecture(text)
    return text


def _readable(folder: str, info: ValidationInfo) -> str:
    if info.data.get("config_json") == "":  # nothing has been read, or nothing that transformers takes
        try:
            text = _text_in(folder)
        except FileNotFoundError:
            raise ValueError(
                f"there is no {Path(folder, 'config.json')}, and nothing is downloaded: hf download NAME --local-dir "
                "DIR makes a folder; a run that has begun goes on by the config.toml in its folder, which holds "
                "config_json"
            ) from None
        except (OSError, ValueError) as error:
            raise ValueError(f"its config.json cannot be read: {error}") from None
        architecture(text)
    return folder


def _value_of(key: str, kind: type, *default: object) -> Any:
    return property(lambda self: kind(getattr(self.theirs, key, *default)))


class TransformersConfig(FamilyConfig):
    """A text model of transformers, computed by its own modules, on data-parallel ranks. Its config.json decides the
    sizes; dropout is left out.
    """

    family: Literal["transformers"] = "transformers"
    """Name of the family."""
    config_json: Annotated[str, AfterValidator(_known)] = ""
    """Text of the folder's config.json, which a run keeps. Empty: it is read."""
    folder: Annotated[Text, AfterValidator(_readable), Field(examples=["models/gemma-3-270m"])]
    """Folder of config.json, and of safetensors if training starts from weights; read at a run's start."""
    seq_len: Annotated[PositiveInt, Field(examples=[1024])]
    """Tokens in one training sequence."""
    init: Literal["auto", "random", "folder"] = "auto"
    """First weights: drawn by transformers' rules and training.seed, or the folder's; auto: the folder's if it has any.
    """
    recompute: Recompute[Literal["none", "full"]] = "none"
    """What backward recomputes: nothing, or whole blocks, {full=12} those of the first 12 layers. Gradients stay the
    same."""
    compile: bool = False
    """Whether torch.compile compiles each block, on a CPU by a C++ compiler."""

    @model_validator(mode="before")
    @classmethod
    def _filled(cls, keys: Any) -> Any:
        if isinstance(keys, Mapping) and isinstance(folder := keys.get("folder"), str) and not keys.get("config_json"):
            with suppress(OSError, ValueError):  # `_readable` tells
                return {**keys, "config_json": _known(_text_in(folder))}
        return keys

    # The sizes under the names that every family has.
    dropout: ClassVar[float] = 0.0

    @property
    def theirs(self) -> Any:
        """Return transformers' configuration, shared by all who ask."""
        return architecture(self.config_json)

    vocab_size, hidden_size = _value_of("vocab_size", int), _value_of("hidden_size", int)
    num_layers = _value_of("num_hidden_layers", int)
    tie_embeddings = _value_of("tie_word_embeddings", bool, False)
    init_std = _value_of("initializer_range", float, 0.02)

    def has_weights(self) -> bool:
        """Return whether training starts from the folder's weights. Raises: ValueError if it cannot start from them."""
        folder = Path(self.folder)
        if self.init == "random" or any(folder.glob("*.safetensors")):
            return self.init != "random"
        if self.init == "folder":
            raise ValueError(
                f'model.init: got "folder", {folder} has no *.safetensors; write init = "random", or another folder'
            )
        if others := [*folder.glob("*.bin"), *folder.glob("*.pt*")]:
            raise ValueError(
                f'model.init: got "auto", {folder} has no *.safetensors, but {others[0].name}, whose reading may run '
                'code; save the model as safetensors, or write init = "random"'
            )
        return False

    def with_layers(self, like: Sequence[int]) -> Self:
        """Return the section of a model that has these layers' blocks, in this order."""
        keys = json.loads(self.config_json) | {"num_hidden_layers": len(like)}
        if kinds := getattr(self.theirs, "layer_types", None):
            keys["layer_types"] = [kinds[layer] for layer in like]
        return self.model_copy(update={"config_json": json.dumps(keys)})


def first_weights(model: FamilyConfig) -> str:
    """Return in words with what training starts, for a model that may start with a folder's weights; "" for others.

    Raises: ValueError if it cannot start with them.
    """
    if not isinstance(model, TransformersConfig):
        return ""
    if model.has_weights():
        return f"the weights in {model.folder}"
    return 'drawn weights, by init = "random"' if model.init == "random" else f"drawn weights: {model.folder} has none"


FAMILIES.sections |= {"transformers": TransformersConfig}
