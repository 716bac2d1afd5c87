"""Bugs in our own engine: tests/tools/verify/jobs.py plants them."""

from tests.tools.verify.catalogue.bugs import BUGS, Bug
from tests.tools.verify.jobs import EXPERTS, OVERFLOW_AT


def _enter(name, met_in, layout, check, where="", kind="", ranks=2, **other):
    key = f"{name} ({layout})"
    BUGS[key] = Bug(
        name=key, sentence=SENTENCES[name], met_in=met_in, file="", ranks=ranks, check=check, where=where, kind=kind,
        layout=layout, **other,
    )  # fmt: skip


SENTENCES = {
    "gradients_not_reduced": "One bucket's reduction is left out: every rank keeps its own gradient.",
    "positions_of_one_rank": "Only one rank's positions count for a norm, which tensor-parallel ranks replicate.",
    "norm_counted_per_rank": "Every rank's squares count as often as there are ranks.",
    "norm_counts_replicated": "The norm counts a parameter that tensor-parallel ranks replicate once for each of them.",
    "tables_in_half": "A cast of the whole model rounds the rotary tables with the parameters.",
    "wrong_divisor": "The loss is divided by the number of micro-batches once more, as if a schedule did it, too.",
    "scale_applied_twice": "The loss scale is in the loss twice.",
    "stale_gather": "The other ranks' parts of one bucket never arrive.",
    "unit_freed_early": "In backward the next unit's weights take the memory of the one that still computes.",
    "stale_shards": "The weights gathered behind a step are the casts of the masters before it.",
    "gradients_freed_early": "One rank's gradients are freed, and their memory taken, before they are sent.",
    "matrices_by_parts": "Muon makes each rank's part of a matrix orthogonal by itself.",
    "tall_not_orthogonalised": "A special path for tall matrices skips Muon's iteration.",
    "muon_per_micro_batch": "Muon makes each micro-batch's gradient orthogonal, and these are added up.",
    "momentum_moves_on_skipped": "Muon updates its momentum before it is known whether the step is skipped.",
    "moments_move_on_skipped": "The moments of a direction's rows move before it is known whether the step is skipped.",
    "heads_not_split": "Muon treats several matrices, stacked in one parameter, as one.",
    "matrices_decay_twice": "Weight decay is applied by the optimizer's wrapper, and once more by its equation.",
    "expert_gradients_larger": "The gradients of experts get a factor that the others do not have.",
    "router_in_half": "The router multiplies in half, and only its softmax is in FP32.",
    "biased_weights": "The bias that balances the experts' loads is in the factors of their outputs, too.",
    "counted_in_recompute": "Backward, which runs a block again, counts the tokens of its experts again.",
    "bias_of_own_counts": "Each rank moves the bias of experts by the counts of its own tokens.",
    "average_moves_on_skipped": "An average of the weights moves in a skipped step, too.",
    "average_of_halves": "An average of the weights is taken of their half copies.",
    "betas_of_the_first_group": "Groups with betas of their own get those of the optimizer.",
    "momentum_one_update_early": "Each update has the momentum that its schedule has for the next one.",
    "tied_table_not_summed": "Each end of a pipeline trains its own copy of the table.",
}

_enter(
    "gradients_not_reduced",
    "NeMo-RL #3716, Megatron #1446",
    "tp2sp",
    "gradient",
    "norm.weight",
    "each rank's own: the others' parts are missing",
)
_enter(
    "positions_of_one_rank",
    "Megatron #1446",
    "tp2sp",
    "gradient",
    "norm.weight",
    "each rank's own: the others' parts are missing",
)
_enter("gradients_not_reduced", "several", "dp2", "gradient", "", "each rank's own: the others' parts are missing")
_enter("norm_counted_per_rank", "Megatron #5916", "tp2", "norm", "all gradients", "times the root of 2")
_enter(
    "norm_counts_replicated",
    "Megatron #7452",
    "tp2",
    "norm",
    "all gradients",
    "it counts twice what tensor-parallel ranks replicate",
)
_enter("tables_in_half", "transformers #25681, DeepSpeed #5812", "dp2", "buffer", "rotary.cos", "rounded to FP16")
_enter("wrong_divisor", "DeepSpeed #8154", "pp2", "gradient", "", "divided by the number of micro-batches twice")
_enter("scale_applied_twice", "several", "dp2", "gradient", "", "the loss scale left in")
_enter("stale_gather", "Megatron #950, #663", "dp2", "half copy", "", missing="the check says it: a copy that is stale")
_enter("unit_freed_early", "pytorch #194519", "dp2-parameters", "gradient", "blocks.", "lost: nothing but zeros")
_enter(
    "stale_shards",
    "Megatron #950, #663",
    "dp2-parameters",
    "half copy",
    "",
    missing="the check says it: a copy that is stale",
)
_enter(
    "gradients_freed_early",
    "DeepSpeed #7965, #5545",
    "dp2-gradients",
    "gradient",
    "",
    "each rank's own: the others' parts are missing",
)
_enter(
    "tied_table_not_summed",
    "several",
    "pp2",
    "copies (gradient",
    "embedding.weight",
    missing="the check says it: two copies differ",
)
_enter(
    "average_moves_on_skipped",
    "several",
    "dp2",
    "average after an overflow",
    "",
    "moved by a step that is none",
    job={"average": 0.9},
    overflow_at=OVERFLOW_AT,
)
_enter(
    "average_of_halves", "several", "dp2-parameters", "average", "", missing="found, not named", job={"average": 0.9}
)
MUON = {"name": "muon"}
_enter("matrices_by_parts", "DeepSpeed #7807", "dp2", "direction", "", missing="found, not named", job=MUON)
_enter("matrices_by_parts", "DeepSpeed #8437", "tp2", "direction", "", missing="found, not named", job=MUON)
_enter(
    "tall_not_orthogonalised", "DeepSpeed #8441, #8461", "dp2", "direction", "", missing="found, not named", job=MUON
)
_enter(
    "muon_per_micro_batch",
    "DeepSpeed #8443",
    "dp1",
    "gradient",
    "blocks.",
    "made orthogonal in each micro-batch",
    ranks=1,
    job=MUON,
)
_enter(
    "momentum_moves_on_skipped",
    "DeepSpeed #8432",
    "dp2",
    "momentum_buffer after an overflow",
    "blocks.",
    "moved by a step that is none",
    job=MUON,
    overflow_at=OVERFLOW_AT,
)
_enter(
    "moments_move_on_skipped",
    "several",
    "dp2",
    "direction_sq after an overflow",
    "blocks.",
    "moved by a step that is none",
    job=MUON | {"muon": {"row_beta2": 0.9}},
    overflow_at=OVERFLOW_AT,
)
_enter(
    "heads_not_split",
    "xtuner #2030, miles #3096",
    "dp2",
    "direction",
    "query.weight, rows ",
    missing="found, not named",
    job=MUON | {"family": "per_head"},
)
_enter("matrices_decay_twice", "Neuron_SP #13", "dp2", "weight", "blocks.", "weight decay twice", job=MUON)
_enter(
    "betas_of_the_first_group",
    "Paddle #63616, DeepSpeed #8440",
    "dp2",
    "exp_avg",
    "embedding.weight",
    missing="found, not named",
    job={"groups": [{"pattern": "embedding.*", "betas": [0.5, 0.6], "eps": 1e-6}]},
)
_enter(
    "momentum_one_update_early",
    "mmcv #1626",
    "dp2",
    "weight",
    "",
    missing="found, not named",
    job={"name": "nag", "schedules": {"momentum": {"start": 0.5, "warmup_steps": 2}}},
)
MIXTURE = {"model": {"experts": EXPERTS}}
_enter(
    "expert_gradients_larger",
    "DeepSpeed #6545, pytorch #160285",
    "dp2",
    "gradient",
    "blocks.1.feed_forward.down.weight[",
    "1.1 times the right one",
    job=MIXTURE,
)
_enter(
    "router_in_half",
    "torchtitan #2389, prime-rl #2952",
    "dp2",
    "scores",
    "router on rank 0",
    missing="found, not named",
    job=MIXTURE,
)
_enter(
    "biased_weights",
    "transformers #39581",
    "dp2",
    "gradient",
    "blocks.1.feed_forward.down.weight[",
    missing="no kind gives these numbers",
    job=MIXTURE,
)
_enter(
    "counted_in_recompute",
    "torchtitan #1593",
    "dp2",
    "counts",
    "router.balance on rank 0",
    missing="found, not named",
    job={"model": {"experts": EXPERTS, "recompute": "full"}},
)
_enter(
    "bias_of_own_counts",
    "TransformerEngine #3471",
    "dp2",
    "tally",
    "router.balance.value on rank",
    missing="found, not named",
    job=MIXTURE,
)
