"""From the command line to a gradient's first collective there are at most nine calls, those of docs/design.md."""

import re
import traceback
from pathlib import Path
from unittest import mock

import torch.distributed as dist

import megamix
from megamix.cli import main
from megamix.comm.collectives import GlooCollectives
from megamix.config import config_to_toml
from megamix.train import joined
from tests.builders import tiny_job, write_data

PACKAGE = Path(megamix.__file__).parent
MOST_CALLS = 9


class ReachedError(Exception):
    pass


def _calls(config):
    """Return file and function of each call of the package, down to the first reduce-scatter of a gradient, on two
    ranks.
    """
    calls = []
    reduce_scatter = GlooCollectives.reduce_scatter

    def noted(*args, **kwargs):
        if not calls:
            stack = [(Path(frame.filename), frame.name) for frame in traceback.extract_stack()]
            within = [(path, name) for path, name in stack if path.is_relative_to(PACKAGE)]
            started = max(number for number, call in enumerate(within) if call == (PACKAGE / "cli.py", "main"))
            calls.extend((f"megamix/{path.relative_to(PACKAGE)}", name) for path, name in within[started:])
        return reduce_scatter(*args, **kwargs)

    as_torchrun = {"WORLD_SIZE": "2", "RANK": str(dist.get_rank()), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    with (
        mock.patch.object(GlooCollectives, "reduce_scatter", noted),
        mock.patch.object(joined, "meet_ranks", lambda device, timeout_s: None),
        mock.patch.object(dist, "destroy_process_group"),
        mock.patch.dict("os.environ", as_torchrun),
    ):
        folder = Path(config.checkpoint.folder).parent
        assert main(["train", str(folder / "job.toml")]) == 0
    return [*calls, ("megamix/comm/collectives.py", "reduce_scatter")]


def test_the_way_to_the_first_collective_is_short_and_is_the_one_that_is_written(tmp_path, run_ranks):
    write_data(tmp_path / "data")
    config = tiny_job(tmp_path, steps=2, eval_interval=0)
    (tmp_path / "job.toml").write_text(config_to_toml(config))
    page = (PACKAGE.parent / "docs/design.md").read_text()
    (listed,) = re.findall(r"^Nine calls lead from `megamix train` .+?\.$", page, flags=re.MULTILINE | re.DOTALL)
    places = re.findall(r"((?:`\w+`(?: and )?)+)\s\(`(megamix/\S+)`\)", listed)
    written = [(place, name) for names, place in places for name in re.findall(r"`(\w+)`", names)]
    for calls in run_ranks(_calls, 2, config):
        assert calls == written
    assert len(written) <= MOST_CALLS
