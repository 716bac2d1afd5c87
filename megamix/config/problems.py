"""Problems of a configuration, in words: one line a problem, each with field, value and fix."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from megamix.config.choices import section_at
from megamix.config.other_trainers import called_here, override_here
from megamix.config.sections import SECTIONS, Tables
from megamix.config.toml_text import value_text
from megamix.config.unread import READ_WHERE, Unread, setting
from megamix.plugins import Section, texts

# Words for the kinds of error that pydantic can find in these sections, filled in from the error's context.
_WRONG = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text in quotes",
    "string_too_short": "must not be empty",
    "tuple_type": "must be a list",
    "too_short": "must not be empty",
    "model_type": "must be a table",
    "literal_error": "must be {expected}",
    "greater_than": "must be greater than {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "value_error": "{error}",
}
# A source, and tables whose keys are named like other settings, here or in other trainers.
_OTHERS_KEYS = ("valid", "schedules", "rope", "window", "latent_attention")
_WORD = re.compile("'([^']+)'")  # one that a key may be


class ConfigError(ValueError):
    """Everything that is wrong with what the user wrote, at once."""

    exit_status = 2

    def __init__(self, problems: Iterable[str], source: str = "configuration", sound: Tables | None = None):
        self.problems = tuple(problems)
        self.source = source
        # The part that can still be checked: the whole Config if each value is usable by itself, else [data] and
        # [model] alone; None if one of these two is unusable.
        self.sound = sound
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n  ".join([f"{source}: {count}", *self.problems]))


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that was probably meant."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return matches[0] if matches else None


def explain(errors: Sequence[ErrorDetails], tree: Mapping[str, Any]) -> list[str]:
    """Return a line for each of pydantic's errors about a configuration."""
    unknown = [item for item in errors if item["type"] == "extra_forbidden"]
    lines = [_explain_unknown(item["loc"], item["input"], tree) for item in unknown]
    # [modle] instead of [model] is one mistake: do not also list every key that [model] now lacks.
    meant = {guess for item in unknown if (guess := _meant(item["loc"], tree))}
    # Which keys [model] has is not known without its family.
    meant |= {item["loc"][:-1] for item in errors if item["loc"] == ("model", "family")}
    for item in errors:
        loc = item["loc"]
        follows = item["type"] == "missing" and any(loc[: len(guess)] == guess for guess in meant)
        if item["type"] != "extra_forbidden" and not follows:
            lines.append(_explain_value(item, tree))
    return [*dict.fromkeys(lines)]  # one line once: an empty list would be reported for each missing item


def explain_unread(item: Unread, tree: Mapping[str, Any]) -> str:
    """Return the line that refuses a key that is not read."""
    name = item.key.rpartition(".")[2]
    fixes = [f"{key} = {value_text(value)}" for key, value in item.ways]
    return (
        f"{item.key}: got {short(item.value)}, which is not read where {_decision(item, tree)}; "
        f"write {' or '.join(fixes)}, or leave {name} out"
    )


def dropped_line(item: Unread, tree: Mapping[str, Any], source: str) -> str:
    """Return the line that tells of a key that was meant for another setting than the one that holds."""
    of_tokens = f"{item.key.removesuffix('_steps')}_tokens"
    instead = f"; write {of_tokens} instead" if of_tokens in READ_WHERE and not setting(tree, of_tokens) else ""
    decision = _decision(item, tree)
    return f"{item.key} = {short(item.value)} of {source} is not read where {decision}: dropped{instead}"


def _decision(item: Unread, tree: Mapping[str, Any]) -> str:
    values = {key: setting(tree, key) for key in item.deciders}
    return " and ".join(f"{key} is not set" if v is None else f"{key} = {short(v)}" for key, v in values.items())


def _meant(loc: tuple[int | str, ...], tree: Mapping[str, Any]) -> tuple[int | str, ...] | None:
    guess = nearest(str(loc[-1]), _fields(loc[:-1], tree))
    return (*loc[:-1], guess) if guess else None


def _fields(table: Sequence[int | str], tree: Mapping[str, Any]) -> dict[str, FieldInfo]:
    """Return the keys that a table may have, which is given by its path; none within what a plugin's key holds."""
    section = section_at(Tables, table, tree)
    return {} if section is None else section.model_fields


def _path(loc: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")


def short(value: object) -> str:
    """Return a value as TOML spells it, or how that begins."""
    text = value_text(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _explain_unknown(loc: tuple[int | str, ...], value: object, tree: Mapping[str, Any]) -> str:
    name, path, known = str(loc[-1]), _path(loc), _fields(loc[:-1], tree)
    what = f"{path}: unknown section" if len(loc) == 1 and isinstance(value, dict) else f"{path}: unknown key"
    what = f"{what}, got {short(value)}"
    homes = [home for home in _homes(tree) if name in _fields(home.split("."), tree)]
    home = homes[0] if len(homes) == 1 or set(homes) & {*SECTIONS} else None  # size and method are in several tables
    if any(isinstance(part, int) for part in loc) or "schedules" in loc[:-1]:
        home = None  # what is meant for some parameters, or follows the updates, is no setting of all
    if home is None and (told := called_here(name)):
        return f"{what}; {told}"
    if guess := nearest(name, known):
        return f"{what}; did you mean {_path((*loc[:-1], guess))}?"
    if home is not None:
        return f"{what}; write it under [{home}]"
    return f"{what}; known are {', '.join(known)}" if known else f"{what}; leave it out"


def _homes(tree: Mapping[str, Any]) -> Iterator[str]:
    yield from SECTIONS
    for section in SECTIONS:
        for name, field in _fields([section], tree).items():
            is_table = field.default in ({}, None) and section_at(Tables, [section, name], tree) is not None
            if is_table and name not in _OTHERS_KEYS:
                yield f"{section}.{name}"


def override_meant(arguments: Sequence[str]) -> str | None:
    """Return the overrides that words may stand for, as --lr 1e-3, --batch-size=8, training.steps:5 or another
    trainer's --max-steps 5; None if no key is like the first.
    """
    flag, equals, value = arguments[0].partition("=" if "=" in arguments[0] else ":")
    name = flag.lstrip("-").replace("-", "_")
    keys = [f"{home}.{key}" for home in _homes({}) for key in _fields(home.split("."), {})]
    meant = [key for key in keys if f".{key}".endswith(f".{name}")] or [key for key in keys if key.endswith(f"_{name}")]
    value = value if equals else next(iter(arguments[1:]), "VALUE")
    return " or ".join(f"{key}={value}" for key in meant) or override_here(name.rpartition(".")[2], value)


def _explain_value(error: ErrorDetails, tree: Mapping[str, Any]) -> str:
    loc, value, kind = error["loc"], error["input"], error["type"]
    # An item of a list is judged with its list, a key inside a table of the list by itself.
    key, field, text = next(
        (str(loc[end]), section.model_fields[str(loc[end])], texts(section).get(str(loc[end]), ""))
        for end in reversed(range(len(loc)))
        if (section := section_at(Tables, loc[:end], tree)) and loc[end] in section.model_fields
    )
    if loc[:2] == ("data", "valid") and isinstance(loc[-1], str):
        key = loc[-1]  # that of a set, if it has a name
    text = field.description or " ".join(text.split())
    if kind == "too_long" or (kind == "missing" and isinstance(loc[-1], int)):
        wrong = f"got {short(value)}, must have {_items(field, text)}"
        loc = loc if kind == "too_long" else loc[:-1]  # pydantic names the item that a short list lacks
    elif kind == "missing":
        wrong = "missing"
    else:
        template = _WRONG.get(kind, error["msg"].replace("{", "{{").replace("}", "}}"))
        wrong = f"got {short(value)}, {template.format(**error.get('ctx', {}))}"
    is_section = isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    if is_section or (kind == "model_type" and loc[-1] == key):  # model_type: of a section that may be left out
        fix = "correct its keys" if kind == "value_error" else f"write [{_path(loc)}] and its keys below it"
        fix += f", or {_path(loc)} = false" if field.default is None and kind == "model_type" else ""
    elif kind == "literal_error" and (word := nearest(str(value).lower(), _WORD.findall(error["ctx"]["expected"]))):
        fix = f'write {key} = "{word}"'
    else:
        wrong += _sentence(text) if kind == "literal_error" else ""
        fix = _fix(key, field, text)
    return f"{_path(loc)}: {wrong}; {fix}"


def _items(field: FieldInfo, text: str) -> str:
    """Count the items of a list of fixed length, and say by the field's text, if it has one, what they are."""
    kinds: list[Any] = [field.annotation]
    while get_origin(kinds[0]) is not tuple:  # a list that may be left out, or that has its checks
        kinds = [*get_args(kinds[0]), *kinds[1:]]
    kind = kinds[0]
    if get_args(kind)[-1] is Ellipsis:  # a list of any length, of lists of fixed length
        kind, *_ = get_args(get_args(kind)[0])
    return f"{len(get_args(kind))} items{_sentence(text)}"


def _sentence(text: str) -> str:
    return f" ({text.partition('. ')[0].rstrip('.')})" if text else ""


def _fix(key: str, field: FieldInfo, text: str) -> str:
    """Return what to write instead: the field's example or default, or its own text."""
    usual = [*(field.examples or []), *([] if field.default is PydanticUndefined else [field.default])]
    if not usual:
        return f"write {key}: {text or 'what its plugin asks for'}"
    if usual[0] is None:
        return f"leave {key} out to get its default"
    return f"write for example {key} = {value_text(usual[0])}"
