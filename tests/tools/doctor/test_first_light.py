"""The first light keeps each finding at once, names no host, user or path, and tells on its page what is wrong first.
Killed at any instant it leaves every finished result, and no process.
"""

import json
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from megamix.cli.verbs import main
from megamix.config import config_from_dict
from megamix.tools.doctor import cards, first_light, first_parts
from megamix.tools.doctor.finding import expected, found, not_here
from megamix.tools.doctor.first_light import LOG, PAGE, RESULTS, LightPart, LightResults, page
from megamix.tools.verify.core.layout import parse_layout
from tests.conftest import FULL

ROOT = Path(__file__).resolve().parents[3]
# A part that tells a number of findings, of which it notes each in a file as well, and has a process in a session of
# its own, as a job's ranks are.
TELLS = """
import json, os, subprocess, sys, time
number, folder = int(sys.argv[1]), sys.argv[2]
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", folder],
                         start_new_session=True, preexec_fn=lambda: __import__("ctypes").CDLL(None).prctl(1, 15))
for row in range(5):
    print(json.dumps({"number": number, "row": row}), flush=True)
    time.sleep(0.1)
    open(f"{folder}/told_{number}_{row}", "w").close()
while not os.path.exists(f"{folder}/may_end"):
    time.sleep(0.05)
child.kill()
"""
# A first light of four such parts.
DRIVER = """
import sys
from pathlib import Path
from megamix.tools.doctor import first_light
from megamix.tools.doctor.first_light import LightPart
tells, told, out = sys.argv[1:]
parts = [LightPart(f"part {n}", [tells, str(n), told], 60) for n in range(4)]
first_light.parts = lambda on_gpu: parts
sys.exit(first_light.run(Path(out), [part.name for part in parts], 60, on_gpu=False))
"""


def _wait_for(what):
    end_s = time.monotonic() + 20.0
    while not what():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def _no_process_of(mark):
    return not any(mark in " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))


def _rows(out):
    return [json.loads(line) for line in (out / RESULTS).read_text().splitlines()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("seed", range(10 if FULL else 1))
def test_killed_at_a_random_instant_it_leaves_every_finished_result_and_no_process(tmp_path, number, seed):
    tells, told, out = tmp_path / "tells.py", tmp_path / "told", tmp_path / "out"
    tells.write_text(TELLS)
    told.mkdir()
    (told / "may_end").touch()
    quiet = {"stderr": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, tells, told, out], cwd=ROOT, **quiet)
    many = random.Random(seed * 100 + number).randint(1, 18)
    _wait_for(lambda: len([*told.iterdir()]) > many)
    (told / "may_end").unlink()
    driver.send_signal(number)
    driver.wait(30)
    before = {path.name for path in told.iterdir()}
    _wait_for(lambda: _no_process_of(str(tmp_path)))
    # A finding of the last moment may have been on its way when the driver was killed.
    kept = {f"told_{row['number']}_{row['row']}" for row in _rows(out) if "row" in row}
    assert len(before - kept) <= (2 if number == signal.SIGKILL else 0)


def test_a_part_that_takes_too_long_is_cut_and_its_results_stay(tmp_path, monkeypatch, capsys):
    slow = 'import time; print(\'{"row": 1}\', flush=True); print("a word", flush=True); time.sleep(600)'
    parts = [
        LightPart("slow", ["-c", slow], 2.0),
        LightPart("fails", ["-c", "import sys; sys.exit(3)"], 20.0),
        LightPart("fine", ["-c", "print('{\"row\": 2}')"], 20.0),
    ]
    monkeypatch.setattr(first_light, "parts", lambda on_gpu: parts)
    assert first_light.run(tmp_path, ["slow", "fails", "fine"], 100.0, on_gpu=False) == 1
    text = (tmp_path / PAGE).read_text()
    wrong, right = text.split("What is right")
    assert "part slow: cut" in wrong
    assert "part fails: status 3" in wrong
    assert "part fine: status 0" in right
    assert [row["row"] for row in _rows(tmp_path) if "row" in row] == [1, 2]
    assert b"a word" in (tmp_path / LOG).read_bytes()
    assert text.strip() in capsys.readouterr().out
    assert first_light.run(tmp_path, ["fine"], 100.0, on_gpu=False) == 1  # what other parts have found stays
    assert [(row["part"], row["row"]) for row in _rows(tmp_path) if "row" in row] == [("slow", 1), ("fine", 2)]
    assert first_light.run(tmp_path, ["slow", "fails"], 1.0, on_gpu=False) == 0  # no time is left
    assert "part slow: no time was left" in (tmp_path / PAGE).read_text().split("What is not judged")[1]


def test_a_folder_that_cannot_be_written_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(cards, "probe_torch", dict)  # which would import torch anew
    assert main(["doctor", "--first-light", "/proc/out"]) == 2
    assert "--first-light: got /proc/out: /proc takes no new folder" in capsys.readouterr().err


def test_the_page_has_what_is_wrong_first_and_a_bench_as_a_table():
    findings = [found("disk", "900 MB/s", False), found("torch", "2.10", True), not_here("links", "there is one card")]
    table = {"columns": ["variant", "GB/s"], "rows": [["copy", "4000.0"]], "notes": ["a note"]}
    goals = [{"text": "rate over the copy's", "value": 0.95, "met": True}]
    rows = [{"part": "machine", **asdict(finding)} for finding in findings]
    rows += [{"part": "update", "bench": "update", **more} for more in ({"round": 1}, table | {"goals": goals})]
    lines = [*page(rows)]
    places = [lines.index(f"What is {title}") for title in ("wrong", "right", "not here")]
    assert places == sorted(places)
    assert "BROKEN" in lines[places[0] + 1]
    assert lines[lines.index("variant    GB/s") + 1] == "copy     4000.0"
    assert "met 0.950: rate over the copy's, update" in lines


def test_each_setting_that_is_verified_is_a_job():
    for change in first_parts.SETTINGS.values():
        config = config_from_dict(expected()["job"], change)
        parse_layout("dp1").apply(config)
    for name in first_parts.SHARED:
        parse_layout(name).apply(config_from_dict(expected()["job"]))


def test_rows_name_no_host_user_or_path(tmp_path, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "node17")
    monkeypatch.setenv("HOME", "/home/ada")
    record = LightResults(tmp_path, [])
    record.add("job", {"seen": "saved /home/ada/runs/step_5 on node17\n/home/ada /dev/shm 2 GiB; 3 tokens/s", "n": 1})
    (row,) = _rows(tmp_path)
    assert row["seen"] == "saved step_5 on ...\n... /dev/shm 2 GiB; 3 tokens/s"
