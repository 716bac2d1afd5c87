"""`megamix doctor` prints a page or JSON about this machine, within its time, and ends with 1 if something is broken; a
late check on a busy machine is not judged.
"""

import json
import os
import sys
import threading
from unittest import mock

import pytest
import torch

from megamix.base.machine import num_cores
from megamix.cli import doctor
from megamix.cli.verbs import main
from megamix.tools.doctor import cards, host, measured
from megamix.tools.doctor.finding import HANGS
from megamix.tools.ranks import LateRanks

probe_torch = cards.probe_torch


pytestmark = pytest.mark.usefixtures("sound")


@pytest.fixture
def sound(monkeypatch):
    """Fake a sound machine without cards, and no time to measure it."""
    facts = {"torch": "2.13.0+cpu", "cuda": None, "nccl": "", "problem": "", "cards": [], "apart": []}
    monkeypatch.setattr(host, "probe_disk", lambda folder: (folder, 10**12, 1e9, {}))
    monkeypatch.setattr(host, "probe_hostname", lambda: ("node7", {"10.0.0.7": True}))
    monkeypatch.setattr(host, "probe_ports", lambda port: ("", ""))
    monkeypatch.setattr(cards, "probe_torch", lambda: facts)
    monkeypatch.setattr(cards, "probe_pci", lambda: 0)
    monkeypatch.setattr(cards, "ask_driver", lambda *_: ([], "there is no nvidia-smi"))
    monkeypatch.setattr(doctor, "CPU_LIMIT_S", 0.0)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))


def test_the_page_and_json_say_the_same(capsys, monkeypatch):
    assert main(["doctor", "--folder", "/runs"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert "ok     file system     /runs: nothing refused (expected: nothing refused)" in lines
    assert "?      time wire       no time is left: it may take 30 s of 0 (expected: an answer)" in lines
    assert last.startswith("fit as far as judged: ")

    monkeypatch.setattr(host, "probe_ports", lambda port: ("Connection refused", ""))
    assert main(["doctor", "--json"]) == 1
    *checks, verdict = map(json.loads, capsys.readouterr().out.splitlines())
    assert verdict == {"fit": False}
    (broken,) = [one for one in checks if one["verdict"] == "broken"]
    assert broken["check"] == "loopback"
    assert broken["seen"] == "Connection refused"
    assert all(broken.values())
    told = [line for line in lines if not line.startswith(" ")]
    assert all(line[7:].startswith(one["check"]) for one, line in zip(checks, told, strict=True))


def test_named_checks_run_alone_and_an_unknown_name_lists_all(capsys):
    assert main(["doctor", "--only", "disk,collectives", "--limit", "60"]) == 2
    said = capsys.readouterr().err
    assert "--only: got disk, known are cores, driver, torch, links, " in said
    assert ", host waits, compiled blocks, " in said
    assert said.rstrip().endswith("train 124 M, train 1.3 B, train 3 M")
    assert main(["doctor", "--only", "cores,host waits", "--limit", "60", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.get("check") for line in lines] == ["cores", "host waits", None]
    assert lines[1]["seen"] == "does not apply: torch sees no CUDA"
    assert lines[2] == {"fit": True}
    assert main(["doctor", "--only", "cores", "--limit", "0"]) == 2


def test_a_check_whose_time_the_limit_cuts_is_not_judged(capsys, monkeypatch):
    late = mock.Mock(side_effect=LateRanks("rank 0: did not answer in time"))
    checks = {"compiled blocks": (late, 60.0), "wire": (late, 10.0), "train 3 M": (late, 10.0)}
    monkeypatch.setattr(measured, "checks", lambda cards, stack: checks)
    assert main(["doctor", "--only", "compiled blocks", "--limit", "45"]) == 0
    assert 10 < late.call_args.args[0] <= 30
    *_, line, _, last = capsys.readouterr().out.splitlines()
    assert line.startswith("?      time compiled blocks not judged: LateRanks: rank 0: did not answer in time; it ")
    assert last.startswith("fit as far as judged: ")
    assert main(["doctor", "--only", "wire", "--limit", "45"]) == 1  # it had all its time
    assert main(["doctor", "--only", "train 3 M", "--limit", "45"]) == 0  # a compiler may be slow


def test_torch_tells_its_facts(capsys):
    exec(cards._FACTS)
    facts = json.loads(capsys.readouterr().out)
    assert {*facts} == {"torch", "cuda", "nccl", "problem", "cards", "apart"}
    assert facts["torch"] == torch.__version__
    assert len(facts["cards"]) == torch.cuda.device_count()


def test_nothing_is_measured_where_torch_does_not_load(capsys, monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    monkeypatch.setattr(cards, "probe_torch", probe_torch)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "BROKEN torch           ends with 1 (expected: 2.11 or newer)\n" in out
    assert "-      all else        does not apply: torch does not load\nNOT fit: repair each BROKEN line: " in out


def test_a_check_that_hangs_is_named_and_holds_up_neither_the_page_nor_the_end(capsys, monkeypatch):
    end = threading.Event()
    monkeypatch.setattr(cards, "probe_torch", lambda: {"problem": "does not load"})
    monkeypatch.setattr(host, "probe_disk", lambda folder: end.wait() and None)
    monkeypatch.setattr(doctor, "_HOST_LIMIT_S", 0.5)  # the other checks look at nothing
    with mock.patch.object(os, "_exit") as ended:
        main(["doctor"])
    end.set()
    for thread in threading.enumerate():
        if thread.name == HANGS:
            thread.join()
    ended.assert_called_once_with(1)
    out, err = capsys.readouterr()
    assert "BROKEN answer file system none in 0 s (expected: an answer)" in out.splitlines()
    assert out.splitlines()[-1].startswith("NOT fit")
    assert "megamix doctor: file system, at most 0 s\n" in err


def test_a_port_that_is_no_number_is_a_finding(capsys, monkeypatch):
    monkeypatch.setenv("NNODES", "2")
    monkeypatch.setenv("MASTER_PORT", "the usual one")
    assert main(["doctor"]) == 1
    assert "BROKEN answer ports    ValueError: invalid literal" in capsys.readouterr().out


# A container may have a few of a machine's cores. As many as our ranks are is no more than they take.
@pytest.mark.parametrize(("load", "of", "busy"), [(2.0, 1, True), (1.0, 1, False), (8.0, 32, False)])
def test_a_busy_machine_is_told_at_the_top_and_what_is_late_on_it_is_not_judged(capsys, monkeypatch, load, of, busy):
    cores = num_cores()
    load, machine = load * cores, of * cores
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(host, "probe_disk", mock.Mock(side_effect=LateRanks("rank 1: did not answer in time")))
    assert main(["doctor"]) == (not busy)
    first, *lines = capsys.readouterr().out.splitlines()
    told = "LateRanks: rank 1: did not answer in time"
    if busy:
        assert first.startswith(f"SLOW   cores           {cores}, load {load:.1f} ")
        told = f"not judged: {told}; the machine is busy (load {load:.1f} on {cores} core(s)) (expected: an answer)"
        assert f"?      time file system {told}" in lines
        assert lines[-1].startswith("fit as far as judged: ")
    else:
        assert of == 1 or first.startswith(f"ok     cores           {cores} of {machine}, load {load:.1f} ")
        assert any(line.startswith(f"BROKEN answer file system {told}") for line in lines)
