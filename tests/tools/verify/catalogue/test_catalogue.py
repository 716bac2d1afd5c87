"""`verify` names bugs that users of known systems met, with place, kind and step, as the table in answers.md says, and
bugs in other loops, whose kinds were written down before it had seen any. docs/verify_reference.md has all kinds.
"""

import re

import pytest

from tests.tools.verify.catalogue.__main__ import ANSWERS, IN_TABLE, PAGE, masked, row, rows_of, runs_table
from tests.tools.verify.catalogue.bugs import BUGS, named
from tests.tools.verify.catalogue.run import verdicts


def check(found):
    """Check that verdicts name their bugs, as the rows of the page's table do. `found`: verdicts by name."""
    told = {name: [str(one) for one in verdict.differences[:1]] for name, verdict in found.items()}
    assert [(name, told[name]) for name, verdict in found.items() if not named(BUGS[name], verdict)] == []
    rows = {masked(one) for one in rows_of(ANSWERS.read_text(encoding="utf-8"))}
    in_table = [masked(row(BUGS[name], verdict)) for name, verdict in found.items() if BUGS[name].met_in]
    assert [one for one in in_table if one not in rows] == [], "write it with `python -m tests.tools.verify.catalogue`"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bugs_are_named_and_are_the_rows_of_the_table(run_ranks, ranks):
    of_trainers = [bug for bug in BUGS.values() if not bug.layout]  # layouts/test_judge.py has the others
    check(verdicts(run_ranks, [bug.name for bug in of_trainers if bug.ranks == ranks]))


def test_the_tables_have_every_bug_and_no_other():
    page = PAGE.read_text(encoding="utf-8")
    rows = rows_of(ANSWERS.read_text(encoding="utf-8"))
    assert len(rows) == len(IN_TABLE)
    assert f"`verify` finds all {len(rows)} at the right place" in page
    assert all(any(bug.sentence in one for one in rows) for bug in IN_TABLE)
    assert runs_table() in page, "write it with `python -m tests.tools.verify.catalogue`"


def test_the_page_has_the_kind_and_the_threads_of_every_bug():
    page = " ".join(PAGE.read_text(encoding="utf-8").partition("## Bugs that it names")[2].split())
    assert [bug.name for bug in IN_TABLE if masked(bug.kind) not in masked(page)] == []
    threads = {thread for bug in IN_TABLE for thread in re.findall(r"#\d+", bug.met_in)}
    assert threads - {*re.findall(r"#\d+", page)} == set()
