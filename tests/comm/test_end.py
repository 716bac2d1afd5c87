"""A library program that has finished ends with its own status, whatever threads of torch have left to do, and its last
checkpoint is whole. One that fails ends at once, with its traceback.
"""

import socket
import subprocess
import sys

from tests.programs import with_settings

# A thread of Gloo waits for Python's lock, which the main thread keeps from here to the interpreter's end.
DROPS = """
import sys, time, torch, torch.distributed as dist, megamix
megamix.start_ranks(timeout_s=60)
sys.setswitchinterval(1000)
dist.all_reduce(torch.ones(4), async_op=True)
end_s = time.monotonic() + 0.5
while time.monotonic() < end_s:
    pass
"""

SAVES = """
import sys, time, torch, megamix
from megamix.checkpoint.folder import Files
engine = megamix.ShardedEngine(torch.nn.Linear(8, 8), megamix.AdamW(lr=1e-3), compile_update=False)
written = Files.write_file
Files.write_file = lambda *given: time.sleep(float(sys.argv[2])) or written(*given)
checkpoints = megamix.Checkpoints(engine, sys.argv[1])
checkpoints.load()
checkpoints.save({"step": 1}, beside=True)
exec(sys.argv[3])
"""


def _start(program, *words, **settings):
    command = [sys.executable, "-c", program, *map(str, words)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=with_settings(**settings))


def test_a_thread_that_comes_back_from_torch_at_the_end_aborts_no_rank():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    world = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [_start(DROPS, **world, RANK=rank, LOCAL_RANK=rank) for rank in range(2)]
    assert [(rank.communicate(timeout=300)[1], rank.returncode) for rank in ranks] == [("", 0)] * 2


def test_a_finished_program_waits_for_the_checkpoint_that_it_saves_beside_training(tmp_path):
    program = _start(SAVES, tmp_path / "run", 0.3, "sys.exit(3)")
    assert (program.communicate(timeout=300)[1], program.returncode) == ("", 3)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step_00000000"]


def test_a_last_save_that_fails_fails_the_program(tmp_path):
    ending = "written = lambda *given: [][0]"  # in place of what writes a file
    program = _start(SAVES, tmp_path / "run", 0.3, ending)
    assert "IndexError" in program.communicate(timeout=100)[1]
    assert program.returncode == 1


def test_a_program_that_fails_waits_for_no_save(tmp_path):
    program = _start(SAVES, tmp_path / "run", 1000, "raise KeyError('mine')")
    assert program.communicate(timeout=300)[1].endswith("KeyError: 'mine'\n")
    assert program.returncode == 1
