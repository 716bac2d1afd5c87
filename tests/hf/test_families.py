"""Random models of each family go from transformers to a checkpoint, train and go back: logits agree within 5e-6,
losses within 1e-6, weights bit for bit, greedy texts exactly.

One file for all that needs transformers: importing it takes seconds.
"""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megamix.checkpoint.verify import read_checkpoint
from megamix.cli.verbs import main
from megamix.hf import convert
from megamix.hf.convert import export_model, import_model
from megamix.hf.source import open_source
from megamix.model.generation import generate
from tests.builders import SEQ_LEN, VOCAB, run_on_ranks
from tests.conftest import FULL
from tests.hf.folders import BY_LOOP, FAMILIES, MIXTURES, STEPS, WINDOWED, job_from, random_model, shapes

COUNT = 24 if FULL else 2
CPU = torch.device("cpu")


def _tokens(seed, length=SEQ_LEN):
    return torch.randint(VOCAB, (3, length), generator=torch.Generator().manual_seed(seed))


def _opened(path):
    return open_source(path).load(torch.float32, CPU)


def _loss_gap(ours, theirs, tokens):
    """Return how far our loss of sequences is from transformers' own, relative to it."""
    want = float(theirs(tokens, labels=tokens).loss)
    return abs(float(ours(tokens[:, :-1], tokens[:, 1:])) - want) / want


def _from_transformers(folder):
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **BY_LOOP)
    assert not any(report.values()), report  # missing, unexpected and mismatched keys
    return model.eval().requires_grad_(False)


def _written(folder):
    """Return the shape of each tensor in a folder's files."""
    return {
        name: tuple(value.shape) for path in folder.glob("*.safetensors") for name, value in load_file(path).items()
    }


def _assert_alike(ours, theirs, seed):
    """Logits, losses and greedy texts of both models are the same."""
    tokens, prompt, count = _tokens(seed), _tokens(seed, 5), 8
    want = theirs(tokens).logits
    assert (ours(tokens) - want).abs().max() < 5e-6 * want.abs().max()
    assert _loss_gap(ours, theirs, tokens) < 1e-6
    assert torch.equal(generate(ours, prompt, count, temperature=0), _greedy(theirs, prompt, count))


def _greedy(model, tokens, count):
    mask = torch.ones_like(tokens)
    return model.generate(tokens, attention_mask=mask, do_sample=False, max_new_tokens=count, pad_token_id=0)


@pytest.mark.parametrize(
    ("family", "number", "shape"),
    [
        (family, number, shape)
        for family in (*FAMILIES, *WINDOWED, *MIXTURES)
        for number, shape in enumerate(shapes(family, COUNT))
    ],
)
def test_a_model_of_transformers_imports_trains_and_exports(family, number, shape, data, tmp_path, monkeypatch):
    theirs = random_model(family, shape)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="8KB")
    monkeypatch.setattr(convert, "FILE_SIZE", 3000)
    imported = Path(import_model(tmp_path / "hf", tmp_path / "in"))
    assert len(read_checkpoint(imported).manifest.files) > 1
    ours = _opened(tmp_path / "in")
    _assert_alike(ours, theirs, number)
    before = [parameter.clone() for parameter in ours.parameters()]
    seq_len = {"model.seq_len": SEQ_LEN}  # shorter than the imported one, where positions are rotary
    run_on_ranks(job_from(tmp_path / "in", data, tmp_path / "run", **seq_len))
    source = open_source(tmp_path / "run")
    trained = source.load(torch.float32, CPU)
    moved = [(one - other).abs().max() for one, other in zip(before, trained.parameters(), strict=True)]
    assert 0 < min(moved) <= max(moved) < (STEPS + 1) * 1e-3

    export_model(source, tmp_path / "out", "fp32", shard_size=10_000)
    _assert_alike(trained, _from_transformers(tmp_path / "out"), number)
    again = _opened(tmp_path / "out")
    assert all(torch.equal(one, other) for one, other in zip(trained.parameters(), again.parameters(), strict=True))


def test_a_mixture_trained_where_ranks_divide_its_experts_evaluates_and_exports(data, tmp_path, run_ranks, capsys):
    random_model("qwen3_moe", next(shapes("qwen3_moe", 1))).save_pretrained(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "in")
    divided = {"model.seq_len": SEQ_LEN, "parallelism.expert.size": 2}
    run_ranks(run_on_ranks, 2, job_from(tmp_path / "in", data, tmp_path / "run", **divided))
    assert main(["export", str(tmp_path / "run"), "--to", "hf", str(tmp_path / "out"), "--dtype", "fp32"]) == 0
    on_text = ["--data", str(data / "valid"), "--max-tokens", "129", "--dtype", "fp32"]
    assert [main(["evaluate", str(tmp_path / folder), *on_text]) for folder in ("run", "out")] == [0, 0]
    trained, exported = re.findall(r"[\d.]+ nats", capsys.readouterr().out)
    assert trained == exported
    ours, theirs = _opened(tmp_path / "run"), _from_transformers(tmp_path / "out")
    assert _loss_gap(ours, theirs, _tokens(3)) < 1e-6


@pytest.mark.parametrize("family", [*FAMILIES, *WINDOWED, *MIXTURES])
def test_what_is_imported_exports_to_the_same_weights_and_configuration(family, tmp_path):
    theirs = random_model(family, next(shapes(family, 1)))
    theirs.save_pretrained(tmp_path / "hf")
    import_model(tmp_path / "hf", tmp_path / "in")
    export_model(open_source(tmp_path / "in"), tmp_path / "out", "fp32")
    exported = _from_transformers(tmp_path / "out")
    # These shapes are also an older family's.
    older = {"smollm3": "llama", "seed_oss": "qwen2", "ministral": "mistral", "phi3": "llama"}
    if family in older:
        assert exported.config.model_type == older[family]
        return
    assert _written(tmp_path / "out") == _written(tmp_path / "hf")
    before, after = theirs.state_dict(), exported.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    # Keys that the file lacks, and n_inner, which GPT-2's file may leave out.
    told = {"n_inner", "dtype", "_name_or_path", "transformers_version", "summary_type"}
    told |= {"resid_pdrop", "embd_pdrop", "attn_pdrop"}
    one, other = theirs.config.to_dict(), exported.config.to_dict()
    assert {key for key in one if one[key] != other.get(key)} - told == set()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_an_export_in_half_is_the_masters_rounded(dtype, tmp_path):
    theirs = random_model("gpt2", next(shapes("gpt2", 1)))
    theirs.save_pretrained(tmp_path / "hf")
    export_model(open_source(tmp_path / "hf"), tmp_path / "out", dtype)
    exported = _from_transformers(tmp_path / "out")
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert exported.dtype == half
    for name, weight in exported.state_dict().items():
        assert torch.equal(weight, theirs.state_dict()[name].to(half)), name
    # Imported again, the half weights are what they are.
    import_model(tmp_path / "out", tmp_path / "in")
    again = _opened(tmp_path / "in").state_dict()
    assert torch.equal(again["embedding.weight"], exported.state_dict()["transformer.wte.weight"].float())
