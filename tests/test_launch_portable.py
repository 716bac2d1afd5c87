"""The scripts of launch/ use nothing that bash 3.2, which is macOS's, or the tools of BSD lack; a table says what to
write instead.
"""

import re
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[1] / "launch"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))


WORD = r"(?:^|[;&|(){}!]|\b(?:then|do|else|if|while|until))\s*"  # in front of a command
LACKING = [  # patterns of a line of a script, and what to write instead
    (WORD + r"(?:mapfile|readarray)\b", 'while read -r b; do a+=("$b"); done < <(ls)'),
    (r"\$\{!?\w+(?:\[[^]]*\])?[\^,]", "tr '[:lower:]' '[:upper:]'"),
    (r"\$\{\w+(?:\[[^]]*\])?@[A-Za-z]\}", "printf %q"),
    (r"\$\{\w+\[-", '"${a[${#a[@]} - 1]}"'),
    (r"\b(?:declare|local|typeset) -\w*[Agn]", "another name, or two arrays"),
    (r"&>>", ">>log 2>&1"),
    (r"\|&", "2>&1 |"),
    (r";;?&", "a case for each"),
    (r"\bwait -\w*n", 'wait "$pid"'),
    (r"(?:\[\[|\btest) -v\b", '[[ -n "${name+set}" ]]'),
    (WORD + r"coproc\b", "a FIFO"),
    (r"\{\w+\}[<>]", "a number: exec 9>file"),
    (r"\bread\b[^;|]* -t *\S*\.", "whole seconds"),
    (r"%\([^)]*\)T", "date +%s"),
    (r"\$\{?(?:BASHPID|EPOCH\w+|SRANDOM)\b", "$$, date +%s, $RANDOM"),
    (r"\bshopt -s (?:globstar|lastpipe|inherit_errexit)", "find"),
    (r"\"\$\{!\w+@\}\"", "${!PET_@}: between quotes it may be an empty word"),
    (WORD + r"(?:readlink|realpath)\b", '"$(cd -- "$folder" && pwd)"'),
    (
        WORD + r"(?:timeout|nproc|tac|seq|shuf|setsid|flock|getent|ss|free|numfmt|stdbuf|md5sum|sha\d+sum)\b",
        "what POSIX has, or $PYTHON",
    ),
    (r"\bsed\b[^|;]* -\w*[irz]", "another file, and basic expressions"),
    (r"\bgrep\b[^|;]* -\w*P", "grep -E"),
    (r"\bdate\b[^|;)]* (?:-[dIr]|\+\S*%N)", "date +FORMAT"),
    (WORD + r"(?:mktemp|stat)\b[^|;)]* -", "mktemp without options; wc -c, ls -l"),
    (r"\bfind\b[^|;]* -(?:printf|regextype|quit)", "find . -print"),
    (
        r"\b(?:cat|cksum|cp|cut|date|du|grep|head|ls|mkdir|mv|ps|rm|sed|sleep|sort|tail|tr|wc|xargs)\b[^|;&()]* "
        r"--(?!include)[a-z]",
        "the option's letter",
    ),
    (r"^(?!.*\|\| ps ).*/(?:proc|sys|dev/shm)/", "with another way: ... || ps -p 1"),
]


def _lines(script):
    """Return a script's lines without comments, numbered."""
    lines = re.sub(r"(^|\s)#.*", r"\1", script.read_text(), flags=re.MULTILINE).splitlines()
    return [f"{script.name}:{number}: {line}" for number, line in enumerate(lines, 1)]


def _lacking(line):
    code = line.partition(": ")[2]
    return [f"{line}; write: {instead}" for pattern, instead in LACKING if re.search(pattern, code.strip())]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_keeps_to_what_macos_has(script):
    assert [told for line in _lines(script) for told in _lacking(line)] == []


def _bare_arrays(script):
    """Return the lines that expand an array that may be empty: before bash 4.4 `set -u` takes it for unset."""
    told = _lines(script)
    may_be_empty = {name for line in told for name in re.findall(r"\b(\w+)=\(\)", line)}
    guarded = re.compile(r'\$\{(\w+)\[@\]\+"\$\{\1\[@\]\}"\}')  # ${a[@]+"${a[@]}"}
    return [line for line in told if may_be_empty & {*re.findall(r"\$\{(\w+)\[[@*]\]\}", guarded.sub("", line))}]


@pytest.mark.parametrize("script", [*SCRIPTS, LAUNCH / "slurm.sbatch"], ids=lambda script: script.name)
def test_an_array_that_may_be_empty_is_expanded_so_that_bash_3_2_bears_it(script):
    assert _bare_arrays(script) == []
