"""Hugging Face formats of a family's models: the names of the tensors and of the keys in config.json."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import ValidationError

from megamix.config import DecoderConfig

Json = Mapping[str, Any]
_SHOWN = 80  # most characters of a file's value in a message
OTHERS = (
    'to train it as it is, write family = "transformers" and this folder under [model], if `megamix train --check` '
    "then takes it; to evaluate, generate or export what was trained so, give the folder of its run"
)


# Keys that change no logits where a format does not read them: of files, of tasks, of a training, and of a generation.
_WITHOUT_EFFECT = re.compile(
    "_.*|.*(_token_id|dropout|pdrop|_penalty|_cutoff|_ngram_size|label|labels|2id)|(assistant|summary|output|return)_.*"
    "|architectures|(model|problem)_type|(torch_)?dtype|typical_p|transformers_version|name_or_path|use_(cache|mrope)"
    "|task_specific_params|chunk_size_feed_forward|is_(encoder_)?decoder|pretraining_tp|n_ctx|reorder_and_upcast_attn"
    "|router_(aux_loss_coef|jitter_noise)|initializer_range|do_sample|early_stopping|(max|min)_length|temperature"
    "|top_[kp]|bad_words_ids|num_(beams|beam_groups|return_sequences|assistant_tokens.*)|remove_invalid_values"
    "|(begin_)?suppress_tokens|target_lookbehind|use_return_dict|cache_implementation|max_window_layers|hidden_act"
)


class Keys(dict[str, Any]):
    """A table of config.json, which notes the keys that are asked for."""

    def __init__(self, table: Json, defaults: Json = MappingProxyType({})) -> None:
        read = {key: Keys(value) if isinstance(value, dict) else value for key, value in table.items()}
        super().__init__({**defaults, **read})
        self.asked: set[str] = table.asked if isinstance(table, Keys) else set()  # a copy notes for both

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def unread(self) -> list[str]:
        """Return the keys that nobody has asked for, without those that never have an effect."""
        unread = list[str]()
        for key, value in self.items():
            if key not in self.asked:
                if value is not None and not _WITHOUT_EFFECT.fullmatch(key):
                    unread.append(key)
            elif isinstance(value, Keys):
                unread += [f"{key}.{name}" for name in value.unread()]
        return unread


class Location(NamedTuple):
    """The place of a module's weight and bias in a Hugging Face folder: a name, with `{}` for the block's number. A
    tensor may hold several of our modules one after the other, in our order. The matrices of a stack are tensors of
    their own: the name has a second `{}` for the matrix's number, and the module's name ends in `.*`.
    """

    name: str
    transposed: bool = False  # whether a matrix is stored as (in, out)


@dataclass(frozen=True, eq=False, slots=True)
class Format:
    """The format of one `model_type`. If config.json holds more than sizes, a subclass reads and writes it. A model is
    exported in the first format whose `read` gives it back from what `write` has written.
    """

    model_type: str
    architecture: str
    base: str  # prefix of all tensor names but the head's; a folder saved without the head has no prefix
    places: Mapping[str, Location]  # by the name of megamix's module, with `blocks` in place of `blocks.N`
    size_keys: Mapping[str, str]  # keys of config.json, by the size's name in the section [model]
    section: type[DecoderConfig]

    def read(self, json: Json) -> DecoderConfig:
        """Return the section that a config.json describes; `Keys` know then which were read.

        Raises: ValueError naming a missing key, or a setting that the model of megamix cannot compute.
        """
        return self.config_of(json)

    def write(self, config: Any) -> Json:
        """Return the keys of config.json that belong to this format, without those that are the same for every
        model.
        """
        return self.sizes_of(dict(config))

    def config_of(self, json: Json, **values: Any) -> DecoderConfig:
        """Build the section from these values and the sizes in config.json. Raises: ValueError naming a key."""
        values["init_std"] = json.get("initializer_range", 0.02)
        values.setdefault("tie_embeddings", json.get("tie_word_embeddings", True))
        for ours, theirs in self.size_keys.items():
            if theirs not in json:
                raise ValueError(f"config.json has no {theirs}")
            values[ours] = json[theirs]
        try:
            return self.section(**values)
        except ValidationError as error:
            raise ValueError(f"config.json: {first_problem(error, self.size_keys)}") from None

    def sizes_of(self, values: Mapping[str, Any]) -> Json:
        """Return the section's sizes by config.json's keys."""
        return {theirs: values[ours] for ours, theirs in self.size_keys.items()}


def first_problem(error: ValidationError, keys: Mapping[str, str]) -> str:
    """Return pydantic's first error as one line, with the key's name in config.json."""
    problem = error.errors()[0]
    key = ".".join(keys.get(str(name), str(name)) for name in problem["loc"])
    key = key.replace("rope.theta", "rope_theta")  # which stands in no table there
    return f"{key}: got {shown(problem['input'])}: {problem['msg']}"


def shown(value: Any) -> str:
    """Return a value from a file as one short line for a message."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"
