"""`verify` names bugs that users of known systems met, with place, kind and step, as the table in
docs/verify_reference.md says.
"""

import random

import pytest

from tests.conftest import FULL
from tests.tools.verify.catalogue.__main__ import PAGE, masked, named, row, rows_of, runs_table
from tests.tools.verify.catalogue.bugs import BUGS
from tests.tools.verify.catalogue.run import verdicts

SAMPLE = 6  # bugs, in addition to those that always run


def _names():
    if FULL:
        return [*BUGS]
    quick = [
        name for name, bug in BUGS.items() if bug.ranks < 4 and not bug.layout
    ]  # tests/tools/verify/layouts/test_judge.py has those
    return sorted({name for name in quick if BUGS[name].fast} | {*random.Random(0).sample(quick, SAMPLE)})


@pytest.mark.uncounted
def test_bugs_are_named_and_are_the_rows_of_the_table(run_ranks):
    names = _names()
    found = verdicts(run_ranks, names)
    told = {name: [str(one) for one in found[name].differences[:1]] for name in names}
    assert [told[name] for name in names if not named(BUGS[name], found[name])] == []
    rows = {masked(one) for one in rows_of(PAGE.read_text(encoding="utf-8"))}
    missing = [row(BUGS[name], found[name]) for name in names if masked(row(BUGS[name], found[name])) not in rows]
    assert missing == [], "write the table with `python -m tests.tools.verify.catalogue`"


def test_the_table_has_every_bug_and_no_other():
    rows = rows_of(PAGE.read_text(encoding="utf-8"))
    assert len(rows) == len(BUGS)
    assert all(any(bug.sentence in one for one in rows) for bug in BUGS.values())


def test_the_table_of_bugs_in_runs_is_what_their_test_asks():
    assert runs_table() in PAGE.read_text(encoding="utf-8"), "write it with `python -m tests.tools.verify.catalogue`"


def test_the_catalogue_is_as_large_as_is_told():
    kinds = [bug for bug in BUGS.values() if bug.kind]
    assert len(BUGS) >= 40
    assert len(kinds) >= 38
    assert {bug.ranks for bug in BUGS.values()} == {1, 2, 4}
