"""`megamix doctor` prints a page or JSON about this machine, within the time it is given, and ends with 1 if something
is broken; ranks name wrong sums, wrong compiled gradients and a slow training
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import pytest

from megamix.cli import main
from megamix.doctor import cards, command, host
from megamix.doctor.finding import HANGS


def test_the_page_and_json_say_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    doctor = ["doctor", "--folder", str(tmp_path)]
    monkeypatch.setattr(command, "CPU_LIMIT_S", 0.0)
    monkeypatch.setattr(host, "probe_ports", lambda port: ("", ""))  # another program's
    assert main(doctor) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert f"{tmp_path}: nothing refused" in "\n".join(lines)
    assert any(
        line.startswith("-      verify          does not apply: no time is left: it may take 60 s of 0")
        for line in lines
    )
    assert last.startswith("fit to train: ")

    facts = {"torch": "2.13.0+cpu", "cuda": None, "nccl": "", "cudnn": 0, "problem": "", "cards": [], "apart": []}
    monkeypatch.setattr(cards, "probe_torch", lambda: facts)
    monkeypatch.setattr(host, "probe_compiler", lambda name: f"{name} is not on PATH")
    assert main([*doctor, "--json"]) == 1
    page = json.loads(capsys.readouterr().out)
    assert page["fit"] is False
    (broken,) = [one for one in page["checks"] if one["verdict"] == "broken"]
    assert broken["check"] == "compiler"
    assert broken["seen"] == "g++ is not on PATH"
    assert all(broken.values())
    told = [line[7:22].strip() for line in lines if not line.startswith(" ")]
    assert [one["check"] for one in page["checks"]] == told


def test_nothing_is_measured_where_torch_does_not_load(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "BROKEN torch           ends with 1 (expected: 2.11 or newer)\n" in out
    assert "-      all else        does not apply: torch does not load\nNOT fit: mend what is BROKEN: " in out


def test_a_check_that_hangs_holds_up_neither_the_page_nor_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    end, ended = threading.Event(), list[int]()
    monkeypatch.setattr(cards, "probe_torch", lambda: {"problem": "does not load"})
    monkeypatch.setattr(host, "probe_disk", lambda folder: end.wait() and None)
    monkeypatch.setattr(command, "_HOST_LIMIT_S", 0.5)
    monkeypatch.setattr(os, "_exit", ended.append)
    try:
        main(["doctor"])
    finally:
        end.set()
        for thread in threading.enumerate():
            if thread.name == HANGS:
                thread.join()
    assert ended == [1]
    lines = capsys.readouterr().out.splitlines()
    assert "BROKEN answer file system none in 0 s (expected: an answer)" in lines
    assert lines[-1].startswith("NOT fit")
