"""Models as Hugging Face has them: which format a model has, and which part of which tensor a parameter is."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from megamix.checkpoint.boxes import Box
from megamix.config import DecoderConfig
from megamix.model.family import families, family_of
from megamix.model.formats import Format


@dataclass(frozen=True, slots=True)
class Link:
    """One of our parameters lies in one of their tensors, from `offset` on, turned around where theirs is (in, out)."""

    ours: str
    theirs: str
    shape: tuple[int, ...]  # of ours
    offset: tuple[int, ...]  # in theirs
    transposed: bool = False

    @property
    def region(self) -> Box:
        """What of their tensor is ours."""
        return self.to_theirs(Box.whole(self.shape))

    def to_theirs(self, box: Box) -> Box:
        """Return where a box of our parameter lies in their tensor."""
        return self._turned(box).moved(self.offset)

    def to_ours(self, box: Box) -> Box:
        """Return the reverse, for a box within `region`."""
        return self._turned(box.moved(tuple(-start for start in self.offset)))

    def _turned(self, box: Box) -> Box:
        return Box(box.offset[::-1], box.size[::-1]) if self.transposed else box


def their_shapes(links: Iterable[Link]) -> dict[str, tuple[int, ...]]:
    """Return the whole of each of their tensors, in the links' order."""
    shapes: dict[str, tuple[int, ...]] = {}
    for link in links:
        end = link.region.end
        shapes[link.theirs] = tuple(map(max, end, shapes.get(link.theirs, end)))
    return shapes


def links_of(form: Format, config: DecoderConfig) -> list[Link]:
    """Return every parameter of such a model, once, in the order of its modules."""
    return [_link(form, name, shape) for name, shape in family_of(config).shapes(config).items()]


def _link(form: Format, ours: str, shape: tuple[int, ...]) -> Link:
    module, _, leaf = ours.rpartition(".")
    number = re.match(r"blocks\.(\d+)\.", module)
    place = form.places[re.sub(r"^blocks\.\d+\.", "blocks.", module)]
    theirs = f"{place.name.format(number[1] if number else '')}.{leaf}"
    start = place.part * shape[0]
    if place.transposed and len(shape) == 2:
        return Link(ours, theirs, shape, (0, start), transposed=True)
    return Link(ours, theirs, shape, (start, *(0,) * (len(shape) - 1)))


def formats() -> dict[str, Format]:
    """Return all that are known, by `model_type`."""
    return {form.model_type: form for family in families() for form in family.formats}


def format_of(config: DecoderConfig) -> Format:
    """Return the format that has such a model. Raises: ValueError with what is in the way of the nearest one."""
    given = family_of(config).effective(config)
    misfits = {
        form: [
            f"model.{key} is {given[key]}, {form.model_type} has {' or '.join(map(str, values))}"
            for key, values in form.allowed(config).items()
            if given[key] not in values
        ]
        for form in family_of(config).formats
    }
    if not misfits:
        raise ValueError(f"model.family {family_of(config).name!r} names no format of Hugging Face; give it `formats`")
    nearest = min(misfits, key=lambda form: len(misfits[form]))
    if misfits[nearest]:
        known = ", ".join(form.model_type for form in misfits)
        raise ValueError(
            f"no family of Hugging Face that is known here ({known}) has such a model; the nearest: "
            + "; ".join(misfits[nearest])
        )
    return nearest
