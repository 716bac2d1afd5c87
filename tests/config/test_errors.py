"""Whoever mistypes a configuration or a command: every mistake is one line with field, value and a fix that works, all
at once and without a traceback; nothing is written. The messages on single settings stand in tests/refusals.
"""

import copy
import re
import shutil
import tomllib
from pathlib import Path

import pytest

from megamix import AdamW, Checkpoints, Precision
from megamix.cli.verbs import main
from megamix.config import (
    Config,
    ConfigError,
    ContextConfig,
    DataSource,
    ExpertConfig,
    PipelineConfig,
    TensorConfig,
    check_world_size,
    config_from_dict,
    grad_accum_steps,
    load_config,
)
from megamix.config.checks import _CHECKS
from megamix.config.choices import section_at
from megamix.config.sections import SECTIONS
from tests.builders import tiny_job, write_data
from tests.checkpoint.state import fp16_engine

CONFIGS = Path(__file__).parents[2] / "configs"
GOOD = {
    "model": {"vocab_size": 64, "seq_len": 8, "hidden_size": 24, "num_layers": 1, "num_heads": 6},
    "data": {"train": "tokens/train", "valid": "tokens/valid"},
    "optimizer": {"lr": 1e-3},
    "training": {"steps": 100, "micro_batch_size": 4, "global_batch_size": 16},
    "checkpoint": {"folder": "runs/x"},
}


def changed(**sections):
    tree = copy.deepcopy(GOOD)
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values} if isinstance(values, dict) else values
    return tree


def put(tree, key, value):
    """The tree with a key's value."""
    name, _, rest = key.partition(".")
    return {**tree, name: put(tree.get(name, {}), rest, value) if rest else value}


def fields_of(table):
    section = section_at(Config, table.split("."), {})
    assert section is not None
    return section.model_fields


def problems_of(tree):
    with pytest.raises(ConfigError) as caught:
        config_from_dict(tree)
    return caught.value.problems


IN, OUT = "--input texts", "--output out"
MODELS = "give a run that has saved, a checkpoint, or a Hugging Face folder"
UNKNOWN = "unrecognized arguments: "
# Arguments behind `megamix` of whoever has the files of `place`, and what he is told.
WRONG_COMMANDS = {
    # a verb's own words
    "trian job.toml": "VERB: .. 'trian' .. did you mean train? write for example megamix train",
    "train": "required: CONFIG .. ; write for example megamix train configs/quickstart.toml checkpoint.folder=",
    "config job.toml": "--show --schema .. required; write for example megamix config job.toml --show",
    "config --show": "write megamix config CONFIG --show",
    "prepare": "required: --output; write for example megamix prepare --input my_texts/ --output runs/data/mine",
    "generate": "required: MODEL; write for example megamix generate runs/mine --prompt",
    "export run out": "required: --to .. megamix export runs/mine --to hf",
    "import gpt2": "required: --output; write for example megamix import hf/gpt2 --output runs/imported",
    "plot": "required: RUN; write for example megamix plot runs/mine",
    "report": "required: RUN; write for example megamix report runs/mine",
    "status": "required: RUN; write for example megamix status runs/*",
    "checkpoint": "required: ACTION; write for example megamix checkpoint ls runs/mine",
    "checkpoint list run": "'list' .. did you mean ls? write for example megamix checkpoint ls runs/mine",
    "checkpoint export run out": "required: --to; write for example megamix checkpoint export runs/mine --to dcp",
    "export run --to dcp out": "'dcp' .. ; write megamix checkpoint export runs/mine --to dcp exported",
    "checkpoint export run --to hf out": "'hf' .. ; write megamix export runs/mine --to hf hf/mine",
    "evaluate run --seq-len long": "--seq-len: .. 'long' .. megamix evaluate runs/mine",
    "bench speed": "'speed' .. megamix bench train --rounds 15",
    "doctor --gpus 8": f"{UNKNOWN}--gpus 8; did you mean --plugins? write for example megamix doctor --folder runs",
    "plan job.toml --world many": "--world: .. 'many'; write for example megamix plan job.toml --world 64",
    "train job.toml --chek": f"{UNKNOWN}--chek; did you mean --check? write for example megamix train",
    "checkpoint export run out --to dcp --plugsin a": f"{UNKNOWN}--plugsin a; did you mean --plugins?",
    # settings that are written otherwise
    "train job.toml --lr 1e-3": f"{UNKNOWN}--lr 1e-3; settings are written section.key=value: optimizer.lr=1e-3",
    "train job.toml --steps=100": f"{UNKNOWN}--steps=100; .. section.key=value: training.steps=100",
    "train job.toml --batch-size 64": "training.micro_batch_size=64 or training.global_batch_size=64",
    "train job.toml --optimizer.lr 1e-3": "section.key=value: optimizer.lr=1e-3",
    "train job.toml training.steps 5": f"{UNKNOWN}training.steps 5; .. section.key=value: training.steps=5",
    "train job.toml training.steps:5": f"{UNKNOWN}training.steps:5; .. section.key=value: training.steps=5",
    "train job.toml --max-steps 5": f"{UNKNOWN}--max-steps 5; .. section.key=value: training.steps=5",
    "train job.toml --fp16": f"{UNKNOWN}--fp16; .. section.key=value: precision.dtype=fp16",
    "train job.toml --gpus 8": "by NPROC_PER_NODE=8 ./launch/pretrain.sh CONFIG",
    "train job.toml --nproc-per-node=8": "by NPROC_PER_NODE=8 ./launch/pretrain.sh CONFIG",
    "checkpoint ls run optimizer.lr=1": f"{UNKNOWN}optimizer.lr=1; write for example megamix checkpoint ",
    # the file
    "train nope.toml": "config: got nope.toml, there is no such file; write the path of a TOML file",
    "train jop.toml": "config: got jop.toml, there is no such file; did you mean job.toml?",
    "train nope.toml oops=": "nope.toml: 2 problems\n  config: got nope.toml .. \n  oops: got",
    "plan texts": "config: got texts, cannot be read: Is a directory; write the path of a TOML file",
    "train mine": "config: got mine .. a run goes on by the file that began it, or by mine/config.toml",
    "train job.yaml": "config: got job.yaml, is no TOML: .. line 1 .. write it as configs/quickstart.toml is",
    "train half.toml": "config: got half.toml, is no TOML: .. line 1 .. correct that line (text needs quotes)",
    # flags
    "train job.toml --plugins nope": "plugins: nope .. install it, or start in the folder where it lies",
    "verify job.toml --layouts dp2,zz": "--layouts: got zz .. write dp2, cp2 or dp2tp2sp",
    "plan job.toml --memory 80": "--memory .. '80' .. a number and a unit; write --memory 80GiB",
    "plan job.toml --memory lots": "--memory .. 'lots' .. write --memory 80GiB",
    "train job.toml --memory 3GiB": "--memory: .. without --check .. write --check beside it",
    "plan job.toml --world 3": (
        "training.global_batch_size: got 8, must be a multiple of micro_batch_size 2 * 3 data-parallel ranks = 6; "
        "write global_batch_size = 12"
    ),
    "plan job.toml --world 4 parallelism.dp_size=2": "parallelism.dp_size: got 2, .. 4 were started; write dp_size = 4",
    # a job's files
    "train job.toml optimizer.lr=-1 training.global_batch_size=7 data.train=nowhere data.tokenizer=gpt2": (
        "job.toml: 4 problems\n  optimizer.lr: got -1 .. global_batch_size: got 7 .. data.train = 'nowhere' .. "
        "data.tokenizer: tokenizer 'gpt2' is no tokenizer.json .. ; name a tokenizer.json .. leave the key out"
    ),
    "train job.toml data.train=nowhere data.valid=5": "job.toml: 1 problem\n  data.valid: got 5",
    "train job.toml training.global_batch_size=7 --check": "job.toml: 1 problem\n  training.global_batch_size: got 7",
    "train job.toml data.train=data --check": "job.toml: 1 problem\n  data.train = 'data': .. write data/train or",
    "train job.toml data.valid=lonely": "data.valid = 'lonely': lonely.idx is missing .. run `megamix prepare`",
    "train job.toml data.valid=cut": "data.valid = 'cut': cut.bin has 100 bytes, its index says 6600 tokens",
    "train job.toml data.tokenizer=broken/tokenizer.json": "data.tokenizer: .. is no tokenizer.json",
    "train job.toml data.tokenizer=data/tokenizer.json": (
        "data.tokenizer: data/tokenizer.json knows 271 tokens, more than model.vocab_size 64; write vocab_size = 271"
    ),
    "train job.toml model.vocab_size=60": "job.toml: 2 problems\n  data.train = 'data/train': holds token id 63, but",
    "train job.toml model.seq_len=100000": "data.train = 'data/train': 66000 tokens .. shorten model.seq_len or",
    "train job.toml checkpoint.folder=file": "checkpoint.folder: file cannot be made, .. ; write another folder",
    "train job.toml checkpoint.folder=file/run": "file/run cannot be made, .. ; write another folder",
    "train job.toml checkpoint.folder=ran": "checkpoint.folder: ran holds another run (metrics.jsonl); write",
    "train job.toml checkpoint.resume=nowhere": "checkpoint.resume: nowhere is no checkpoint; write auto, never or",
    "train job.toml checkpoint.resume=run/checkpoints/step_00000003": "step_00000003 is this run's own; write auto",
    # data, models and runs
    f"prepare {IN} --output theirs": "--output .. theirs .. no manifest.json; choose another --output",
    f"prepare {IN} --output file/out": "--output .. file/out .. ; name a place in a folder that you may write to",
    f"prepare --corpus stdlib {IN} {OUT}": "--input: not allowed with argument --corpus; write for example",
    f"prepare --input nowhere {OUT}": "megamix prepare: --input .. 'nowhere' .. give files, or a folder of them",
    f"prepare --input empty {OUT}": "--input .. 'empty' .. give files, or a folder of them",
    f"prepare {IN} {OUT} --tokenizer gpt2": "--tokenizer .. gpt2 .. train, bytes .. hf download gpt2 tokenizer.json",
    f"prepare {IN} {OUT} --tokenizer nope.json": "--tokenizer .. nope.json .. write train, bytes, or the path of a",
    f"prepare {IN} {OUT} --vocab-size 10": "--vocab-size .. 10 .. give at least 257",
    f"prepare {IN} {OUT} --tokenizer bytes --vocab-size 9": "--vocab-size .. leave it out for --tokenizer bytes",
    f"prepare {IN} {OUT} --end-token </s>": "--end-token .. </s> .. leave it out",
    f"prepare {IN} {OUT} --workers 0": "--workers .. 0 .. leave it out for one a core",
    f"prepare {IN} {OUT} --max-bad-records -1": "--max-bad-records .. -1 .. 0 stops at the first",
    f"prepare {IN} {OUT} --valid-fraction 1.5": "--valid-fraction .. 1.5 .. 0.05 keeps one document in twenty",
    "generate gpt2 --prompt hi": f"gpt2 .. is no folder .. {MODELS} .. hf download NAME",
    "generate empty": "empty holds no model: none of checkpoints/step_*, manifest.json and config.json is in it",
    "evaluate job.toml": f"job.toml .. is no folder .. {MODELS}",
    "export empty --to hf out --shard-gb 0": "--shard-gb .. 0.0 .. write --shard-gb 5",
    "import gpt2 --output out": "gpt2/config.json is missing .. hf download NAME",
    "import broken --output out": "broken/config.json is no JSON table .. copy it again",
    "import listed --output out": "listed/config.json is no JSON table (it holds a list); copy it again",
    "plot nowhere": "RUN .. nowhere .. give the folder of a run",
    "checkpoint ls nowhere": "nowhere .. is no folder .. give a run, a folder of checkpoints, or a checkpoint",
    "checkpoint verify empty": "empty holds no checkpoint .. give a run that has saved",
    "bench all --rounds 0 --output texts": (
        "flags: 2 problems\n  --rounds: got 0, must be at least 1; write --rounds 15\n  --output: got texts"
    ),
    "bench update --layout tp2": "--layout: got tp2 with update .. write megamix bench train --layout tp2",
    "bench --output file/below": "--output: got file/below .. name a file in a folder of yours",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A user's working folder; `job.toml` in it is right, and would train."""
    folder = tmp_path_factory.mktemp("place")
    write_data(folder / "data", tokenizer=True)
    files = {
        "job.toml": tiny_job(Path()).text, "job.yaml": "model:\n  size: 3\n", "half.toml": "model = fp16",
        "file": "", "texts/a.txt": "plain words " * 99, "theirs/thesis.tex": "", "mine/config.toml": "",
        "broken/config.json": "{", "listed/config.json": "[]", "broken/tokenizer.json": "{}",
        "ran/metrics.jsonl": "", "lonely.bin": "",
    }  # fmt: skip
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "cut.bin").write_bytes((folder / "data/valid.bin").read_bytes()[:100])
    shutil.copy(folder / "data/valid.idx", folder / "cut.idx")
    (folder / "empty").mkdir()
    return folder


@pytest.fixture
def refusal(place, monkeypatch, capsys):
    """Return what `megamix` says to words that it refuses."""
    monkeypatch.chdir(place)

    def told(words):
        try:
            status = main(words)
        except SystemExit as ended:  # how argparse refuses
            status = ended.code
        said = capsys.readouterr().err
        assert status == 2, said
        return said

    return told


def match(want, said):
    assert re.search(".*".join(map(re.escape, want.split(" .. "))), said, re.DOTALL), said


@pytest.mark.parametrize("words", WRONG_COMMANDS)
def test_a_wrong_command_is_told_with_what_to_write_and_writes_nothing(place, refusal, words):
    before = sorted(place.rglob("*"))
    said = refusal(words.split())
    match(WRONG_COMMANDS[words], said)
    assert said.startswith(("usage: megamix", f"megamix {words.split()[0]}"))
    assert "flags: 1 problem" not in said or " --" in said  # said only of flags
    assert not any(word in said for word in ("Traceback", "Error(", "pyproject"))
    assert sorted(place.rglob("*")) == before


NO_COUNT = "must be a number of ranks, 1 or more; start the ranks by launch/pretrain.sh"
NO_RANK = "must be from 0 to 1, as there are 2 rank(s); start the ranks by launch/pretrain"
UNSET = "not set, though WORLD_SIZE is 2; start the ranks by launch/pretrain.sh or torchrun, which set it"
# Variables of a launcher, and what tells them. RANK and where ranks meet are unset, unless named.
WRONG_VARIABLES = [
    ({"WORLD_SIZE": "abc"}, f'  WORLD_SIZE: got "abc", {NO_COUNT}'),
    ({"WORLD_SIZE": "1" * 10}, f'  WORLD_SIZE: got "1111111111", {NO_COUNT}'),
    ({"LOCAL_WORLD_SIZE": "0"}, f'  LOCAL_WORLD_SIZE: got "0", {NO_COUNT}'),
    ({"WORLD_SIZE": "2", "RANK": "-1"}, f'  RANK: got "-1", {NO_RANK}'),
    ({"WORLD_SIZE": "2", "LOCAL_RANK": "2"}, f'  LOCAL_RANK: got "2", {NO_RANK}'),
    ({"WORLD_SIZE": "2"}, f"  RANK, MASTER_ADDR, MASTER_PORT: {UNSET}"),
    ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "0"}, f"  MASTER_PORT: {UNSET}"),
]


@pytest.mark.parametrize(("variables", "line"), WRONG_VARIABLES)
def test_ranks_that_cannot_be_are_told_by_their_variable(refusal, monkeypatch, variables, line):
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert line in refusal(["train", "job.toml", *(["--check"] if UNSET not in line else [])])


# Words of `train --check`, and the note that they get; without a word for those that get none.
PREPARED = "data.train=prepared/train model.vocab_size="
SELDOM_MEANT = {
    "precision.loss_scale.rule=static precision.loss_scale.init_scale=65536.0": "",
    "precision.loss_scale.rule=static precision.loss_scale.init_scale=16777216.0": (
        "16777216 never falls .. write init_scale = 1024.0, or rule = "
    ),
    f"{PREPARED}320 data.tokenizer=prepared/tokenizer.json": "",
    f"{PREPARED}1024": "vocab_size: 1024, but data.train was prepared with 257 tokens .. write vocab_size = 384",
    f"{PREPARED}320 data.tokenizer=data/tokenizer.json": (
        "data.tokenizer: data/tokenizer.json is not the one that data.train was prepared with .. in prepared"
    ),
    "parallelism.accumulate=owner parallelism.shard=gradients": "",
    "parallelism.accumulate=owner parallelism.shard=gradients training.micro_batch_size=8": (
        'parallelism.accumulate: "owner" does nothing with one micro-batch a step; write accumulate = "local"'
    ),
    "parallelism.accumulate=owner": (
        'parallelism.accumulate: with shard = "states" every rank keeps its gradients, and "owner" comes on top, with '
        '.. ; write accumulate = "local", or shard = "gradients"'
    ),
    'optimizer.groups=[{pattern="blocks.*",lr_factor=2.0}]': "",
    'optimizer.groups=[{pattern="*.biass",lr_factor=2.0}]': "group '*.biass' matches no parameter of the model",
    'optimizer.name=muon optimizer.lr=0.02 optimizer.muon.adamw=["*.rooter.*"]': (
        "pattern '*.rooter.*', which matches no parameter"
    ),
}


@pytest.mark.parametrize("words", SELDOM_MEANT)
def test_what_trains_and_is_seldom_meant_is_told_and_no_problem(place, monkeypatch, capsys, words):
    monkeypatch.chdir(place)
    if not Path("prepared").exists():
        flags = "--input texts --output prepared --tokenizer bytes --valid-fraction 0"
        assert main(["prepare", *flags.split()]) == 0
    capsys.readouterr()
    assert main(["train", "job.toml", *words.split(), "--check"]) == 0
    said, outcome, _ = capsys.readouterr().out.partition("no problems; 1 rank; ")
    notes = [line for line in said.splitlines() if "is not read where" not in line]
    assert outcome
    assert len(notes) == bool(SELDOM_MEANT[words])
    for note in notes:
        match(f"note: .. {SELDOM_MEANT[words]}", note)


def test_plugins_of_an_empty_shell_variable_are_none(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    assert main(["train", "job.toml", "--check", "--plugins", ""]) == 0
    assert capsys.readouterr().out.startswith("no problems; 1 rank; ")


def _amid_a_step(folder):
    engine = fp16_engine()
    engine.progress.micro_batches = 1
    return Checkpoints(engine, folder)


# Calls of a program, given a folder, and the error's words.
WRONG_CALLS = [
    (lambda _: Precision("bf16"), "precision.dtype must be torch.float16, bfloat16 or float32, got 'bf16'"),
    (lambda _: Precision(loss_scale=1024), "precision.loss_scale must be None or a LossScale, got 1024; pass"),
    (lambda _: AdamW(lr=1e-3, betas=(0.9,)), "betas of AdamW must be 2 numbers, got (0.9,); leave it out for (0.9"),
    (lambda place: Checkpoints(fp16_engine(), place / "file"), "/file is a file; give the path of a folder"),
    (lambda place: Checkpoints(fp16_engine(), place / "job"), "/job belongs to a job; its checkpoints lie in "),
    (lambda place: Checkpoints(fp16_engine(), place / "out").save(None), "progress is a NoneType; give a dict"),
    (lambda place: _amid_a_step(place / "out").save({}), "Checkpoints.save() after 1 backward() calls of a step; call"),
    (lambda place: _amid_a_step(place / "out").load(), "Checkpoints.load() after 1 backward() calls of a step; call"),
]


@pytest.mark.parametrize(("call", "told"), WRONG_CALLS)
def test_a_wrong_call_is_told_at_the_call(tmp_path, call, told):
    (tmp_path / "file").touch()
    (tmp_path / "job/checkpoints").mkdir(parents=True)
    with pytest.raises((ValueError, RuntimeError), match=re.escape(told)):
        call(tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_split_stands_for_valid_beside_named_sets():
    config_from_dict(changed(data={"split": [95, 5], "valid": None}, training={"eval_interval": 5}))
    config_from_dict(changed(data={"split": [95, 5], "valid": {"web": "tokens/web"}}))
    wrong = changed(data={"split": [95, 5], "valid": {"web": "tokens/web"}, "packing": "tight"})
    assert [problem.split(":")[0] for problem in problems_of(wrong)] == ["data.packing"]


def test_validation_sets_survive_the_way_to_toml_and_merge_by_name():
    config = config_from_dict(changed(data={"valid": {"web": "a", "code_2": [{"path": "b", "weight": 2}]}}))
    assert config_from_dict(tomllib.loads(config.text)) == config
    above = config_from_dict(config.model_dump(), {"data": {"valid": {"web": "c"}}})
    assert above.data.valid == config.data.valid | {"web": (DataSource(path="c"),)}
    assert config_from_dict(config.model_dump(), {"data": {"valid": "c"}}).data.valid == {"": (DataSource(path="c"),)}


def test_missing_keys_are_listed_with_an_example_but_none_of_a_misspelt_section():
    problems = problems_of({})
    required = {f"{name}.{key}" for name in SECTIONS for key, field in fields_of(name).items() if field.is_required()}
    assert {problem.split(":")[0] for problem in problems} == required
    assert "model.vocab_size: missing; write for example vocab_size = 2048" in problems
    tree = changed()
    tree["modle"] = tree.pop("model")
    (problem,) = problems_of(tree)
    assert "did you mean model?" in problem


def test_checks_on_unusable_values_are_left_out_and_all_others_told_at_once():
    tree = changed(model=3, optimizer={"lr": "x", "min_lr": 5}, training={"steps": None, "global_batch_size": 6})
    fields = ["model", "optimizer.lr", "training.global_batch_size", "training.steps"]
    assert sorted(problem.split(":")[0] for problem in problems_of(tree)) == fields
    tree = changed(
        precision={"dtype": "fp16", "loss_scale": {"rule": "off", "init_scale": 3}},
        parallelism={"dp_size": "x", "pipeline": {"size": 2, "schedule": "x", "stages_per_rank": 2}},
        training={"global_batch_size": 6, "stepz": 3},
    )
    fields = [
        "parallelism.dp_size", "parallelism.pipeline.schedule",
        "parallelism.pipeline.size",  # more stages than layers
        "precision.loss_scale.init_scale",  # not read
        "precision.loss_scale.rule", "training.global_batch_size", "training.stepz",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="configuration: 7 problems\n") as caught:
        config_from_dict(tree)
    assert sorted(line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]) == fields


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.toml")), ids=lambda file: file.stem)
def test_a_check_finds_each_key_that_it_reads_in_a_job_of_ours(file):
    """A check that fails on a whole job is passed over as if it were a plugin's, so a renamed key would disarm it."""
    job = load_config(file)
    tables = job.parallelism.model_copy(
        update={
            "tensor": TensorConfig(size=2),
            "context": ContextConfig(size=2),
            "pipeline": PipelineConfig(size=2),
            "expert": ExpertConfig(size=2),
        }
    )
    for config in (job, job.model_copy(update={"parallelism": tables})):
        for check in _CHECKS:
            [*check(config)]


def test_a_world_size_that_does_not_fit_is_multiplied_out_and_its_cause_comes_first():
    assert check_world_size(config_from_dict(GOOD), 2) == []
    dp_3 = config_from_dict(changed(parallelism={"dp_size": 3}))
    assert check_world_size(dp_3, 2) == [
        "parallelism.dp_size: got 3, all sizes multiply to 3 ranks, but 2 were started; write dp_size = 2 or start 3",
        "training.global_batch_size: got 16, must be a multiple of micro_batch_size 4 * 3 data-parallel ranks = "
        "12; write global_batch_size = 24",
    ]
    assert grad_accum_steps(config_from_dict(GOOD), 2) == 2
    with pytest.raises(ValueError, match=r"training.global_batch_size: .* 3 data-parallel ranks = 12"):
        grad_accum_steps(config_from_dict(GOOD), 3)
