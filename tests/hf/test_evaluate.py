"""`megamix evaluate` counts each token once, whatever the windows; `--harness` without its package is an error that
says how to install it.
"""

import json
import math
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megamix.base.progress import ProgressLine
from megamix.cli.verbs import main
from megamix.config import ConfigError
from megamix.data.token_file import token_file_writer
from megamix.data.tokenizer import Tokenizer
from megamix.hf.convert import import_model
from megamix.hf.evaluate import evaluate
from tests.builders import SEQ_LEN, VOCAB, run_on_ranks, tiny_job, write_data
from tests.hf.folders import LLAMA, own_model, write_hugging_face


def _write(folder, num_tokens):
    folder.mkdir(exist_ok=True)
    tokens = np.random.default_rng(num_tokens).integers(VOCAB, size=num_tokens)
    with token_file_writer(folder / "held", VOCAB) as writer:
        for part in np.array_split(tokens, 3):
            writer.add(part)
    return folder / "held"


@pytest.mark.parametrize("stride", [SEQ_LEN, 13, 1])
@pytest.mark.parametrize("num_tokens", [2, SEQ_LEN, SEQ_LEN + 1, SEQ_LEN + 2, 9 * SEQ_LEN + 1, 11 * SEQ_LEN + 5])
def test_each_token_counts_once_and_sees_what_the_rule_says(num_tokens, stride, tmp_path, monkeypatch):
    monkeypatch.setattr("megamix.hf.evaluate._TOKENS", 8 * SEQ_LEN)  # the last forward has fewer windows
    if stride == 1 and num_tokens > 2 * SEQ_LEN:
        num_tokens = 2 * SEQ_LEN + 3
    model = own_model(LLAMA).requires_grad_(False)
    prefix = _write(tmp_path, num_tokens)
    tokens = torch.from_numpy(np.fromfile(prefix.with_name("held.bin"), "<u2").astype(np.int64))
    want = 0.0
    for target in range(1, num_tokens):  # one at a time, from the first window that reaches it
        start = max(0, -(-(target - SEQ_LEN) // stride)) * stride
        logits = model(tokens[None, start:target])[0, -1].double()
        want += float(F.cross_entropy(logits, tokens[target]))
    result = evaluate(model, prefix, stride, SEQ_LEN)
    assert result.targets == num_tokens - 1
    assert result.nats_per_token == pytest.approx(want / (num_tokens - 1), rel=1e-6)
    assert result.perplexity == pytest.approx(math.exp(want / (num_tokens - 1)), rel=1e-5)
    assert result.bits_per_byte is None


@pytest.mark.parametrize(("bound", "largest"), [(31, 3), (16, 2), (7, 1)])
def test_a_forward_takes_no_more_tokens_than_its_bound_but_one_window(bound, largest, tmp_path, monkeypatch):
    monkeypatch.setattr("megamix.hf.evaluate._TOKENS", bound)
    prefix, model, taken = _write(tmp_path, 100), own_model(LLAMA), set()
    model.register_forward_pre_hook(lambda _, inputs: taken.add(len(inputs[0])))
    result = evaluate(model, prefix, 5, 8)
    assert max(taken) == largest
    short = own_model(LLAMA.model_copy(update={"seq_len": 8}))
    assert result.nats_per_token == pytest.approx(evaluate(short, prefix, 5, 8).nats_per_token, rel=1e-6)


def test_the_beginning_of_a_file_is_evaluated_alone_and_bits_are_by_byte(tmp_path):
    prefix, model = _write(tmp_path, 300), own_model(LLAMA).requires_grad_(False)
    (tmp_path / "manifest.json").write_text(json.dumps({"parts": {"held": {"num_bytes": 897}}}))
    progress = ProgressLine()
    first = evaluate(model, prefix, 13, SEQ_LEN, 100, progress)
    assert (progress.work.done, progress.work.total) == (99, 99)
    assert first.bits_per_byte is None  # nobody knows the bytes of some tokens
    (tmp_path / "cut").mkdir()
    with token_file_writer(tmp_path / "cut/held", VOCAB) as writer:
        writer.add(np.fromfile(prefix.with_name("held.bin"), "<u2")[:100].astype(np.int64))
    assert first.targets == 99
    assert first.nats_per_token == evaluate(model, tmp_path / "cut/held", 13, SEQ_LEN).nats_per_token
    model.head.weight.zero_()  # it knows nothing
    result = evaluate(model, prefix, SEQ_LEN, SEQ_LEN, 1000)
    assert result.targets == 299
    assert result.perplexity == pytest.approx(VOCAB, rel=1e-6)
    assert result.bits_per_byte == pytest.approx(299 * math.log2(VOCAB) / 897, rel=1e-6)


def test_the_verb_takes_the_run_s_own_held_out_data_and_prints_json(tmp_path, capsys):
    write_data(tmp_path / "data")
    run_on_ranks(tiny_job(tmp_path, steps=2, dtype="bf16"))
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), "--json", "--stride", "16"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["model"] == str(tmp_path / "run/checkpoints/step_00000002")
    assert (facts["data"], facts["dtype"], facts["stride"]) == (str(tmp_path / "data/valid"), "bf16", 16)
    assert facts["targets"] == 200 * (SEQ_LEN + 1) - 1
    assert facts["perplexity"] == pytest.approx(math.exp(facts["nats_per_token"]))
    assert main(["evaluate", str(tmp_path / "run"), "--dtype", "fp32"]) == 0
    line = capsys.readouterr().out
    assert "in fp32" in line
    assert f"6,599 tokens in windows of {SEQ_LEN}, {SEQ_LEN} apart: " in line
    assert main(["evaluate", str(tmp_path / "run"), "--seq-len", "8", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["seq_len"], facts["stride"]) == (8, 8)
    for flags, told in (
        (["--stride", "99"], "--stride 99 must lie in 1 .. 32, the tokens of a window"),
        (["--seq-len", "33"], "--seq-len 33 must lie in 1 .. 32, the model's seq_len"),
        (["--max-tokens", "1"], "--max-tokens 1 must be at least 2"),
        (["--data", "."], ": . is a folder; give the PREFIX of PREFIX.bin and PREFIX.idx in it"),
    ):
        assert main(["evaluate", str(tmp_path / "run"), *flags]) == 2
        assert told in capsys.readouterr().err


def test_wrong_data_is_named(tmp_path, capsys):
    model = own_model(LLAMA.model_copy(update={"vocab_size": 8}))
    with pytest.raises(ValueError, match=r"holds token id \d+, the model's vocabulary has 8"):
        evaluate(model, _write(tmp_path, 300), SEQ_LEN, SEQ_LEN)
    with pytest.raises(ValueError, match="has 1 token"):
        evaluate(model, _write(tmp_path, 1), SEQ_LEN, SEQ_LEN)
    write_hugging_face(LLAMA, tmp_path / "hf")
    assert main(["evaluate", str(tmp_path / "hf")]) == 2
    assert "names no held-out token file, or several; give --data PREFIX" in capsys.readouterr().err


def test_the_harness_names_its_extra_where_it_is_missing(tmp_path, monkeypatch, capsys):
    write_hugging_face(LLAMA, tmp_path / "hf")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["evaluate", str(tmp_path / "hf"), "--harness", "arc_easy"]) == 2
    assert "'lm_eval' is not installed; run pip install -e '.[harness]' in the checkout" in capsys.readouterr().err


def test_the_harness_gets_the_export_its_tasks_and_the_files_that_define_some(tmp_path, monkeypatch, capsys):
    write_hugging_face(LLAMA, tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "in")
    seen = {}

    def simple_evaluate(**arguments):
        seen.update(arguments, there=Path(arguments["model_args"]["pretrained"], "config.json").is_file())
        return {"results": {"mine": {"alias": "mine", "acc,none": 0.5}}}

    harness = SimpleNamespace(__spec__=ModuleSpec("lm_eval", None), simple_evaluate=simple_evaluate)
    monkeypatch.setitem(sys.modules, "lm_eval", harness)
    tasks = SimpleNamespace(TaskManager=lambda include_path: include_path)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", tasks)
    (tmp_path / "v2.yaml").write_text("task: mine  # not v2\nprocess_docs: !function utils.process\n")
    (tmp_path / "all.yaml").write_text("group: ours\ntask: [mine]\n")
    tasks = f"arc_easy,{tmp_path}/v2.yaml,{tmp_path}/all.yaml"
    assert main(["evaluate", str(tmp_path / "in"), "--harness", tasks]) == 0
    assert capsys.readouterr().out == "mine: acc,none 0.5\n"
    assert (seen["tasks"], seen["task_manager"]) == (["arc_easy", "mine", "ours"], [str(tmp_path)] * 2)
    assert seen["model_args"] == {"pretrained": seen["model_args"]["pretrained"], "dtype": "float32"}
    assert seen["there"]
    assert not Path(seen["model_args"]["pretrained"]).exists(), "the export is removed when all is told"
    (tmp_path / "v2.yaml").write_text("tasks: mine\n")
    assert main(["evaluate", str(tmp_path / "in"), "--harness", tasks]) == 2
    assert f"--harness {tmp_path}/v2.yaml names no task (KeyError('task')); write" in capsys.readouterr().err
    for begins in (False, True):
        settings = {"add_bos_token": begins, "bos_token": "!"}
        tokenizer = Tokenizer.train(["a"], 257)
        tokenizer.begin_with("!" if begins else None)
        tokenizer.save(tmp_path / "in/tokenizer.json")
        (tmp_path / "in/tokenizer_config.json").write_text(json.dumps(settings))
        assert main(["evaluate", str(tmp_path / "in"), "--harness", "arc_easy"]) == 0
        first = tokenizer.token_id("!" if begins else tokenizer.end_token)
        assert seen["model_args"].items() >= {"add_bos_token": begins, "prefix_token_id": first}.items()


def test_prepared_texts_are_no_model_and_a_model_is_no_data(tmp_path, capsys):
    write_data(tmp_path / "data")
    (tmp_path / "data/manifest.json").write_text("{}\n")  # prepare's own
    for verb, *flags in (["evaluate"], ["generate"], ["export", "--to", "hf", str(tmp_path / "out")]):
        assert main([verb, str(tmp_path / "data"), *flags]) == 2
        assert f"{tmp_path}/data holds prepared texts, no model; give a run" in capsys.readouterr().err
    assert main(["checkpoint", "verify", str(tmp_path / "data")]) == 2
    assert f"{tmp_path}/data holds no checkpoint; give a run" in capsys.readouterr().err
    with pytest.raises(
        ConfigError, match="json: it describes prepared texts, no checkpoint; write the path of a whole"
    ):
        run_on_ranks(
            tiny_job(tmp_path, tokens=tmp_path / "data", valid=None, eval_interval=0, resume=str(tmp_path / "data"))
        )
    write_hugging_face(LLAMA, tmp_path / "hf")
    for flags, told in (
        (["evaluate", "--data"], "hf is a folder without token files; give one of prepare's, as runs/data/mine/train"),
        (["generate", "--tokenizer"], "hf' is no tokenizer.json (Is a directory"),
    ):
        assert main([flags[0], str(tmp_path / "hf"), flags[1], str(tmp_path / "hf")]) == 2
        assert told in capsys.readouterr().err
