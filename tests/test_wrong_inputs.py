"""Whoever mistypes a command: a user's mistake is answered by one message with field, value and fix, without a
traceback; nothing is written.
"""

import re
from pathlib import Path

import pytest

from megamix import AdamW, Checkpoints, Precision
from megamix.cli import main
from megamix.config import config_to_toml
from tests.builders import tiny_job, write_data
from tests.checkpoint.state import fp16_engine

IN, OUT = "--input texts", "--output out"
MODELS = "give a run that has saved, a checkpoint, or a Hugging Face folder"

# Arguments behind `megamix`; texts that the message must hold: field, value and fix.
WRONG = {
    # the command line itself
    "train": ("required: CONFIG", "write for example megamix train configs/quickstart.toml checkpoint.folder="),
    "trian job.toml": ("VERB", "'trian'", "did you mean train?", "write for example megamix train"),
    "train job.toml --lr 1e-3": ("unrecognized", "--lr 1e-3", "section.key=value: optimizer.lr=1e-3"),
    "train job.toml --steps=100": ("unrecognized", "--steps=100", "section.key=value: training.steps=100"),
    "train job.toml --batch-size 64": (
        "unrecognized", "--batch-size 64", "training.micro_batch_size=64 or training.global_batch_size=64",
    ),
    "train job.toml --optimizer.lr 1e-3": ("unrecognized", "--optimizer.lr 1e-3", "key=value: optimizer.lr=1e-3"),
    "train job.toml --gpus 8": ("unrecognized", "--gpus 8", "by NPROC_PER_NODE=8 ./launch/pretrain.sh CONFIG"),
    "train job.toml --nproc-per-node=8": ("unrecognized", "by NPROC_PER_NODE=8 ./launch/pretrain.sh CONFIG"),
    "doctor --gpus 8": ("unrecognized", "--gpus 8", "write for example megamix doctor --folder runs"),
    "train job.toml --max-steps 5": ("unrecognized", "--max-steps 5", "section.key=value: training.steps=5"),
    "train job.toml --fp16": ("unrecognized", "--fp16", "section.key=value: precision.dtype=fp16"),
    "train job.toml --chek": ("unrecognized", "--chek", "did you mean --check? write for example megamix train"),
    "train job.toml --memroy=3GiB": ("unrecognized", "--memroy=3GiB", "did you mean --memory?"),
    "plan job.toml --wolrd 8": ("unrecognized", "--wolrd 8", "did you mean --world?"),
    "verify job.toml --layuots dp2": ("unrecognized", "--layuots dp2", "did you mean --layouts?"),
    f"prepare {IN} {OUT} --vocab-sice 300": ("unrecognized", "did you mean --vocab-size?"),
    "evaluate run --strive 5": ("unrecognized", "--strive 5", "did you mean --stride?"),
    "doctor --jsson": ("unrecognized", "--jsson", "did you mean --json?"),
    "checkpoint export run out --to dcp --plugsin a": ("unrecognized", "--plugsin a", "did you mean --plugins?"),
    "train job.toml --check=1": ("--check", "'1'", "write for example megamix train"),
    "plan job.toml --world many": ("--world", "'many'", "megamix plan job.toml --world 64"),
    "plan job.toml --device tpu": ("--device", "'tpu'", "cpu", "megamix plan job.toml"),
    "prepare": ("required: --output", "megamix prepare --input my_texts/ --output runs/data/mine"),
    "prepare --output": ("--output", "expected one argument", "megamix prepare --input my_texts/"),
    "prepare texts --output out": ("unrecognized", "texts", "megamix prepare --input my_texts/"),
    f"prepare {IN} {OUT} optimizer.lr=1": ("unrecognized", "optimizer.lr=1", "megamix prepare --input my_texts/"),
    f"prepare {IN} {OUT} --vocab-size 32k": ("--vocab-size", "'32k'", "write for example megamix prepare"),
    f"prepare {IN} {OUT} --valid-fraction 5%": ("--valid-fraction", "'5%'", "write for example megamix prepare"),
    "prepare --corpus wikipedia --output out": ("--corpus", "'wikipedia'", "stdlib", "--input my_texts/"),
    f"prepare --corpus stdlib {IN} {OUT}": ("--input", "not allowed with argument --corpus", "megamix prepare --input"),
    "generate": ("required: MODEL", "megamix generate runs/mine --prompt"),
    "generate run --temperature hot": ("--temperature", "'hot'", "megamix generate runs/mine"),
    "generate run --dtype fp64": ("--dtype", "'fp64'", "bf16", "megamix generate runs/mine"),
    "export run --to gguf out": ("--to", "'gguf'", "hf", "megamix export runs/mine --to hf"),
    "export run --to dcp out": ("--to", "'dcp'", "write megamix checkpoint export runs/mine --to dcp exported"),
    "checkpoint export run --to hf out": ("--to", "'hf'", "write megamix export runs/mine --to hf hf/mine"),
    "export run out": ("required: --to", "megamix export runs/mine --to hf"),
    "import gpt2": ("required: --output", "megamix import hf/gpt2 --output runs/imported"),
    "evaluate run --seq-len long": ("--seq-len", "'long'", "megamix evaluate runs/mine"),
    "plot": ("required: RUN", "megamix plot runs/mine"),
    "report": ("required: RUN", "megamix report runs/mine"),
    "status": ("required: RUN", "megamix status runs/*"),
    "checkpoint": ("required: ACTION", "megamix checkpoint ls runs/mine"),
    "checkpoint list run": ("ACTION", "'list'", "did you mean ls?", "megamix checkpoint ls runs/mine"),
    "checkpoint ls": ("required: RUN_OR_FOLDER", "megamix checkpoint ls runs/mine"),
    "checkpoint export run out": ("required: --to", "megamix checkpoint export runs/mine --to dcp"),
    "bench speed": ("what", "'speed'", "train", "megamix bench train --rounds 15"),
    "bench --rounds few": ("--rounds", "'few'", "megamix bench train --rounds 15"),
    "bench --layout dp2": ("--layout", "'dp2'", "tp2", "megamix bench"),
    "config job.toml": ("--show --schema", "required", "megamix config job.toml --show"),
    # the configuration
    "train nope.toml": ("config: got nope.toml", "no such file", "; write the path of a TOML file"),
    "train jop.toml": ("config: got jop.toml", "no such file", "did you mean job.toml?"),
    "plan texts": ("config: got texts", "cannot be read: Is a directory", "write the path of a TOML file"),
    "train mine": ("config: got mine", "Is a directory", "a run goes on by the file that began it, or by mine/config"),
    "train job.yaml": ("config: got job.yaml", "is no TOML", "line 1", "write it as configs/quickstart.toml is"),
    "train job.json": ("config: got job.json", "is no TOML", "line 1", "write it as configs/quickstart.toml is"),
    "train half.toml": ("config: got half.toml", "is no TOML", "line 1", "correct that line (text needs quotes)"),
    "train job.toml lr=1e-3": ("lr: got", '"lr=1e-3"', "write for example optimizer.lr=3e-4"),
    "train job.toml optimizer.lr 1e-3": ("optimizer.lr 1e-3", "settings are written section.key=value: optimizer.lr="),
    "train job.toml training.steps 5": ("training.steps 5", "settings are written section.key=value: training.steps=5"),
    "train job.toml training.steps:5": ("training.steps:5", "settings are written section.key=value: training.steps=5"),
    "train job.toml optimizer.eps=1": (
        "optimizer.eps", "unknown key, got 1", "write it under [optimizer.adamw]",
    ),
    "plan job.toml --world 3": ("global_batch_size: got 8", "3 data-parallel ranks = 6", "_batch_size = 12"),
    "train job.toml optimizer.lr=fast": ("optimizer.lr", 'got "fast"', "write for example lr = 0.0003"),
    "train job.toml optimizer.learning_rate=1": ("optimizer.learning_rate", "got 1", "it is optimizer.lr here"),
    "train job.toml training.steps=1e4": ("training.steps", "got 10000.0", "must be a whole number"),
    "train job.toml training.epochs=3": ("training.epochs", "got 3", "there are no epochs; write training.steps"),
    "train job.toml precision.dtype=float16": ("precision.dtype", '"float16"', "must be 'fp16', 'bf16' or 'fp32'"),
    "train job.toml precision.dtype=half": ("precision.dtype", '"half"', "must be 'fp16', 'bf16' or 'fp32'"),
    "train job.toml model.compile=yes": ("model.compile", '"yes"', "must be true or false"),
    "train job.toml optimizer.name=sgd": (
        "optimizer.name", '"sgd"', "must be 'adamw', 'nag' or 'muon'", "nag (SGD with Nesterov momentum)",
    ),
    "train job.toml model.activation=relu6": ("model.activation", '"relu6"', 'write activation = "relu2"'),
    "train job.toml optimizer.name=lion": ("optimizer.name", '"lion"', 'write for example name = "adamw"'),
    "train job.toml metrics.wandb=true": ("metrics.wandb", "got true", "a table; write [metrics.wandb] and its keys"),
    "train job.toml --plugins nope": ("plugins", "nope", "install it, or start in the folder where it lies"),
    "verify job.toml --layouts dp2,zz": ("--layouts", "got zz", "write dp2, cp2 or dp2tp2sp"),
    "plan job.toml --memory 80": ("--memory", "'80'", "a number and a unit; write --memory 80GiB"),
    "train job.toml --check --memory 80": ("--memory", "'80'", "a number and a unit; write --memory 80GiB"),
    "train job.toml --memory 3GiB": ("--memory", "without --check", "write --check beside it"),
    "plan job.toml --memory lots": ("--memory", "'lots'", "write --memory 80GiB"),
    # files and folders
    "train job.toml training.global_batch_size=7 --check": ("job.toml: 1 problem", "training.global_batch_size: got 7"),
    "train job.toml data.train=data --check": ("job.toml: 1 problem", "write data/train or data/valid"),
    "train job.toml checkpoint.folder=/proc/x": ("checkpoint.folder", "/proc/x", "write another folder"),
    "train job.toml checkpoint.folder=file/run": ("checkpoint.folder", "file/run", "write another folder"),
    "train job.toml checkpoint.resume=nowhere": ("checkpoint.resume", "nowhere", "write auto, never or a path"),
    "train job.toml data.train=nowhere": ("data.train", "'nowhere'", "run `megamix prepare`"),
    "train job.toml data.train=texts/a.txt": ("data.train", "'texts/a.txt'", "run `megamix prepare`"),
    "train job.toml data.train=nowhere optimizer.lr=-1 data.tokenizer=gpt2": (
        "job.toml: 3 problems", "optimizer.lr: got -1", "data.train", "'nowhere'", "data.tokenizer", "'gpt2'",
    ),
    "train job.toml data.train=nowhere training.global_batch_size=7 training.micro_batch_size=2": (
        "job.toml: 2 problems", "training.global_batch_size: got 7", "data.train", "'nowhere'",
    ),
    "train job.toml data.train=nowhere data.valid=5": ("job.toml: 1 problem", "data.valid: got 5"),
    "train job.toml data.tokenizer=gpt2": ("data.tokenizer", "'gpt2'", "name a tokenizer.json", "leave the key out"),
    "train job.toml model.seq_len=100000": ("data.train", "66000 tokens", "shorten model.seq_len or prepare more"),
    f"prepare {IN} --output theirs": ("--output", "theirs", "no manifest.json; choose another --output"),
    f"prepare {IN} --output file/out": ("--output", "file/out", "name a place in a folder that you may write to"),
    f"prepare --input nowhere {OUT}": ("--input", "'nowhere'", "give files, or a folder of them"),
    f"prepare --input empty {OUT}": ("--input", "'empty'", "give files, or a folder of them"),
    f"prepare {IN} {OUT} --tokenizer gpt2": ("--tokenizer", "gpt2", "train, bytes", "hf download gpt2 tokenizer.json"),
    f"prepare {IN} {OUT} --tokenizer nope.json": ("--tokenizer", "nope.json", "write train, bytes, or the path of a"),
    f"prepare {IN} {OUT} --vocab-size 10": ("--vocab-size", "10", "give at least 257"),
    f"prepare {IN} {OUT} --tokenizer bytes --vocab-size 9": ("--vocab-size", "9", "leave it out for --tokenizer bytes"),
    f"prepare {IN} {OUT} --end-token </s>": ("--end-token", "</s>", "leave it out"),
    f"prepare {IN} {OUT} --workers 0": ("--workers", "0", "leave it out for one a core"),
    f"prepare {IN} {OUT} --max-bad-records -1": ("--max-bad-records", "-1", "0 stops at the first"),
    f"prepare {IN} {OUT} --valid-fraction 1.5": ("--valid-fraction", "1.5", "0.05 keeps one document in twenty"),
    "generate nowhere": ("nowhere", "is no folder", MODELS),
    "generate empty": (
        "empty", "holds no model: none of checkpoints/step_*, manifest.json and config.json is in it", MODELS,
    ),
    "generate gpt2 --prompt hi": ("gpt2", "is no folder", "hf download NAME"),
    "evaluate job.toml": ("job.toml", "is no folder", MODELS),
    "export empty --to hf out": ("empty", "holds no model", MODELS),
    "export empty --to hf out --shard-gb 0": ("--shard-gb", "0.0", "write --shard-gb 5"),
    "import gpt2 --output out": ("gpt2/config.json", "is missing", "hf download NAME"),
    "import broken --output out": ("broken/config.json", "is no JSON", "copy it again"),
    "plot nowhere": ("RUN", "nowhere", "give the folder of a run"),
    "checkpoint ls nowhere": ("nowhere", "is no folder", "give a run, a folder of checkpoints, or a checkpoint"),
    "checkpoint verify empty": ("empty", "holds no checkpoint", "give a run that has saved"),
    "checkpoint export empty --to dcp out": ("empty", "holds no checkpoint", "give a run that has saved"),
    "bench all --rounds 0 --output texts": (
        "flags: 2 problems", "--rounds: got 0, must be at least 1; write --rounds 15", "--output: got texts",
    ),
    "bench update --layout tp2": ("--layout", "got tp2 with update", "write megamix bench train --layout tp2"),
    "bench --output file/below": ("--output", "got file/below", "name a file in a folder of yours"),
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A user's working folder; `job.toml` in it would train."""
    folder = tmp_path_factory.mktemp("place")
    write_data(folder / "data")
    (folder / "job.toml").write_text(config_to_toml(tiny_job(Path())))
    for name, text in {
        "job.yaml": "model:\n  hidden_size: 3\n", "pyproject.toml": "", "file": "", "texts/a.txt": "plain words " * 99,
        "job.json": '{"model": {}}', "half.toml": "model = fp16",
        "theirs/thesis.tex": "", "mine/config.toml": "", "broken/config.json": "{",
    }.items():  # fmt: skip
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "empty").mkdir()
    return folder


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_input_is_told_with_what_to_write(place, monkeypatch, capsys, words):
    monkeypatch.chdir(place)
    before = sorted(place.rglob("*"))
    try:
        status = main(words.split())
    except SystemExit as ended:  # how argparse refuses
        status = ended.code
    told = capsys.readouterr().err
    assert status == 2
    for part in WRONG[words]:
        assert part in told
    assert told.startswith(("usage: megamix", f"megamix {words.split()[0]}"))
    assert "flags: 1 problem" not in told or " --" in told  # said only of flags
    assert not any(word in told for word in ("Traceback", "Error(", "pyproject"))
    assert sorted(place.rglob("*")) == before


NO_COUNT = "must be a number of ranks, 1 or more; start the ranks by launch/pretrain.sh"
NO_RANK = r"must be from 0 to 1, as there are 2 rank\(s\); start the ranks by launch/pretrain"
UNSET = "not set, though WORLD_SIZE is 2; start the ranks by launch/pretrain.sh or torchrun, which set it"
# Variables of a launcher, and a pattern of the line that tells them. RANK and where ranks meet are unset, unless named.
VARIABLES = [
    *(
        ({name: value}, f'  {name}: got "{value[:56]}.*{NO_COUNT}')
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")
        for value in ("abc", "0", "-1", "", "1" * 5000)
    ),
    *(
        ({"WORLD_SIZE": "2", name: value}, f'  {name}: got "{value}", {NO_RANK}')
        for name in ("RANK", "LOCAL_RANK")
        for value in ("abc", "2", "-1", "")
    ),
    ({"WORLD_SIZE": "2"}, f"  RANK, MASTER_ADDR, MASTER_PORT: {UNSET}"),
    ({"WORLD_SIZE": "2", "RANK": "0"}, f"  MASTER_ADDR, MASTER_PORT: {UNSET}"),
    ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "0"}, f"  MASTER_PORT: {UNSET}"),
]


@pytest.mark.parametrize(("variables", "line"), VARIABLES)
def test_ranks_that_cannot_be_are_told_by_their_variable(place, monkeypatch, capsys, variables, line):
    monkeypatch.chdir(place)
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "job.toml", *(["--check"] if UNSET not in line else [])]) == 2
    assert re.search(line, capsys.readouterr().err)


PREPARED = "data.train=prepared/train model.vocab_size="
SELDOM_MEANT = {
    "precision.loss_scale.init_scale=65536.0": (),
    "precision.loss_scale.init_scale=16777216.0": ("16777216 never falls", "write init_scale = 1024.0, or rule = "),
    f"{PREPARED}320 data.tokenizer=prepared/tokenizer.json": (),
    f"{PREPARED}1024": ("vocab_size: 1024, but data.train was prepared with 257 tokens", "write vocab_size = 384"),
    f"{PREPARED}320 data.tokenizer=other/tokenizer.json": (
        "data.tokenizer: other/tokenizer.json is not the one that data.train was prepared with", "in prepared",
    ),
    "parallelism.accumulate=owner parallelism.shard=gradients": (),
    "parallelism.accumulate=owner parallelism.shard=gradients training.micro_batch_size=8": (
        'parallelism.accumulate: "owner" does nothing with one micro-batch a step; write accumulate = "local"',
    ),
    "parallelism.accumulate=owner": (
        'parallelism.accumulate: with shard = "states" every rank keeps its gradients, and "owner" comes on top, with ',
        '; write accumulate = "local", or shard = "gradients"',
    ),
    'optimizer.groups=[{pattern="blocks.*",lr_factor=2.0}]': (),
    'optimizer.groups=[{pattern="*.biass",lr_factor=2.0}]': (
        "the optimizer's group '*.biass' matches no parameter of the model",
    ),
    'optimizer.name=muon optimizer.muon.adamw=["embedding.*"]': (),
    'optimizer.name=muon optimizer.muon.adamw=["*.rooter.*"]': (
        "adamw of Muon has the pattern '*.rooter.*', which matches no parameter of the model",
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", SELDOM_MEANT)
def test_what_trains_and_is_seldom_meant_is_told_and_no_problem(place, monkeypatch, capsys, words):
    monkeypatch.chdir(place)
    if not Path("prepared").exists():
        flags = "--input texts --output prepared --tokenizer bytes --valid-fraction 0"
        assert main(["prepare", *flags.split()]) == 0
        write_data(Path("other"), tokenizer=True)
    job = tiny_job(Path(), loss_scale={"rule": "static"}) if "init_scale" in words else tiny_job(Path())
    Path("seldom.toml").write_text(config_to_toml(job))
    capsys.readouterr()
    assert main(["train", "seldom.toml", *words.split(), "--check"]) == 0
    said, outcome, _ = capsys.readouterr().out.partition("no problems; 1 rank; ")
    notes = said.splitlines()
    assert outcome
    assert len(notes) == bool(SELDOM_MEANT[words])
    assert all(note.startswith("note: ") for note in notes)
    assert all(part in notes[0] for part in SELDOM_MEANT[words])


def test_plugins_of_an_empty_shell_variable_are_none(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    assert main(["train", "job.toml", "--check", "--plugins", ""]) == 0
    assert capsys.readouterr().out.startswith("no problems; 1 rank; ")


def _amid_a_step(folder):
    engine = fp16_engine()
    engine.progress.micro_batches = 1
    return Checkpoints(engine, folder)


# Calls of a program, given a path: of a file, or of a folder.
WRONG_CALLS = {
    "a dtype by name": (
        lambda _: Precision("bf16"), "precision.dtype must be torch.float16, bfloat16 or float32, got 'bf16'"  # type: ignore[arg-type]
    ),
    "a number for a loss scale": (
        lambda _: Precision(loss_scale=1024), "precision.loss_scale must be None or a LossScale, got 1024; pass"  # type: ignore[arg-type]
    ),
    "one beta": (
        lambda _: AdamW(lr=1e-3, betas=(0.9,)), "betas of AdamW must be 2 numbers, got (0.9,); leave it out for (0.9"  # type: ignore[arg-type]
    ),
    "checkpoints in a file": (
        lambda place: Checkpoints(fp16_engine(), place / "file"), "/file is a file; give the path of a folder"
    ),
    "checkpoints in a job's folder": (
        lambda place: ((place / "run/checkpoints").mkdir(parents=True), Checkpoints(fp16_engine(), place / "run")),
        "/run belongs to a job; its checkpoints lie in ",
    ),
    "no progress": (
        lambda place: Checkpoints(fp16_engine(), place / "out").save(None), "progress is a NoneType; give a dict"  # type: ignore[arg-type]
    ),
    "a save amid a step": (
        lambda place: _amid_a_step(place / "out").save({}),
        "Checkpoints.save() after 1 backward() calls of a step; call it right after step()",
    ),
    "a load amid a step": (
        lambda place: _amid_a_step(place / "out").load(),
        "Checkpoints.load() after 1 backward() calls of a step; call it right after step()",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG_CALLS)
def test_a_wrong_call_is_told_at_the_call(place, what):
    call, told = WRONG_CALLS[what]
    with pytest.raises((ValueError, RuntimeError)) as caught:
        call(place)
    assert told in str(caught.value)
    assert not (place / "out").exists()
