"""Whether two trees have told the same of a configuration, and if not, where they part first."""

import re

MOST_LINES = 12  # of a traceback


def first_difference(old, new):
    """Return where two answers differ first, by attempt, and in how many places in all; None where they do in none.

    An answer is `told`, the bits by who tells and by what they are of, and `layout`, how the owners' pieces lie; or an
    `error`, which is a difference even where both have the same one.
    """
    for side, answer in (("old", old), ("new", new)):
        if "error" in answer:
            return f"the {side} tree failed:\n" + "\n".join(answer["error"].strip().splitlines()[-MOST_LINES:])
    differences = []
    for who in {**old["told"], **new["told"]}:
        before, after = old["told"].get(who, {}), new["told"].get(who, {})
        for place, what in enumerate({**before, **after}):
            is_of_pieces = what.endswith(": by_piece") and not lies_alike(old, new)
            if before.get(what) != after.get(what) and not is_of_pieces:
                said = f"{before.get(what, 'not told')} -> {after.get(what, 'not told')}"
                differences.append((_moment(what), place, f"{who}, {what}: {said}"))
    return f"{min(differences)[-1]}; places that differ: {len(differences)}" if differences else None


def lies_alike(old, new):
    """Return whether the same rank owns the same elements, where both trees have trained."""
    return "error" in old or "error" in new or bool(old["layout"] == new["layout"])


def _moment(what):
    attempt = re.match(r"attempt (\d+)", what)
    return int(attempt[1]) if attempt else -1 if what.startswith("at the start") else 99
