"""A config.json with other values than a model was saved with gives transformers' logits within 5e-6, also after an
export, or is refused; what it lacks has transformers' default, and what nobody reads is told.
"""

import random

import pytest

from megamix.hf.links import formats
from megamix.model.formats import Keys
from megamix.model.sizes import effective
from tests.conftest import FULL
from tests.hf.changed_keys import YARN, changes, verdict, write_folder
from tests.hf.folders import FAMILIES, MIXTURES, WINDOWED

# Its two layers have windows, so no layer takes the table that lacks frequencies.
UNUSED = {"full_attention": {"rope_type": "llama3", "factor": 4.0}, "sliding_attention": {"rope_type": "default"}}
ALL = (*FAMILIES, *WINDOWED, *MIXTURES)


def default_of(family, **keys):
    """Return what transformers' configuration writes that is made of these keys."""
    from transformers import AutoConfig

    return AutoConfig.for_model(family, **keys).to_dict()


@pytest.mark.parametrize("number", range(4 if FULL else 1))
@pytest.mark.parametrize("family", ALL)
def test_a_changed_key_gives_transformers_logits_or_is_refused(family, number, tmp_path):
    written, tokens = write_folder(family, number, tmp_path / "hf")
    cases = dict(changes(written, 3))
    chosen = cases if FULL else random.Random(family).sample([*cases], 4)
    verdicts = {what: verdict(tmp_path / "hf", cases[what], tokens, exports=FULL) for what in chosen}
    assert {what: found for what, found in verdicts.items() if found[0] == "wrong"} == {}
    assert verdict(tmp_path / "hf", written, tokens)[0] == "equal"


@pytest.mark.parametrize(
    ("family", "keys", "want"),
    [
        ("llama", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}, "equal"),
        ("llama", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.3}}, "equal"),
        ("llama", {"rope_parameters": YARN | {"truncate": None}}, "truncate is None, which megamix does not have"),
        ("llama", {"rope_scaling": YARN}, "write all into rope_parameters, and take rope_scaling out"),
        ("llama", {"rope_parameters": None, "rope_scaling": YARN, "rope_theta": 300.0}, "equal"),
        ("llama", {"rope_parameters": YARN, "rope_scaling": YARN | {"rope_theta": 1e4}}, "equal"),
        ("llama", {"rope_parameters": YARN, "original_max_position_embeddings": 200}, "equal"),
        ("llama", {"per_layer_config": {"0": {"num_key_value_heads": 1}}}, "per_layer_config is set"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 4.0}}, "llama3 needs low_freq_factor and"),
        ("llama", {"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "linear needs factor, which"),
        ("gemma3_text", {"rope_parameters": UNUSED}, "equal"),
        ("mixtral", {"rope_parameters": None}, "equal"),
    ],
)
def test_two_tables_of_rotary_positions_and_the_factor_of_yarn(family, keys, want, tmp_path):
    written, tokens = write_folder(family, 1, tmp_path / "hf")
    found, told = verdict(tmp_path / "hf", written | keys, tokens)
    assert found == want or want in told, (found, told)


@pytest.mark.parametrize("family", ALL)
def test_a_key_that_is_absent_has_transformers_default(family):
    form, written = formats()[family], default_of(family)
    asked = Keys(written)
    form.read(asked)
    needed = set()
    for key in asked.asked - {"model_type"}:
        less = {name: value for name, value in written.items() if name not in (key, "model_type")}
        try:
            found = form.read(less)
        except ValueError:
            needed.add(key)
            continue
        assert effective(found) == effective(form.read(default_of(family, **less))), key
    assert needed <= {*form.size_keys.values()} - {"max_position_embeddings", "num_key_value_heads", "head_dim"}


@pytest.mark.parametrize("family", ALL)
def test_a_key_that_nobody_reads_is_told_unless_it_never_has_an_effect(family):
    from transformers import GenerationConfig, PretrainedConfig

    silent = {**PretrainedConfig().to_dict(), **GenerationConfig._get_default_generation_params()}
    keys = Keys(dict.fromkeys(silent, 1) | default_of(family))
    formats()[family].read(keys)
    assert keys.unread() == []
    tables = {} if family == "gpt2" else {"rope_parameters": {"rope_type": "default", "finetuned": True}}
    if family in ("olmo3", "gemma3_text"):
        tables = {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), *tables.values())}
    keys = Keys(default_of(family) | tables | {"no_such": False, "unset": None})
    formats()[family].read(keys)
    assert keys.unread()[-1] == "no_such"
    assert all(key.endswith("finetuned") for key in keys.unread()[:-1])
    assert len(keys.unread()) > bool(tables)
