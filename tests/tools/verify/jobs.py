"""Small configurations to verify, and what ranks see of them with a bug planted or none."""

from unittest import mock

from megamix.config import config_from_dict
from megamix.mixed_precision.guards.unseen_writes import UnseenWrites
from megamix.tools.verify.core.layout import parse_layout
from megamix.tools.verify.layouts.observe import observe
from tests.builders import divided
from tests.tools.verify import engine_bugs
from tests.tools.verify.engine_bugs import FAMILY

FAMILIES = {
    "llama": {"num_kv_heads": 4},
    "gpt": {"norm": "layernorm", "activation": "gelu_tanh", "rope": False, "bias": True},
    "per_head": {"family": "per_head", "num_kv_heads": 4},
}
EXPERTS = {
    "num_experts": 8, "top_k": 2, "ffn_hidden_size": 24, "shared_ffn_hidden_size": 16, "dense_layers": 1,
    "balance_loss": 0.1, "z_loss": 0.01,
}  # fmt: skip
UPDATES, OVERFLOW_AT = 2, 1


def make_config(
    layout,
    *,
    family="llama",
    dtype="fp16",
    tied=True,
    accumulation=2,
    schedule="1f1b",
    sequence_parallel=False,
    loss_scale=None,
    packing="none",
    shard="states",
    cp_method="gather",
    model=None,
    average=None,
    keys=None,
    **optimizer,
):
    """Return a small job. The layout's name may say what its ranks keep a share of, as in dp2-gradients.

    `accumulation`: micro-batches a step; with stages pp_size, or twice that for more than one. `loss_scale`: None for
    2**10 in FP16, and none elsewhere. `keys`: keys of sections that cover the others.
    """
    place = parse_layout(layout if "-" in layout else f"{layout}{'sp' * sequence_parallel}-{shard}")
    stages = place.size("pp")
    if stages > 1:
        accumulation = stages * min(accumulation, 2)
    fixed = loss_scale or (2.0**10 if dtype == "fp16" else None)
    scale = {"rule": "static", "init_scale": fixed} if fixed else {"rule": "off"}
    tree = {
        "model": {
            "vocab_size": 72, "seq_len": 8, "hidden_size": 32, "num_heads": 8,
            "tie_embeddings": tied, "num_layers": max(2, stages if schedule == "1f1b" else 2 * stages),
            **FAMILIES[family], **(model or {}),
        },
        "data": {"train": "none", "packing": packing},
        "optimizer": {"lr": 1e-2, "compile": False, **optimizer},
        "precision": {"dtype": dtype, "loss_scale": scale},
        "parallelism": {
            "bucket_size": 4000, "pipeline": {"size": stages, "schedule": schedule} if stages > 1 else False,
        },
        "training": {
            "steps": 10, "micro_batch_size": 2, "global_batch_size": 64,
            **({"average": {"decay": average}} if average else {}),
        },
        "checkpoint": {"folder": "none"},
        "plugins": [FAMILY] if family == "per_head" else [],
    }  # fmt: skip
    config = place.apply(config_from_dict(tree), accumulation)
    if config.parallelism.context is not None:
        config = divided(config, context={"size": place.size("cp"), "method": cp_method})
    return config.with_keys(**(keys or {}))


def observe_case(config):
    return observe(config, UPDATES, OVERFLOW_AT)


def observe_bugs(cases, overflow_at=None, updates=UPDATES):
    return [observe_bug(*case, overflow_at, updates) for case in cases]


def observe_bug(config, bug, overflow_at=None, updates=UPDATES):
    """Return the steps of `observe` with a bug of engine_bugs planted on every rank, or with none.

    The engine does not look at its half parameters itself: `verify` must see their damage.
    """
    if not bug:
        return observe(config, updates, overflow_at)
    with getattr(engine_bugs, bug)(), mock.patch.object(UnseenWrites, "look", lambda *_: None):
        return observe(config, updates, overflow_at)
