"""`family = "transformers"`: ten kinds of models train as jobs on two ranks, from their own first weights or the
folder's, begin with transformers' own loss, and go on bit for bit after a stop; they are exported for transformers,
evaluated, planned and verified. What does not go together is refused before a job. Every kind of transformers that
builds small begins with transformers' own loss and buffers, or is refused.
"""

import gc
import itertools
import json
import shutil
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import cross_entropy

from megamix.base.console import Console
from megamix.base.live_storage import LiveStorage
from megamix.cli.verbs import main
from megamix.config import ConfigError, architecture
from megamix.model import transformers_model
from megamix.model.family import family_of
from megamix.tools.plan.activations import TracedWork, trace_stage
from megamix.tools.verify.core.layout import parse_layout
from megamix.tools.verify.layouts.layout_lines import verify_layout
from megamix.train.check import check
from megamix.train.job import Lines
from megamix.train.main import run_job
from tests.builders import corpus_of, run_on_ranks, tiny_job, write_data
from tests.conftest import FULL
from tests.model.small_kinds import REFUSED, save_small, small_kinds
from tests.model.their_models import KINDS, SEQ_LEN, write_config

STEPS, STOP = 2, 1
LOADED = [*KINDS] if FULL else ["gemma3_text", "qwen3_moe", "olmo2"]  # kinds whose first weights and exports are seen


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("theirs")
    write_data(path / "data")
    for kind in KINDS:
        write_config(path, kind)
    return path


def job(folder, kind, run, dtype="fp32", **over):
    """Return a job of the model in folder/kind."""
    sections = {
        "model": {"family": "transformers", "folder": str(folder / kind), "seq_len": SEQ_LEN},
        "precision": {"dtype": dtype, "loss_scale": {"rule": "auto"}},
        "training": {"steps": STEPS, "eval_interval": 0},
        "lr_schedule": {"decay_style": "constant", "warmup_steps": 0},
        "checkpoint": {"folder": str(folder / run), "save_interval": STOP},
        "metrics": {"log_interval": 1},
    }
    return tiny_job(folder, sections, over)


def train_all(folder, kinds, dtype):
    """Train each kind on these ranks."""
    for kind in kinds:
        run_on_ranks(job(folder, kind, f"{kind}-{dtype}", dtype))


def weights(folder, run):
    return load_file(folder / run / "weights.safetensors")


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_ten_kinds_train_on_two_ranks_and_go_on_bit_for_bit(run_ranks, folder, dtype):
    kinds = [*KINDS] if FULL else {"fp16": ["gemma3_text", "opt"], "bf16": ["phi", "qwen3_moe"]}[dtype]
    run_ranks(train_all, 2, folder, kinds, dtype)
    whole = {kind: weights(folder, f"{kind}-{dtype}") for kind in kinds}
    for kind in kinds:  # as if it had stopped before its last step
        (folder / f"{kind}-{dtype}/weights.safetensors").unlink()
        shutil.rmtree(folder / f"{kind}-{dtype}/checkpoints/step_{STEPS:08d}")
    run_ranks(train_all, 2, folder, kinds, dtype)
    for kind in kinds:
        again = weights(folder, f"{kind}-{dtype}")
        assert whole[kind].keys() == again.keys(), kind
        assert all(torch.equal(whole[kind][name], again[name]) for name in again), kind


def test_a_run_goes_on_by_a_moved_folder_of_another_version_but_not_of_another_model(folder):
    run_on_ranks(job(folder, "olmo2", "moving", training={"steps": STOP}))
    keys = json.loads((folder / "olmo2" / "config.json").read_text())
    run_on_ranks(job(folder, "olmo2", "moving", model=odd(folder, "olmo2", keys | {"transformers_version": "5.0.1"})))
    assert (folder / "moving" / "checkpoints" / f"step_{STEPS:08d}").is_dir()
    with pytest.raises(ConfigError, match=r"model.config_json: the checkpoint has"):
        run_on_ranks(job(folder, "olmo2", "moving", model=odd(folder, "phi", keys | {"rms_norm_eps": 0.1})))


@pytest.fixture(scope="module")
def begun(folder):
    """Train a step of each of LOADED from saved weights. Return the models of transformers that have these."""
    from transformers import AutoConfig, AutoModelForCausalLM

    models = {}
    for kind in LOADED:
        torch.manual_seed(1)
        models[kind] = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / kind), dtype=torch.float32)
        models[kind].eval().save_pretrained(folder / "saved" / kind)
        saved = {"folder": str(folder / "saved" / kind)}
        run_on_ranks(job(folder, kind, f"{kind}-begun", model=saved, training={"steps": 1}))
    return models


def loss_of(theirs, config):
    """Return transformers' loss of a job's first batch."""
    first_batch = corpus_of(config).training(config.training.seed).read(range(config.training.global_batch_size)).tokens
    tokens = torch.from_numpy(first_batch).long()
    logits = theirs(input_ids=tokens[:, :-1], use_cache=False).logits.float()
    return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()


def first_loss(folder, run):
    """Return the loss of the only step of a run."""
    rows = (folder / run / "metrics.jsonl").read_text().splitlines()
    (loss,) = (row["train/loss"] for row in map(json.loads, rows) if "train/loss" in row)
    return loss


def test_a_job_begins_with_the_folders_weights_and_transformers_own_loss(folder, begun):
    for kind, theirs in begun.items():
        want = loss_of(theirs, job(folder, kind, "read"))
        assert first_loss(folder, f"{kind}-begun") == pytest.approx(want, rel=1e-5), kind


def test_an_export_is_what_transformers_loads(folder, begun, capsys):
    from transformers import AutoModelForCausalLM

    for kind in begun:
        assert main(["export", str(folder / f"{kind}-begun"), "--to", "hf", str(folder / f"{kind}-hf")]) == 0
        theirs, told = AutoModelForCausalLM.from_pretrained(folder / f"{kind}-hf", output_loading_info=True)
        assert not any(told.values()), (kind, told)
        ours = weights(folder, f"{kind}-begun")
        assert all(torch.equal(param, ours[f"hf.{name}"]) for name, param in theirs.named_parameters()), kind
    valid = ["--data", str(folder / "data/valid"), "--max-tokens", "129"]
    assert main(["evaluate", str(folder / "olmo2-begun"), *valid]) == 0
    assert "128 tokens in windows of 32" in capsys.readouterr().out


LFM = KINDS["phi"] | {"layer_types": ["conv", "full_attention"], "block_ff_dim": 48}


@pytest.mark.parametrize(
    ("kind", "packing"),
    [("gpt_oss", "documents"), ("opt", "best_fit"), ("lfm2", "documents"), ("olmo2", "documents")],
)
def test_packed_documents_need_positions_that_keep_them_apart(folder, kind, packing):
    model = odd(folder, "lfm2", LFM) if kind == "lfm2" else {}
    packed = job(folder, kind, f"{kind}-packed", data={"packing": packing}, training={"steps": 1}, model=model)
    if kind == "olmo2":
        run_on_ranks(packed)
    else:
        with pytest.raises(ValueError, match=f"the positions of a model of type {kind} do not keep documents apart"):
            run_on_ranks(packed)


def test_the_plan_counts_what_a_model_keeps(folder):
    kept = []
    for recompute in ("none", {"full": 1}, "full"):
        config = job(folder, "gemma3_text", "planned", model={"recompute": recompute}).model
        work = TracedWork(model=config, batch=(2, SEQ_LEN), dtype=torch.float32, machine="cpu")
        kept.append(trace_stage(work, range(2)).kept)
        with LiveStorage() as tracker:
            model = family_of(config)(config)
            tokens = torch.zeros(2, SEQ_LEN, dtype=torch.int64)
            model(tokens, tokens)
            before = tracker.live_bytes
            loss = model(tokens, tokens)
            # On tensors without memory transformers makes a mask, which a whole causal sequence does not need.
            assert 1 <= kept[-1] / (tracker.live_bytes - before) < 1.1
            del loss
    assert kept[2] < 0.5 * kept[0]
    assert kept[2] < kept[1] < kept[0]


def test_verify_passes_dense_and_mixed_models(run_ranks, folder):
    # Not a pool of its own: its ranks would import transformers anew.
    pool = SimpleNamespace(where="cpu", call=lambda work, *args: run_ranks(work, 2, *args))
    kinds = [*KINDS] if FULL else ["gemma3_text", "qwen3_moe"]
    dtypes = ["fp32", "bf16", "fp16"] if FULL else ["bf16"]
    layouts = ["dp2", "dp2-parameters"] if FULL else ["dp2-parameters"]
    for kind, dtype, layout in itertools.product(kinds, dtypes, layouts):
        config = job(folder, kind, "verified", dtype)
        verdict = verify_layout(config, parse_layout(layout), pool)
        assert not verdict.differences, (kind, dtype, layout, verdict.differences[0])


def odd(folder, kind, keys):
    """Return the key of a model whose config.json has other keys than a kind's, and write that file."""
    path = folder / kind / "odd"
    path.mkdir(parents=True, exist_ok=True)
    config = json.dumps({"model_type": kind, "vocab_size": 64, "pad_token_id": None, **KINDS.get(kind, {}), **keys})
    (path / "config.json").write_text(config)
    return {"folder": str(path)}


def test_what_does_not_go_together_is_refused_in_a_line(folder):
    for section, keys, told in (
        ("parallelism", {"context": {"size": 2}}, 'context.size: got 2, but family = "transformers" computes by'),
        ("model", {"folder": "org/name"}, 'got "org/name", there is no org/name/config.json, and nothing is'),
        ("model", {"recompute": "selective"}, "model.recompute: got \"selective\", must be 'none' or 'full'"),
        ("model", {"config_json": '{"model_type": "nothing"}'}, "transformers does not take it"),
        ("model", odd(folder, "t5", {}), "config.json: model_type 't5' is no text model of its own"),
        ("model", odd(folder, "mpt", {"max_seq_len": 16}), "model.seq_len: got 32, but config.json has max_seq_len 16"),
    ):
        with pytest.raises(ConfigError) as refused:
            job(folder, "olmo2", "refused", **{section: keys})
        (problem,) = refused.value.problems
        assert told in problem


BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
BERT |= {"max_position_embeddings": SEQ_LEN, "vocab_size": 64, "pad_token_id": 0}
DEEPSEEK = KINDS["phi"] | {"num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 16, "qk_nope_head_dim": 8}
DEEPSEEK |= {"qk_rope_head_dim": 4, "head_dim": 4, "v_head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 2}
DEEPSEEK |= {"moe_intermediate_size": 16, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}


@pytest.mark.parametrize(
    ("kind", "keys", "told"),
    [
        ("bert", BERT, "bert with this config.json sees later tokens"),
        ("olmo2", {"hidden_act": "no such"}, "transformers builds no such model: KeyError: .no such"),
        ("olmo2", {"num_hidden_layers": 0}, "num_hidden_layers is 0, and the model has no list of as many blocks"),
    ],
)
def test_a_model_that_a_job_cannot_train_right_is_refused(folder, tmp_path, kind, keys, told):
    with pytest.raises(ValueError, match=told):
        run_on_ranks(job(folder, kind, "odd", model=odd(folder, kind, keys), checkpoint={"folder": str(tmp_path)}))


def test_a_check_says_what_a_model_is_and_refuses_what_can_be_seen_without_values(folder, capsys):
    odd(folder, "deepseek_v3", DEEPSEEK)
    for name, init, want in (
        ("olmo2", "auto", "with drawn weights: {} has none\n  parameters    0.0197 M\n"),
        ("olmo2", "auto", "\n  olmo2 of transformers. Only a start tests values"),
        ("olmo2", "random", 'with drawn weights, by init = "random"'),
        ("olmo2", "folder", 'model.init: got "folder", {} has no *.safetensors'),
        ("deepseek_v3/odd", "auto", "model.layers.1.mlp.gate.e_score_correction_bias, a buffer that is saved"),
    ):
        place = str(folder / name)
        config = job(folder, "olmo2", "checked", model={"folder": place, "init": init})
        (folder / "job.toml").write_text(config.text)
        refused = main(["train", str(folder / "job.toml"), "--check"])
        assert want.format(place) in "".join(capsys.readouterr()), name
        assert refused == (2 if init == "folder" or "odd" in name else 0), name


def test_a_loss_of_the_router_that_is_not_added_is_told(folder):
    told = []
    for asks in (True, False):
        model = odd(folder, "qwen3_moe", {"output_router_logits": asks})
        check(job(folder, "qwen3_moe", "told", model=model), told.append)
    (line,) = (line for line in told if "router" in line)
    assert "(output_router_logits = true), and a job adds none: its router_aux_loss_coef 0.001 is not read" in line


def test_a_config_json_is_read_as_transformers_reads_a_file_without_what_names_code_and_drops_units():
    keys = {"model_type": "mistral", **KINDS["olmo2"], "vocab_size": 64, "sliding_window": 8}
    found = architecture(
        json.dumps(keys | {"attention_dropout": 1, "_attn_implementation": "evil/kernel", "auto_map": {"x": "y.Z"}})
    )
    assert (found.model_type, found.attention_dropout, hasattr(found, "auto_map")) == ("mistral", 0.0, False)
    assert found._attn_implementation != "evil/kernel"
    assert architecture(json.dumps(keys | {"layer_types": ["full_attention"] * 2})).model_type == "ministral"


def test_the_first_weights_are_let_go_before_training(folder, monkeypatch):
    first, told = transformers_model._first_weights, []

    def noted(*arguments):
        nonlocal storage
        model = first(*arguments)
        storage = StorageWeakRef(next(model.parameters()).untyped_storage())
        return model

    def memory_line(*_):
        gc.collect()
        return "gone" if storage.expired() else "there"

    storage = None
    monkeypatch.setattr(transformers_model, "_first_weights", noted)
    monkeypatch.setattr(Console, "line", lambda _, line: told.append(line))
    run_job(job(folder, "olmo2", "let-go"), Lines(memory_line))
    assert "gone" in told
    assert f"begins with drawn weights: {folder / 'olmo2'} has none" in told


def test_weights_that_a_job_cannot_begin_with_are_refused(folder):
    other = write_config(folder / "other", "olmo2", num_hidden_layers=3)

    def refused(told):
        with pytest.raises(ValueError, match=told):
            run_on_ranks(job(folder, "other/olmo2", "none"))

    (other / "pytorch_model.bin").write_bytes(b"")
    refused(r"has no \*.safetensors, but pytorch_model.bin, whose reading may run code")
    (other / "model.safetensors").write_bytes(b"broken")
    refused(r"model.folder: transformers cannot load .*: SafetensorError")
    transformers_model._built((folder / "olmo2" / "config.json").read_text()).save_pretrained(folder / "two")
    (folder / "two" / "model.safetensors").rename(other / "model.safetensors")
    refused("are not those of its config.json: missing")


def test_a_head_that_is_not_the_tied_embedding_is_refused_and_tensors_passed_over_are_told(folder, begun, caplog):
    path = folder / "untied" / "olmo2"
    shutil.copytree(folder / "saved" / "olmo2", path)
    keys = json.loads((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    save_file(tensors | {"model.rotary_emb.inv_freq": torch.ones(4)}, path / "model.safetensors", {"format": "pt"})
    family_of(job(folder, "untied/olmo2", "x").model)(job(folder, "untied/olmo2", "x").model)
    assert "1 tensors are not read, as in transformers: ['model.rotary_emb.inv_freq']" in caplog.text
    (path / "config.json").write_text(json.dumps(keys | {"tie_word_embeddings": True}))
    with pytest.raises(ValueError, match=r"lm_head.weight in .* is not the tensor .* tie_word_embeddings = false"):
        run_on_ranks(job(folder, "untied/olmo2", "x"))


class Bare(nn.Module):
    """A model whose rules give no values to its buffer."""

    config = SimpleNamespace(model_type="bare")

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.empty(3, dtype=torch.int64, device="meta"), persistent=False)

    def _init_weights(self, module):
        raise AttributeError


def test_a_buffer_that_nothing_fills_is_refused():
    with pytest.raises(ValueError, match="transformers gives no values to table, a buffer of a model of type bare"):
        transformers_model._fill_buffers(Bare())


@pytest.mark.parametrize("kind", small_kinds() if FULL else ["falcon_h1", "zaya", "afmoe"])
def test_each_kind_that_transformers_builds_begins_with_its_loss_and_buffers_or_is_refused(folder, kind):
    from transformers import AutoModelForCausalLM

    save_small(kind, folder / "small" / kind)
    if told := REFUSED.get(kind):
        with pytest.raises((ValueError, RuntimeError), match=told):
            run_on_ranks(job(folder, f"small/{kind}", f"{kind}-small"))
        return
    config = job(folder, f"small/{kind}", f"{kind}-small", training={"steps": 1})
    theirs = AutoModelForCausalLM.from_pretrained(config.model.folder, dtype=torch.float32).eval()
    buffers = dict(transformers_model.TransformersModel.on_meta(config.model).hf.named_buffers())
    assert all(torch.equal(buffers[name], table) for name, table in theirs.named_buffers())
    run_on_ranks(config)
    assert first_loss(folder, f"{kind}-small") == pytest.approx(loss_of(theirs, config), rel=1e-6)


class Noisy(nn.Module):
    """A model that drops units whatever its configuration says, and has a parameter that no gradient trains."""

    config = SimpleNamespace(vocab_size=64, model_type="noisy")

    def __init__(self):
        super().__init__()
        self.still = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, input_ids, *, use_cache):
        ones = nn.functional.one_hot(input_ids, 64).float()
        return SimpleNamespace(logits=nn.functional.dropout(ones, training=self.training))


def test_noise_in_training_and_a_parameter_that_gradients_do_not_train_are_refused(folder):
    with pytest.raises(ValueError, match="a model of type noisy with this config.json draws noise in training"):
        transformers_model._predicting(Noisy())
    config = job(folder, "olmo2", "x").model
    with (
        mock.patch.object(transformers_model, "_built", lambda *_: Noisy()),
        pytest.raises(ValueError, match="noisy has still, a parameter without a gradient, which"),
    ):
        family_of(config).shapes(config)
