"""An axis of parts, by a user: its ranks read the same micro-batch, and each computes some of its sequences."""

from pydantic import PositiveInt

from megamix.base.axes import AxisKind
from megamix.plugins import Section, register_axis


class RowsConfig(Section):
    """Divides the sequences of a micro-batch among ranks."""

    size: PositiveInt = 1
    """Ranks along the axis; must divide micro_batch_size."""


def take_own_rows(model, collectives):
    """Let the model compute this rank's sequences alone where it is given targets."""
    size, rank = collectives.axis.size, collectives.axis.rank

    def own(module, args, kwargs):
        if len(args) < 2:  # logits of a prompt, which every rank computes
            return None
        tokens, targets, *rest = args
        rest = [each.chunk(size)[rank] if hasattr(each, "chunk") else each for each in rest]
        return (tokens.chunk(size)[rank], targets.chunk(size)[rank], *rest), kwargs

    model.register_forward_pre_hook(own, with_kwargs=True)


register_axis("rows", RowsConfig, take_own_rows, AxisKind("sharded", parts=True))
