"""The scripts of launch/ use nothing that bash 3.2, which is macOS's, or the tools of BSD lack; a table says what to
write instead.
"""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

LAUNCH = Path(__file__).parents[1] / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))


class Lacking(NamedTuple):
    """A construct that macOS lacks, with an example and what to write instead."""

    pattern: str  # of a line of a script
    example: str
    instead: str


WORD = r"(?:^|[;&|(){}!]|\b(?:then|do|else|if|while|until))\s*"  # in front of a command
LACKING = [
    Lacking(WORD + r"(?:mapfile|readarray)\b", "mapfile -t a < <(ls)", 'while read -r b; do a+=("$b"); done < <(ls)'),
    Lacking(r"\$\{!?\w+(?:\[[^]]*\])?[\^,]", 'echo "${name^^}"', "tr '[:lower:]' '[:upper:]'"),
    Lacking(r"\$\{\w+(?:\[[^]]*\])?@[A-Za-z]\}", 'echo "${name@Q}"', "printf %q"),
    Lacking(r"\$\{\w+\[-", 'echo "${a[-1]}"', '"${a[${#a[@]} - 1]}"'),
    Lacking(r"\b(?:declare|local|typeset) -\w*[Agn]", "local -A sizes", "another name, or two arrays"),
    Lacking(r"&>>", "ls &>>log", ">>log 2>&1"),
    Lacking(r"\|&", "ls |& cat", "2>&1 |"),
    Lacking(r";;?&", ";;&", "a case for each"),
    Lacking(r"\bwait -\w*n", "wait -n", 'wait "$pid"'),
    Lacking(r"(?:\[\[|\btest) -v\b", "[[ -v name ]]", '[[ -n "${name+set}" ]]'),
    Lacking(WORD + r"coproc\b", "coproc cat", "a FIFO"),
    Lacking(r"\{\w+\}[<>]", "exec {log}>file", "a number: exec 9>file"),
    Lacking(r"\bread\b[^;|]* -t *\S*\.", "read -t 0.5 line", "whole seconds"),
    Lacking(r"%\([^)]*\)T", "printf '%(%s)T'", "date +%s"),
    Lacking(r"\$\{?(?:BASHPID|EPOCH\w+|SRANDOM)\b", "echo $EPOCHSECONDS", "$$, date +%s, $RANDOM"),
    Lacking(r"\bshopt -s (?:globstar|lastpipe|inherit_errexit)", "shopt -s globstar", "find"),
    Lacking(r"\"\$\{!\w+@\}\"", 'unset "${!PET_@}"', "${!PET_@}: between quotes it may be an empty word"),
    Lacking(WORD + r"(?:readlink|realpath)\b", "realpath .", '"$(cd -- "$folder" && pwd)"'),
    Lacking(WORD + r"(?:timeout|nproc|tac|seq|shuf|setsid|flock|getent|ss|free|numfmt|stdbuf|md5sum|sha\d+sum)\b",
            "timeout 5 ls", "what POSIX has, or $PYTHON"),
    Lacking(r"\bsed\b[^|;]* -\w*[irz]", "sed -i s/a/b/ file", "another file, and basic expressions"),
    Lacking(r"\bgrep\b[^|;]* -\w*P", "grep -P a file", "grep -E"),
    Lacking(r"\bdate\b[^|;)]* (?:-[dIr]|\+\S*%N)", "date -d now", "date +FORMAT"),
    Lacking(WORD + r"(?:mktemp|stat)\b[^|;)]* -", "mktemp -p .", "mktemp without options; wc -c, ls -l"),
    Lacking(r"\bfind\b[^|;]* -(?:printf|regextype|quit)", "find . -printf %p", "find . -print"),
    Lacking(r"\b(?:cat|cksum|cp|cut|date|du|grep|head|ls|mkdir|mv|ps|rm|sed|sleep|sort|tail|tr|wc|xargs)\b[^|;&()]* "
            r"--(?!include)[a-z]", "rm --force file", "the option's letter"),
    Lacking(r"^(?!.*\|\| ps ).*/(?:proc|sys|dev/shm)/", "cat /proc/1/stat", "with another way: ... || ps -p 1"),
]  # fmt: skip


def _lines(script):
    """Return a script's lines without comments, numbered."""
    lines = re.sub(r"(^|\s)#.*", r"\1", script.read_text(), flags=re.MULTILINE).splitlines()
    return [f"{script.name}:{number}: {line}" for number, line in enumerate(lines, 1)]


def _lacking(line):
    code = line.partition(": ")[2]
    return [f"{line}; write: {one.instead}" for one in LACKING if re.search(one.pattern, code.strip())]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_keeps_to_what_macos_has(script):
    assert [told for line in _lines(script) for told in _lacking(line)] == []


@pytest.mark.parametrize("one", LACKING, ids=lambda one: one.example)
def test_each_row_of_the_table_finds_its_example(one):
    assert f"x.sh:1: {one.example}; write: {one.instead}" in _lacking(f"x.sh:1: {one.example}")


def _bare_arrays(script):
    """Return the lines that expand an array that may be empty: before bash 4.4 `set -u` takes it for unset."""
    told = _lines(script)
    may_be_empty = {name for line in told for name in re.findall(r"\b(\w+)=\(\)", line)}
    guarded = re.compile(r'\$\{(\w+)\[@\]\+"\$\{\1\[@\]\}"\}')  # ${a[@]+"${a[@]}"}
    return [line for line in told if may_be_empty & {*re.findall(r"\$\{(\w+)\[[@*]\]\}", guarded.sub("", line))}]


@pytest.mark.parametrize("script", [*SCRIPTS, LAUNCH / "slurm.sbatch"], ids=lambda script: script.name)
def test_an_array_that_may_be_empty_is_expanded_so_that_bash_3_2_bears_it(script):
    assert _bare_arrays(script) == []


def test_a_bare_empty_array_is_found(tmp_path):
    (tmp_path / "x.sh").write_text('a=()\nb=(1)\nls "${a[@]}" "${b[@]}"\nls ${a[@]+"${a[@]}"} "${a[*]-}" "${#a[@]}"\n')
    assert _bare_arrays(tmp_path / "x.sh") == ['x.sh:3: ls "${a[@]}" "${b[@]}"']
