"""Links between our parameters and Hugging Face's tensors, and the format that a model has."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from megamix.checkpoint.boxes import Box
from megamix.config import DecoderConfig
from megamix.model.family import families, family_of
from megamix.model.formats import Format
from megamix.plugins import Section

_TABLES = ("experts", "rope", "window")  # of [model]


@dataclass(frozen=True, slots=True)
class Link:
    """The place of our parameter, or of one matrix of our stack, in one of their tensors: from `offset` on, transposed
    if theirs is (in, out).
    """

    ours: str
    theirs: str
    shape: tuple[int, ...]  # shape of our parameter, or of the matrix
    offset: tuple[int, ...]  # place of its first element in their tensor
    transposed: bool = False
    number: int | None = None  # the matrix's in our stack; None: our whole parameter is linked

    @property
    def region(self) -> Box:
        """Return the box of their tensor that is linked."""
        return self._turned(Box.whole(self.shape)).moved(self.offset)

    def to_theirs(self, box: Box) -> Box:
        """Return the box of their tensor that is a box of our parameter; of a stack, the part in the linked matrix."""
        if self.number is not None:
            box = Box(box.offset[1:], box.size[1:])
        return self._turned(box).moved(self.offset)

    def to_ours(self, box: Box) -> Box:
        """Translate a box of their tensor, which must lie within `region`, into coordinates of our parameter."""
        own = self._turned(box.moved(tuple(-start for start in self.offset)))
        return own if self.number is None else Box((self.number, *own.offset), (1, *own.size))

    def _turned(self, box: Box) -> Box:
        return Box(box.offset[::-1], box.size[::-1]) if self.transposed else box


def their_shapes(links: Iterable[Link]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each of their tensors, in the links' order."""
    shapes = dict[str, tuple[int, ...]]()
    for link in links:
        end = link.region.end
        shapes[link.theirs] = tuple(map(max, end, shapes.get(link.theirs, end)))
    return shapes


def links_of(form: Format, config: DecoderConfig) -> list[Link]:
    """Return a link for every parameter of such a model, in the order of its modules, and for every matrix of a stack.
    A shared parameter has one.
    """
    taken = Counter[str]()  # rows of each of their tensors that are linked so far
    links = list[Link]()
    for ours, shape in family_of(config).shapes(config).items():
        module, _, leaf = ours.rpartition(".")
        block = re.findall(r"^blocks\.(\d+)", module)
        module = re.sub(r"^blocks\.\d+", "blocks", module)
        if len(shape) == 3:
            matrices = form.places[f"{module}.*"].name
            names = (f"{matrices.format(*block, number)}.{leaf}" for number in range(shape[0]))
            links += [Link(ours, theirs, shape[1:], (0, 0), number=number) for number, theirs in enumerate(names)]
            continue
        place = form.places[module]
        theirs = f"{place.name.format(*block)}.{leaf}"
        transposed = place.transposed and len(shape) == 2
        start = taken[theirs]
        links.append(Link(ours, theirs, shape, (0, start) if transposed else (start, 0)[: len(shape)], transposed))
        taken[theirs] += shape[0]
    return links


def formats() -> dict[str, Format]:
    return {form.model_type: form for family in families() for form in family.formats}


def _meaning(form: Format, config: DecoderConfig) -> dict[str, Any]:
    """Return what a model loses if its config.json does not hold it, apart from sizes; of a table each key by
    itself. The losses for balance belong to a training.
    """
    not_asked = {*DecoderConfig.model_fields, *form.size_keys, "scaled_init"}
    meant = {key: value for key, value in family_of(config).effective(config).items() if key not in not_asked}
    for name in _TABLES:
        if isinstance(table := meant.get(name), Section):
            keys = table.model_dump(exclude={"balance_loss", "z_loss"})
            meant |= {name: "a table", **{f"{name}.{key}": value for key, value in keys.items()}}
    return meant


def _misfits(form: Format, config: DecoderConfig) -> list[str] | None:
    """Return what of a model does not come back from the format's config.json; None if no model does."""
    try:
        again = form.read(form.write(config))
    except ValueError:
        return None
    given, found = _meaning(form, config), _meaning(form, again)
    differ = [key for key in given if given[key] != found.get(key)]
    for table in {"rope", "window"} & {*differ}:  # one line says that only one of both has it
        differ = [key for key in differ if not key.startswith(f"{table}.")]
    return [f"model.{key} is {given[key]}, {form.model_type} has {found.get(key)}" for key in differ]


def format_of(config: DecoderConfig) -> Format:
    """Return the format that can express such a model. Raises: ValueError saying why the nearest format cannot."""
    family = family_of(config)
    if not family.formats:
        raise ValueError(f"model.family {family.name!r} names no format of Hugging Face; give it `formats`")
    misfits = {form: found for form in family.formats if (found := _misfits(form, config)) is not None}
    nearest = min(misfits, key=lambda form: len(misfits[form]), default=None)
    if nearest is not None and not misfits[nearest]:
        return nearest
    known = ", ".join(form.model_type for form in family.formats)
    told = f"; the nearest: {'; '.join(misfits[nearest])}" if nearest else ""
    raise ValueError(f"no family of Hugging Face that is known here ({known}) has such a model{told}")
