"""Whoever has keys that matter only together: they are a table, which a file leaves out, sets, or turns off over
another file.
"""

import tomllib

import pytest

from megamix.config import config_from_dict, config_schema, saved_tree
from tests.config.test_errors import GOOD, changed, problems_of

FP8 = {"precision": {"fp8": {"recipe": "rowwise", "grad": "e4m3"}}}
OFF = {"precision": {"fp8": False}}


def test_a_table_is_off_set_and_off_again_and_begins_from_its_defaults_when_it_comes_back():
    assert config_from_dict(GOOD).precision.fp8 is None
    assert config_from_dict(GOOD, FP8).precision.fp8.grad == "e4m3"
    assert config_from_dict(GOOD, FP8, OFF) == config_from_dict(GOOD)
    again = {"precision": {"fp8": {"recipe": "rowwise"}}}
    assert config_from_dict(GOOD, FP8, OFF, again).precision.fp8.grad == "e5m2"
    assert config_from_dict(GOOD, FP8, again).precision.fp8.grad == "e4m3"


def test_a_single_rank_along_an_axis_turns_its_table_off_with_all_its_keys():
    ranks = {"parallelism": {"context": {"size": 2, "method": "heads"}}}
    assert config_from_dict(GOOD, ranks, {"parallelism": {"context": {"size": 1}}}) == config_from_dict(GOOD)


def test_the_schema_lets_a_file_turn_a_table_off():
    section = config_schema()["$defs"]["ParallelismConfig"]["properties"]
    assert {"const": False} in section["tensor"]["anyOf"]


@pytest.mark.parametrize("config", [{}, FP8, {"training": {"average": {"decay": 0.9}}}])
def test_what_is_shown_of_one_loads_as_the_same(config):
    config = config_from_dict(GOOD, config)
    assert config_from_dict(tomllib.loads(config.text)) == config
    assert config_from_dict(saved_tree(config.text)) == config


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"precision": {"fp8": {"grad": "e4m3"}}}, "precision.fp8.recipe: missing; write for example recipe = "),
        (
            {"precision": {"fp8": True}},
            "precision.fp8: got true, must be a table; write [precision.fp8] and its keys below it, or prec",
        ),
        ({"training": False}, "training: got false, must be a table; write [training] and its keys below it"),
        ({"precision": {"loss_scale": False}}, "precision.loss_scale: got false, must be a table; "),
    ],
)
def test_a_key_of_a_table_that_is_not_there_and_a_table_that_must_be_are_named(keys, line):
    tree = GOOD | keys if "training" in keys else changed(**keys)
    assert any(problem.startswith(line) for problem in problems_of(tree))
