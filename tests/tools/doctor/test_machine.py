"""`megamix doctor` names what is broken about a machine, and the remedy: driver, torch, cards, links, hostname, ports,
disk.
"""

import errno
import fcntl
import os
import resource
import socket
import threading
from pathlib import Path
from unittest import mock

import pytest

from megamix.tools.doctor import cards, host
from megamix.tools.doctor.finding import Finding, expected, found, not_here, run_check, summary

H100 = {
    "name": "NVIDIA H100 80GB HBM3", "driver_version": "580.95", "power.default_limit": 700.0, "power.limit": 700.0,
    "pcie.link.width.max": 16.0, "pcie.link.width.current": 16.0, "memory.total": 81559.0, "memory.used": 4.0,
    "clocks_event_reasons.active": 1.0, "ecc.errors.uncorrected.volatile.total": 0.0,
}  # fmt: skip
FACTS = {
    "torch": "2.13.0+cu130", "cuda": "13.0", "nccl": "2.28.9", "problem": "", "cards": [H100["name"]] * 2, "apart": [],
}  # fmt: skip
NVLINKED = [
    "\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity", "GPU0\t X \tNV18\tNV18\tPXB\t0-47", "GPU1\tNV18\t X \tNV18\tSYS\t0-47",
    "GPU2\tNV18\tNV18\t X \tSYS\t48-95", "NIC0\tPXB\tSYS\tSYS\t X",
]  # fmt: skip


def with_cards(*changes):
    return [H100 | change for change in changes]


def judged_torch(on_driver=2, visible=None, **changes):
    return cards.judge_torch(FACTS | changes, on_driver, visible)


RUNS = Path("/runs")
FULL_DISK = {"write": "No space left on device"}
ONE_APART = [line.replace(" X \tNV18\tSYS", " X \tSYS\tSYS") for line in NVLINKED]
BROKEN = [
    (cards.judge_driver(8, [], "there is no nvidia-smi"), "driver", "there is no nvidia-smi"),
    (cards.judge_driver(8, with_cards(*[{}] * 7), ""), "cards", "7 of 8 card(s)"),
    (cards.judge_driver(2, with_cards({}, {"name": "NVIDIA H200"}), ""), "cards", "NVIDIA H200, driver"),
    *(
        (cards.judge_cards(with_cards({}, {key: value})), check, f"card 1: {value:.0f}")
        for key, value, check in (
            ("power.limit", 400.0, "power limit"),
            ("clocks_event_reasons.active", 0x48, "throttled"),
            ("ecc.errors.uncorrected.volatile.total", 2.0, "memory errors"),
            ("pcie.link.width.current", 8.0, "PCIe lanes"),
            ("memory.used", 70000.0, "used memory"),
        )
    ),
    (cards.judge_links(NVLINKED, ["0-2"]), "links", "0-2 without peer access"),
    (cards.judge_links(ONE_APART, []), "links", "1-2 by SYS"),
    (cards.judge_torch({"problem": "ImportError: libcudart.so"}, 0, None), "torch", "libcudart"),
    (judged_torch(torch="2.9.1"), "torch", "2.9.1"),
    (judged_torch(cuda=None, cards=[]), "torch's CUDA", "a build for CPUs"),
    (judged_torch(visible="0,9", cards=[H100["name"]]), "torch's CUDA", "'0,9'"),
    (judged_torch(visible="", cards=[]), "torch's CUDA", "13.0, 0 of 2 card(s), CUDA_VISIBLE_DEVICES ''"),
    (judged_torch(cards=[], problem="The NVIDIA driver is too old"), "torch's CUDA", "too old"),
    (host.judge_hostname("node7", {}), "hostname", "node7 is not resolved"),
    (host.judge_hostname("node7", {"10.0.0.9": False}), "hostname", "10.0.0.9 (not of this machine)"),
    (host.judge_hostname("node7", {"127.0.1.1": True}, several=True), "hostname", "node7 is 127.0.1.1"),
    (host.judge_ports("", "Address already in use", 29500), "port", "29500: Address already in use"),
    (host.judge_shm(64 << 20, gpus=True), "/dev/shm", "0.06 GiB free"),
    (host.judge_disk(RUNS, 10**12, 1e9, FULL_DISK), "file system", "/runs: write: No space left on device"),
    (host.judge_disk(RUNS, 10**12, 9e6, {}), "disk", "9 MB/s"),
    (host.judge_disk(RUNS, 1 << 30, 1e9, {}), "free space", "1.0 GiB"),
]


@pytest.mark.parametrize(("findings", "check", "seen"), BROKEN)
def test_a_broken_machine_is_named_with_what_to_do(findings, check, seen):
    (wrong,) = [one for one in ([findings] if isinstance(findings, Finding) else findings) if one.verdict != "ok"]
    assert wrong.check == check
    assert seen in wrong.seen
    assert wrong.verdict == expected()["checks"][check]["wrong"]
    assert wrong.fix
    assert "{" not in wrong.fix


def test_a_sound_machine_has_nothing_to_mend():
    findings = [
        cards.judge_driver(2, with_cards({}, {}), ""), *cards.judge_cards(with_cards({}, {})), *judged_torch(),
        *judged_torch(on_driver=0, cuda=None, cards=[]), cards.judge_links(NVLINKED, []),
        host.judge_hostname("node7", {"10.0.0.9": False, "10.0.0.7": True}), *host.judge_ports("", "", 29500),
        host.judge_shm(64 << 20, gpus=False), *host.judge_disk(RUNS, 10**12, 1e9, {}),
    ]  # fmt: skip
    assert {one.verdict for one in findings} == {"ok"}
    assert {one.fix for one in findings} == {""}
    assert cards.judge_driver(0, [], "there is no nvidia-smi").verdict == "does not apply"
    assert cards.judge_links([], []).verdict == "does not apply"
    assert [one.verdict for one in host.judge_ports("", "Address already in use", 0)] == ["ok", "does not apply"]
    of_one, of_many = {"MASTER_PORT": "29500"}, {"NNODES": "2"}
    environments = [of_one, of_many, of_one | of_many, of_many | {"NODE_RANK": "1"}]
    assert [host.meeting_port(one) for one in environments] == [0, 29500, 29500, 0]


@pytest.mark.parametrize(
    ("call", "number", "told"),
    [
        ((os, "fsync"), errno.EIO, "fsync: Input/output error"),
        ((fcntl, "flock"), errno.ENOSYS, "lock: Function not implemented"),
        ((Path, "rename"), errno.EXDEV, "rename: Invalid cross-device link"),
    ],
)
def test_what_a_file_system_refuses_is_told(tmp_path, monkeypatch, call, number, told):
    monkeypatch.setattr(*call, mock.Mock(side_effect=OSError(number, os.strerror(number))))
    folder, *others = host.probe_disk(tmp_path / "runs/not/yet")
    assert folder == tmp_path
    assert told in host.judge_disk(folder, *others)[0].seen
    assert [*tmp_path.iterdir()] == []


def test_a_disk_that_fills_up_is_told(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        *_, refused = host.probe_disk(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert refused == {"write": "File too large"}


def test_this_machine_is_read_as_it_is(tmp_path, monkeypatch):
    assert host.probe_disk(tmp_path)[-1] == {}
    (tmp_path / "file").touch()
    assert "Not a directory" in host.probe_disk(tmp_path / "file/runs")[-1]["a new folder"]
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert host.probe_hostname() == ("no-such-host.invalid", {})
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.0.1")
    assert host.probe_hostname() == ("127.0.0.1", {"127.0.0.1": True})
    with socket.create_server(("", 0)) as taken:
        assert host.probe_ports(taken.getsockname()[1]) == ("", "Address already in use")


@pytest.fixture
def fake_smi(tmp_path, monkeypatch):
    """Fake an nvidia-smi that prints the content of the returned file, and a PCI bus."""
    answer, program = tmp_path / "answer", tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\ncat {answer}\ntest "$(wc -l < {answer})" -gt 1 || exit 9\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for number, (vendor, kind) in enumerate([("0x10de", "0x030200"), ("0x10de", "0x040300"), ("0x8086", "0x030000")]):
        device = tmp_path / f"pci/{number}"
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    monkeypatch.setattr(cards, "_PCI", tmp_path / "pci")
    return answer


def test_the_driver_is_asked_for_every_card(fake_smi):
    row = "NVIDIA H100 80GB HBM3, 580.95, 700.00, 16, 81559, 650.00, 0x0000000000000004, 16, [N/A], 4\n"
    fake_smi.write_text(2 * row)
    seen, problem = cards.probe_cards()
    assert problem == ""
    assert [card["name"] for card in seen] == ["NVIDIA H100 80GB HBM3"] * 2
    assert [one.check for one in cards.judge_cards(seen) if one.verdict != "ok"] == ["power limit"]
    fake_smi.write_text("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n")
    assert cards.probe_cards() == ([], "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.")
    assert cards.probe_pci() == 1


@pytest.mark.parametrize(("smi", "asks"), [("event", "throttle"), ("event|throttle", "")])
def test_an_older_driver_is_asked_by_its_own_names(fake_smi, smi, asks):
    program = fake_smi.with_name("nvidia-smi")
    refuses = f"""echo "$1" | grep -Eq '{smi}' && {{ echo 'Field "{smi}" is not a valid field to query.'; exit 2; }}"""
    program.write_text(f"#!/bin/sh\n{refuses}\ncat {fake_smi}\n")
    fake_smi.write_text("Tesla V100, 470.82, 300.00, 16, 16160, 300.00, 0x0000000000000040, 16, 0, 4\n")
    seen, problem = cards.probe_cards()
    if asks:
        assert [one.seen for one in cards.judge_cards(seen) if one.verdict != "ok"] == ["card 0: 64"]
        assert problem == ""
    else:
        assert (seen, problem) == ([], f'Field "{smi}" is not a valid field to query.')


def test_a_check_that_raises_is_a_finding(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    raises = mock.Mock(side_effect=RuntimeError("traceback\nCUDA error: unspecified launch failure"))
    (one,) = run_check("update", raises, limit_s=5.0)
    assert (one.check, one.verdict) == ("answer update", "broken")
    assert one.seen == "RuntimeError: CUDA error: unspecified launch failure"


def test_a_check_gets_the_time_that_it_is_given_and_no_more(monkeypatch):
    waited = []
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    monkeypatch.setattr(threading.Thread, "is_alive", lambda self: True)
    monkeypatch.setattr(threading.Thread, "join", lambda self, timeout: waited.append(timeout))
    run_check("disk", list, limit_s=60.0)
    assert sum(waited) == 60.0


def test_the_page_says_what_to_do_below_what_is_wrong():
    free, taken, absent = found("port", "free", False), found("port", "taken", True), not_here("links", "one card")
    first, second = taken.lines()
    assert first.startswith("BROKEN port")
    assert second.strip() == f"-> {expected()['checks']['port']['fix']}"
    assert [*absent.lines()] == ["-      links           does not apply: one card"]
    findings = [free, found("disk", "9 MB/s", True), absent]
    assert summary(findings) == "fit to train: 1 ok, 1 slow, 1 does not apply"
    assert summary([*findings, taken]).startswith("NOT fit: repair each BROKEN line: 1 ok, ")


def test_every_check_has_all_its_texts():
    for check, said in expected()["checks"].items():
        assert {*said} == {"looked_at", "expected", "wrong", "fix"}, check
        assert said["wrong"] in ("slow", "broken", "not judged"), check
        assert len(check) <= 15, check
