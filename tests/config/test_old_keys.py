"""Whoever has a file or a checkpoint of an earlier version: old keys of a file are refused with the present ones, and
`megamix config --upgrade` rewrites it; what a run has written is read by the present keys.
"""

import tomllib

import pytest

from megamix.cli.verbs import main
from megamix.config import ConfigError, DecoderConfig, TensorConfig, config_from_dict, load_config, saved_tree
from megamix.config.old_keys import upgraded_text
from megamix.plugins import FAMILIES
from tests.config.test_errors import GOOD
from tests.config.test_load import MINIMAL, write

EIGHT = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 24}
EXPERTS = ", ".join(f"{key} = {value}" for key, value in EIGHT.items())
# A file had the text; it stands for the tree now. There is a case of each kind of row.
OLD = {
    "a value that meant none": ('[precision.fp8]\nrecipe = "none"\n', {"precision": {"fp8": False}}),
    "tables whose size meant none": (
        "[parallelism]\npp_size = 1\ntp_size = 1\nsequence_parallel = true\ncp_size = 1\nep_size = 1\n",
        {"parallelism": {}},
    ),
    "tables": (
        'copy_to = "away"\ncopy_keep = 3\n[parallelism]\ncp_size = 2\ncp_method = "heads"\n',  # behind [checkpoint]
        {
            "checkpoint": {"copies": {"folder": "away", "keep": 3}},
            "parallelism": {"context": {"size": 2, "method": "heads"}},
        },
    ),
    "a default alone, which makes no table": ("[parallelism]\nsequence_parallel = true\n", {"parallelism": {}}),
    "a value that is the default": ("[optimizer.nag]\ndampening = 0.0\n", {"optimizer": {"nag": {}}}),
    "a value that has a name now": ("[model]\nqk_norm = true\n", {"model": {"qk_norm": "head"}}),
    "two keys that are one": ('[model]\nqk_norm = true\nqk_norm_over = "all"\n', {"model": {"qk_norm": "all"}}),
    "keys of a table within": (
        f"[model]\nexperts = {{ {EXPERTS}, num_groups = 4, top_groups = 2 }}\n",
        {"model": {"experts": EIGHT | {"groups": {"count": 4, "top": 2}}}},
    ),
    "a number that meant none": (
        f"[model.experts]\n{EXPERTS.replace(', ', chr(10))}\nnum_groups = 1\n",
        {"model": {"experts": EIGHT}},
    ),
    "keys that moved": (
        '[model]\nposition = "rotary"\nrope_theta = 5e5\nrotary_dim = 2\nunrotated_layers = [0]\n'
        'windows = [4]\nwindow_rope_theta = 9.0\nrope_scaling = { rule = "linear", factor = 2.0 }\n',
        {
            "model": {
                "rope": {
                    "theta": 5e5,
                    "dim": 2,
                    "unrotated_layers": [0],
                    "scaling": {"rule": "linear", "factor": 2.0},
                },
                "window": {"sizes": [4], "rope_theta": 9.0},
            }
        },
    ),
    "a table that is off now": ('[model]\nposition = "learned"\nwindows = []\n', {"model": {"rope": False}}),
    "a default beside what turns its table off": (
        '[model]\nposition = "learned"\nrope_theta = 10000.0\n',
        {"model": {"rope": False}},
    ),
    "a table that is there": ('[model]\nposition = "rotary"\nrope.dim = 2\n', {"model": {"rope": {"dim": 2}}}),
    "a value that means none still": ("[model]\nqk_norm = false\n", {"model": {"qk_norm": "none"}}),
}


def with_keys(text):
    """Return a configuration that has some more."""
    return MINIMAL.replace("[model]\n", text) if text.startswith("[model]\n") else MINIMAL + text


@pytest.mark.parametrize(("text", "now"), OLD.values(), ids=OLD)
def test_old_keys_are_read_in_what_a_run_has_written_and_refused_and_rewritten_in_a_file(tmp_path, capsys, text, now):
    write(tmp_path, "run/metrics.jsonl", "")
    want = config_from_dict(tomllib.loads(MINIMAL), now)
    assert load_config(write(tmp_path, "run/config.toml", with_keys(text))) == want
    assert config_from_dict(saved_tree(with_keys(text))) == want

    job = write(tmp_path, "job.toml", with_keys(text))
    with pytest.raises(ConfigError) as refused:
        load_config(job)
    assert len(refused.value.problems) == len(upgraded_text(with_keys(text))[1])
    assert all(f"megamix config --upgrade {job} does so" in line for line in refused.value.problems)
    assert main(["config", "--upgrade", str(job)]) == 0
    assert capsys.readouterr().out.splitlines() == upgraded_text(with_keys(text))[1]
    assert load_config(job) == want
    assert main(["config", "--upgrade", str(job)]) == 0
    assert capsys.readouterr().out == f"{job}: has no key of an earlier version\n"


def test_an_upgrade_keeps_the_comments():
    text = '# of mine\n[precision] # formats\ndtype = "bf16" # wide\nfp8 = { recipe = "none" }\n\n[data] # tokens\n'
    new, lines = upgraded_text(text)
    assert new == text.replace('{ recipe = "none" }', "false")
    assert lines == ['precision.fp8.recipe = "none": write precision.fp8 = false']


def test_an_old_key_on_the_command_line_is_refused_with_the_present_one(tmp_path):
    with pytest.raises(ConfigError) as refused:
        load_config(write(tmp_path, "job.toml", MINIMAL), ["precision.fp8.recipe=none"])
    line = 'precision.fp8.recipe: got "none", a key of an earlier version; write precision.fp8 = false'
    assert refused.value.problems == (line,)


def test_the_callers_trees_stay_as_they_are():
    tree = GOOD | {"precision": {"fp8": {"recipe": "none"}}}
    with pytest.raises(ConfigError):
        config_from_dict(tree)
    assert tree["precision"] == {"fp8": {"recipe": "none"}}


def test_keys_of_another_family_are_its_own(monkeypatch):
    """Also where the layer that sets them does not name the family."""

    class Own(DecoderConfig):
        family: str = "own"
        qk_norm: bool = False
        qk_norm_over: int = 1

    monkeypatch.setitem(FAMILIES.sections, "own", Own)
    own = {key: value for key, value in GOOD["model"].items() if key in DecoderConfig.model_fields}
    tree = GOOD | {"model": own | {"family": "own"}}
    config = config_from_dict(tree, {"model": {"qk_norm": True, "qk_norm_over": 3}})
    assert (config.model.qk_norm, config.model.qk_norm_over) == (True, 3)
    assert config_from_dict(saved_tree(config.text)) == config


def test_a_base_keeps_the_keys_of_a_table_whose_size_a_file_above_sets(tmp_path):
    base = write(tmp_path, "base.toml", MINIMAL + "[parallelism]\ntp_size = 1\nsequence_parallel = false\n")
    job = write(tmp_path, "job.toml", 'base = "base.toml"\n[parallelism]\ntp_size = 2\n')
    for file in (base, job):
        assert main(["config", str(file), "--upgrade"]) == 0
    assert load_config(job).parallelism.tensor == TensorConfig(size=2, sequence_parallel=False)


def test_an_upgrade_takes_one_file_and_follows_links(tmp_path, capsys):
    job = write(tmp_path, "job.toml", '[precision.fp8]\nrecipe = "none"\n')
    (tmp_path / "link.toml").symlink_to(job)
    assert main(["config", str(job), "training.steps=3", "--upgrade"]) == 2
    assert "--upgrade: rewrites one file" in capsys.readouterr().err
    assert main(["config", str(tmp_path / "link.toml"), "--upgrade"]) == 0
    assert (tmp_path / "link.toml").is_symlink()
    assert tomllib.loads(job.read_text()) == {"precision": {"fp8": False}}


def test_a_file_over_a_base_keeps_a_default_that_the_base_has_otherwise():
    new, _ = upgraded_text('base = "base.toml"\n[parallelism]\npp_schedule = "1f1b"\n')
    assert tomllib.loads(new)["parallelism"] == {"pipeline": {"schedule": "1f1b"}}


def test_a_default_beside_what_turned_its_table_off_is_to_be_left_out():
    _, (off, default) = upgraded_text('[model]\nposition = "learned"\nrope_theta = 10000.0\n')
    assert off.endswith("write model.rope = false")
    assert default.endswith("leave rope_theta out")
