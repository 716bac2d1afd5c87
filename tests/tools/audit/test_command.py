"""`megamix audit` prints the page of a job, or JSON, and ends with 1 if numbers are lost, on one rank and on ranks that
divide the model. The commands and the script of docs/verify.md run.
"""

import json
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

from megamix.base.machine import native_halves
from megamix.cli import audit
from megamix.cli.verbs import main
from megamix.config import load_config
from megamix.tools.audit.report import AuditReport
from megamix.tools.audit.warnings import AuditWarning
from megamix.tools.verify.core.layout import parse_layout
from megamix.tools.verify.core.own_size import at_own_size

CONFIG = Path(__file__).parents[3] / "configs/quickstart.toml"
SMALL = ["model.vocab_size=64", "model.seq_len=8", "model.hidden_size=24", "model.num_layers=2"]


def test_it_prints_the_page_of_the_quickstart_and_finds_no_harm(capsys):
    assert main(["audit", str(CONFIG), *SMALL]) == 0
    size, head, *rows = capsys.readouterr().out.splitlines()
    assert size.startswith("update 3 on 1 rank(s), synthetic text, at training.micro_batch_size=2 model.seq_len=8 ")
    assert head.split()[:4] == ["parameters", "store", "compute", "grad"]
    (query,) = (row for row in rows if row.startswith("blocks.*.attention.query.weight"))
    computed = "fp16" if torch.float16 in native_halves() else "fp32"
    assert query.split()[1:10] == ["fp16", computed, "fp16", "-", "fp16", "fp32", "fp32", "fp32", "0.0%"]
    assert rows[-2] == "no number is lost that should be kept"


def test_products_in_fp8_have_a_dtype_and_shares_of_their_codes(capsys):
    fp8 = "precision.dtype=bf16", "precision.fp8.recipe=tensorwise", 'precision.fp8.but=["blocks.0.*"]'
    sizes = "model.hidden_size=32", "model.num_heads=2", "model.num_kv_heads=2", "model.ffn_hidden_size=48"
    audit = ["audit", str(CONFIG), *SMALL, *sizes, *fp8, "--updates", "1"]
    assert main(audit) == 0
    page = capsys.readouterr().out
    assert page.splitlines()[1].endswith(" at max at 0")
    assert "\ncompute fp8, at max, at 0: " in page
    assert main([*audit, "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    half, codes = (rows[f"blocks.{layer}.feed_forward.up.weight"] for layer in (0, 1))
    assert (half["at_largest"], codes["dtypes"]["compute"]) == (None, "fp8")
    assert 0 < codes["at_largest"] < 0.05
    assert 0 <= codes["at_zero"] < 0.2


EXPERTS = ["model.experts.num_experts=4", "model.experts.top_k=2", "model.experts.ffn_hidden_size=8"]


@pytest.mark.parametrize(
    ("job", "settings"), [("quickstart.toml", ["parallelism.tensor.size=2"]), ("quickstart_moe.toml", EXPERTS)]
)
def test_ranks_that_divide_the_model_or_its_experts_are_started(capsys, job, settings):
    assert main(["audit", str(CONFIG.with_name(job)), *SMALL, *settings, "--json", "--updates", "1"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert not any(one["harms"] for one in told["warnings"])
    assert {row["dtypes"]["master"] for row in told["rows"]} == {"fp32"}


def _page(*settings):
    config = at_own_size(load_config(CONFIG, settings), settings)
    report = audit.audit_job(parse_layout("dp2").apply(config), 1)
    (query,) = (row for row in report.rows if row.name == "blocks.*.attention.query.weight")
    return query.dtypes


@pytest.mark.parametrize(("reduce_dtype", "sum_dtype"), [("half", "fp16"), ("half_fp32_sum", "fp32")])
def test_on_ranks_it_says_what_travels(reduce_dtype, sum_dtype, run_ranks):
    settings = [*SMALL, "optimizer.compile=false", f"precision.reduce_dtype={reduce_dtype}"]
    first, other = run_ranks(_page, 2, *settings)
    assert first == other
    assert (first["wire"], first["sum"]) == ("fp16", sum_dtype)


def test_moments_in_bf16_that_chance_rounds_are_no_harm(capsys):
    adamw = "optimizer.name=adamw", "optimizer.adamw.state_dtype=bf16", "optimizer.adamw.betas=[0.9, 0.999]"
    assert main(["audit", str(CONFIG), *SMALL, *adamw, "optimizer.compile=false"]) == 0
    assert "moments in bf16" in capsys.readouterr().out  # a remark, no harm


def test_harm_is_exit_status_1(capsys):
    report = AuditReport(warnings=[AuditWarning("head.weight", "no FP32 master", "Keep it", True)])
    with mock.patch.object(audit, "audit_job", lambda config, updates: report):
        assert main(["audit", str(CONFIG), *SMALL]) == 1
        assert "WRONG: head.weight: no FP32 master. Keep it" in capsys.readouterr().out
        assert main(["audit", str(CONFIG), *SMALL, "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["warnings"][0]["harms"]


def test_what_the_page_shows_runs(capsys):
    page = (CONFIG.parents[1] / "docs/verify.md").read_text(encoding="utf-8")
    section = page.split("\n## audit\n")[1].partition("\n## ")[0]
    commands = re.findall(r"^megamix (.*)$", section, flags=re.MULTILINE)
    assert commands[0] == "audit configs/quickstart.toml"  # this command runs above, at a small size
    assert all(command.startswith("audit -- ") for command in commands[1:])  # test_script runs such
    (block,) = re.findall(r"^```python\n(.*?)^```$", section, flags=re.MULTILINE | re.DOTALL)
    exec(block, {})
    (shown,) = re.findall(r"^WRONG: .*no FP32 master;.*$", section, flags=re.MULTILINE)
    said = capsys.readouterr().out
    assert re.search(re.sub(r"\d+%", r"\\d+%", re.escape(shown)), said)
