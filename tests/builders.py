"""What tests are built of: a tiny model with its batches, an engine, data, and a job.

`run_ranks` of tests/conftest.py runs functions on ranks.
"""

from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from megamix import AdamW, Precision, ShardedEngine, Sharding
from megamix.config import Config, Pace, ParallelismConfig, config_from_dict
from megamix.config.choices import without_off
from megamix.config.sections import TrainingConfig
from megamix.data.source import MarkovSource
from megamix.data.token_file import token_file_writer
from megamix.data.tokenizer import Tokenizer
from megamix.launch.journal import Journal, Reached
from megamix.launch.ledger import Ledger, boot_s
from megamix.train import ranks, results
from megamix.train.corpus import JobCorpus
from megamix.train.main import run_job
from megamix.train.objects import lr_table

MODEL_VOCAB, WIDTH, LENGTH = 29, 24, 6  # of the tiny model and its batches
FP32, BF16 = Precision(torch.float32), Precision(torch.bfloat16)

VOCAB, SEQ_LEN, BRANCHING = 64, 32, 4  # each token has 4 equally likely successors: no model can get below ln 4
# A second layer of experts, whose biases are the only numbers that no gradient moves.
EXPERTS = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 24, "dense_layers": 1, "bias_rate": 0.01}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 40)
        self.down = nn.Linear(40, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))  # smaller than any dp_size

    def forward(self, x):
        return x + self.gain * self.down(F.gelu(self.up(self.norm(x))))


class Bent(nn.Linear):
    """A block that is compiled to three kernels instead of a dozen."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(super().forward(x))


class TinyModel(nn.Module):
    """Embedding, three blocks, and a head. `tied`: the head is the embedding's weight. `recompute`: blocks run again in
    backward.
    """

    def __init__(self, tied=True, recompute=False):
        super().__init__()
        self.embedding = nn.Embedding(MODEL_VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, MODEL_VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.recompute = recompute
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.normal_(param, std=0.2)

    def forward(self, tokens, flavour=0):
        """Run the blocks. `flavour` 0 runs all in order; 1 skips the first; 2 runs them in reverse order and skips the
        middle one.
        """
        x = self.embedding(tokens)
        for index in ((0, 1, 2), (1, 2), (2, 0))[flavour]:
            block = self.blocks[index]
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(self.norm(x))


def make_model(tied=True, recompute=False):
    torch.manual_seed(7)
    return TinyModel(tied, recompute)


def compiled_model(tied=True, *, compiled=True):
    """Return a model whose blocks are compiled, or the same model with blocks that are not."""
    model = make_model(tied)
    model.blocks = nn.ModuleList(Bent() for _ in model.blocks)
    for block in model.blocks if compiled else ():
        block.compile(dynamic=False)
    return model


def make_batch(step, rank, micro_batch):
    """Return the tokens of one micro-batch, a function of its step, rank and number: int64 (3, LENGTH)."""
    generator = torch.Generator().manual_seed(1000 * step + 50 * rank + micro_batch)
    return torch.randint(MODEL_VOCAB, (3, LENGTH), generator=generator)


def loss_of(model, tokens, flavour=0):
    logits = model(tokens, flavour)
    return F.cross_entropy(logits[:, :-1].float().reshape(-1, MODEL_VOCAB), tokens[:, 1:].reshape(-1))


def make_engine(
    model=None,
    optimizer=None,
    precision=FP32,
    sharding=None,
    *,
    shard=None,
    bucket_size=None,
    topology=None,
    **settings,
):
    """Return an engine, of `make_model()` unless `model` is given. `shard`: the model's blocks are units, and
    `bucket_size` and `topology` go with it. `settings`: the engine's other arguments.
    """
    model = make_model() if model is None else model
    if shard is not None:
        sharding = Sharding([*getattr(model, "blocks", ())], topology, bucket_size, shard=shard)
    return ShardedEngine(
        model, optimizer or AdamW(lr=0.01), precision, sharding, **{"compile_update": False, **settings}
    )


def corpus_of(config):
    return JobCorpus(config.data, config.model)


def pace_of(steps):
    return Pace(TrainingConfig(steps=steps, micro_batch_size=1, global_batch_size=1), seq_len=1)


def lrs_of(config):
    """Return the learning rate of each update of a job."""
    return lr_table(config.lr_schedule, config.optimizer, config.pace)


bf16_engine = partial(make_engine, precision=BF16)


def train_step(engine, step=0, flavour=0):
    """Train one step on this data-parallel rank's batch; what the engine tells of it."""
    engine.backward(loss_of(engine.module, make_batch(step, engine.topology.dp.rank, 0), flavour))
    return engine.step()


def train_steps(engine, steps=range(3)):
    """Train some steps; the mean loss over the ranks of each."""
    return [float(train_step(engine, step).loss) for step in steps]


def write_data(folder, tokenizer=False):
    """Write token files of a Markov chain whose entropy is ln(BRANCHING), and a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    source = MarkovSource(vocab_size=VOCAB, seq_len=SEQ_LEN, branching=BRANCHING, seed=3)
    for name, samples in (("train", range(2000)), ("valid", range(2000, 2200))):
        with token_file_writer(folder / name, VOCAB) as writer:
            for row in source.read(samples).tokens:
                writer.add(row)
    if tokenizer:
        Tokenizer.train(["def f(x):\n    return x\n"] * 10, 280).save(folder / "tokenizer.json")


SECTIONS = {
    key: name for name, table in Config.model_fields.items() for key in getattr(table.annotation, "model_fields", ())
}


def tiny_job(folder, *layers, tokens=None, **settings):
    """Return a job in folder/run on the files in `tokens`, or in folder/data.

    A setting goes by its own key, as in steps=3, or in its section, as in training={"steps": 3}. A layer is a dict of
    sections, which covers keys of those before it; settings cover all layers. The loss scale fits from the start: a
    search from 2^24 takes as many attempts as a short job has. Tests of the search set their own.
    """
    tokens = tokens or folder / "data"
    given = [
        {name: value} if name in Config.model_fields else {SECTIONS[name]: {name: value}}
        for name, value in settings.items()
    ]
    changes = {}
    for layer in (*layers, *given):
        for name, keys in layer.items():
            changes[name] = changes.get(name, {}) | keys if isinstance(keys, dict) else keys
    tree = {
        "model": {"vocab_size": VOCAB, "seq_len": SEQ_LEN, "hidden_size": 32, "num_layers": 2, "num_heads": 2},
        "data": {"train": str(tokens / "train"), "valid": str(tokens / "valid")},
        "optimizer": {"lr": 0.01, "compile": False},
        "lr_schedule": {"warmup_steps": 2},
        "precision": {"dtype": "fp16", "loss_scale": {"init_scale": 2.0**10, "growth_interval": 5}},
        "training": {"steps": 12, "micro_batch_size": 2, "global_batch_size": 8, "eval_interval": 5, "eval_batches": 2},
        "checkpoint": {"folder": str(folder / "run")},
        "metrics": {"log_interval": 4, "tensorboard": False},
    }
    return config_from_dict(tree, changes)


def divided(config, **tables):
    """Return a job with these tables of [parallelism], given as in a file."""
    section = ParallelismConfig.model_validate(without_off(ParallelismConfig, tables))
    return config.with_keys(parallelism={name: getattr(section, name) for name in tables})


def _unpickle(*arguments):
    raise AssertionError("what a peer has sent was unpickled: it could run code here")


def run_on_ranks(config):
    """Call `run_job` on ranks whose process group is up already, or alone.

    Its sample of text is short: ranks that divide layers take as long for a whole sample as for fifteen steps.
    """
    with (
        mock.patch.object(results, "SAMPLE_TOKENS", 8),
        mock.patch.object(dist.distributed_c10d, "_tensor_to_object", _unpickle),  # torch's pipeline does, for example
        mock.patch.object(ranks, "meet_ranks", lambda device, timeout_s: None),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        return run_job(config)


def make_journal(folder, update=0):
    """The journal of a start that has reached this update."""
    return Journal(folder, Ledger(boot_s()), lambda: Reached(update, 100 * update))
