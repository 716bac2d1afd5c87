"""The keys in docs/configuration.md, from the types and texts of the sections: `python -m tests.config.reference`."""

import json
import math
import re
import textwrap
from collections import defaultdict
from pathlib import Path

from megamix.config import (
    Config,
    ContextConfig,
    DataSource,
    ExpertConfig,
    ExpertGroups,
    ExpertsConfig,
    FirstLayers,
    FP8Config,
    LatentSizes,
    Llama3Scaling,
    PipelineConfig,
    RopeConfig,
    RopeScaling,
    TensorConfig,
    TransformersConfig,
    WindowConfig,
    YarnScaling,
    config_schema,
)
from megamix.config.choices import section_at
from megamix.config.loss_scales import LossScaleConfig
from megamix.config.model_and_data import DataStage
from megamix.config.optimizers import OptimizerGroup, OptimizerSchedules, SettingSchedule
from megamix.config.sections import AlertConfig, AverageConfig, CopyConfig, PrometheusConfig, WandbConfig
from megamix.config.toml_text import value_text
from megamix.plugins import LOSS_SCALES, OPTIMIZERS

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
BEGIN = "<!-- keys: python -m tests.config.reference writes them -->\n"
END = "<!-- end of the keys -->\n"


def _section(name):
    return section_at(Config, [name], {})


TABLES = {
    "Above all tables": Config,
    "[model]": _section("model"),
    '[model] with family = "transformers"': TransformersConfig,
    "[model.recompute]": FirstLayers,
    "[model.rope]": RopeConfig,
    "[model.rope.scaling]": RopeScaling,
    '[model.rope.scaling] with rule = "llama3"': Llama3Scaling,
    '[model.rope.scaling] with rule = "yarn"': YarnScaling,
    "[model.window]": WindowConfig,
    "[model.latent_attention]": LatentSizes,
    "[model.experts]": ExpertsConfig,
    "[model.experts.groups]": ExpertGroups,
    "[data]": _section("data"),
    "[[data.train]]": DataSource,
    "[[data.stages]]": DataStage,
    "[optimizer]": _section("optimizer"),
    **{f"[optimizer.{name}]": section for name, section in OPTIMIZERS.sections.items()},
    "[[optimizer.groups]]": OptimizerGroup,
    "[optimizer.schedules]": OptimizerSchedules,
    "[optimizer.schedules.momentum]": SettingSchedule,
    "[lr_schedule]": _section("lr_schedule"),
    "[precision]": _section("precision"),
    "[precision.fp8]": FP8Config,
    "[precision.loss_scale]": LossScaleConfig,
    "[training]": _section("training"),
    "[training.average]": AverageConfig,
    "[parallelism]": _section("parallelism"),
    "[parallelism.context]": ContextConfig,
    "[parallelism.expert]": ExpertConfig,
    "[parallelism.tensor]": TensorConfig,
    "[parallelism.pipeline]": PipelineConfig,
    "[checkpoint]": _section("checkpoint"),
    "[checkpoint.copies]": CopyConfig,
    "[metrics]": _section("metrics"),
    "[metrics.wandb]": WandbConfig,
    "[metrics.prometheus]": PrometheusConfig,
    "[metrics.alert]": AlertConfig,
    "[profiling]": _section("profiling"),
}


def number(value):
    """Return a number as a reader writes it: 2^24 for 16777216."""
    exponent = math.log2(value) if value > 0 else 0
    return f"2^{exponent:.0f}" if exponent == round(exponent) and abs(exponent) >= 16 else f"{value:g}"


def limits(entry):
    """Return the limits of a number: >0, ≥1, [0,1)."""
    low, high = entry.get("minimum"), entry.get("maximum")
    above, below = entry.get("exclusiveMinimum"), entry.get("exclusiveMaximum")
    if entry["type"] == "integer" and low is None and above is not None:
        low = above + 1
    if high is None and below is None:
        return f"≥{number(low)}" if low is not None else f">{number(above)}" if above is not None else ""
    left = f"[{number(low)}" if low is not None else f"({number(above)}"
    return f" {left},{number(high)}]" if high is not None else f" {left},{number(below)})"


def plural(told):
    return f"lists of {told}" if told[0].isdigit() else re.sub(r"^\w+", r"\g<0>s", told)


def may_be(entry):
    """Return what a key may be: its choices, or its type with limits."""
    match entry:
        case {"$ref": _}:
            return "table"
        case {"enum": choices}:
            return ", ".join(f'"{choice}"' for choice in choices)
        case {"const": value}:
            return json.dumps(value)
        case {"anyOf": kinds} | {"oneOf": kinds}:
            if entry.get("default", ...) is None:
                kinds = [one for one in kinds if one not in ({"type": "null"}, {"const": False})]
            return " or ".join(dict.fromkeys(map(may_be, kinds)))
        case {"type": "array", "prefixItems": [first, *_] as items}:
            return f"{len(items)} {plural(may_be(first))}"
        case {"type": "array", "items": item}:
            return plural(may_be(item))
        case {"type": "object"}:
            return "table of such"
        case {"type": "integer" | "number"}:
            return ("int" if entry["type"] == "integer" else "float") + limits(entry)
    return {"boolean": "bool", "string": "text"}[entry["type"]]


def default(field):
    """Return a key's default in TOML, with powers of two as such; "": it has none."""
    if field.is_required() or field.default is None:
        return ""
    told = number(field.default) if isinstance(field.default, float) else ""
    return told if told.startswith("2^") else value_text(field.default)


def wrapped(text, **indent):
    return textwrap.fill(" ".join(text.split()), width=120, break_on_hyphens=False, break_long_words=False, **indent)


def line(head, entry):
    """Return the line of a key: its name, its default and what it may be, then what it means."""
    return wrapped(f"- {head}: {entry['description']}", subsequent_indent="  ")


def tables_in(schema):
    """Yield every table of a schema, those within others too."""
    if isinstance(schema, dict) and "properties" in schema:
        yield schema
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else []:
        yield from tables_in(inner)


def lines(heading, section, entries):
    """Yield the lines of a section's keys, but for tables with a heading, and keys of a class that has one."""
    elsewhere = {key for other in section.__mro__[1:] if other in TABLES.values() for key in other.model_fields}
    for key, field in section.model_fields.items():
        if key in elsewhere or (field.default == {} and key not in entries):
            continue
        value, told = default(field), may_be(entries[key])
        if told == "table" and (field.default == {} or f"{heading[:-1]}.{key}]" in TABLES):
            continue
        told += ", required" * field.is_required()
        if value:
            yield line(f"`{key}={value}`" + f" ({told})" * (told not in ("bool", "text")), entries[key])
        else:
            yield line(f"`{key}` ({told})", entries[key])


def lines_of_rules(schema):
    """Yield the lines of the loss scale rules' keys: one for each text, with each rule's default."""
    rule = schema["DynamicScale"]["rule"]
    yield line(f'`rule="auto"` ({may_be(rule)})', rule)
    heads, entries = defaultdict(lambda: defaultdict(list)), dict[tuple[str, str], dict]()
    for name, section in LOSS_SCALES.sections.items():
        for key in [key for key in section.model_fields if key != "rule"]:
            field, entry = section.model_fields[key], schema[section.__name__][key]
            value = f"`{key}={default(field)}`" if default(field) else f"`{key}` required" * field.is_required()
            heads[key, entry["description"]][value or f"`{key}` not set"].append(name)
            entries[key, entry["description"]] = entry
    for which, values in sorted(heads.items(), key=lambda item: item[0][0]):
        told = "; ".join(f"{value} in {', '.join(rules)}" for value, rules in values.items())
        yield line(f"{told} ({may_be(entries[which])})", entries[which])


def reference():
    """Return a heading, a sentence and the keys of each table."""
    schema = {table["title"]: table["properties"] for table in tables_in(config_schema())}
    parts, optional = list[str](), set[str]()
    for heading, section in TABLES.items():
        is_rule = section is LossScaleConfig
        keys = lines_of_rules(schema) if is_rule else lines(heading, section, schema[section.__name__])
        told = "" if section is Config else ("Optional. " if heading in optional else "") + section.__doc__
        parts += [f"### {heading}", wrapped(told), "\n".join(keys)]
        optional |= {f"{heading[:-1]}.{key}]" for key, field in section.model_fields.items() if field.default is None}
    return "\n\n".join(filter(None, parts))


def with_keys(page):
    """Return the text `page` with its keys replaced by today's."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, "no mark before the keys"
    assert end, "no mark after the keys"
    return f"{before}{BEGIN}\n{reference()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_keys(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
