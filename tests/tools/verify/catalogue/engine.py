"""Bugs in our own engine: tests/tools/verify/engine_bugs.py plants them. Those that nobody met are not in the table."""

from tests.conftest import FULL
from tests.tools.verify import engine_bugs
from tests.tools.verify.catalogue.bugs import BUGS, enter
from tests.tools.verify.jobs import EXPERTS, OVERFLOW_AT

STALE = "the check says it: a copy that is stale"
OWN = "each rank's own: the others' parts are missing"
ONE_RANK = "that of the shards of rank 0 alone"
NO_STEP = {"kind": "moved by a step that is none", "attempt": OVERFLOW_AT}
MUON = {"name": "muon"}
MIXTURE = {"model": {"experts": EXPERTS}}
WEIGHT, BALANCE = "blocks.1.feed_forward.down.weight[", "blocks.1.feed_forward.router.balance"


def _bug(bug, met_in, layout, check, where="", kind="", ranks=2, attempt=0, **other):
    doc, missing = getattr(engine_bugs, bug).__doc__, "" if kind else "found, not named"
    answer = {"met_in": met_in, "check": check, "where": where, "kind": kind, "missing": missing} | other
    enter(f"{bug} {len(BUGS)}", doc, layout=layout, ranks=ranks, attempt=attempt, **answer)


_bug("gradients_not_reduced", "NeMo-RL #3716, Megatron #1446", "tp2sp", "gradient", "norm.weight", OWN)
_bug("positions_of_one_rank", "Megatron #1446", "tp2sp", "gradient", "norm.weight", OWN)
_bug("gradients_not_reduced", "several", "dp2", "gradient", "", OWN)
_bug("norm_counted_per_rank", "Megatron #5916", "tp2", "norm", "all gradients", "times the root of 2")
_bug("norm_counts_replicated", "Megatron #7452", "tp2", "norm", "all", "it counts twice what tensor-parallel")
MET = "transformers #25681, DeepSpeed #5812"
_bug("tables_in_half", MET, "dp2", "buffer", "rotary.cos", "rounded to FP16", attempt=-1)
_bug("wrong_divisor", "DeepSpeed #8154", "pp2", "gradient", "", "divided by the number of micro-batches twice")
_bug("scale_applied_twice", "several", "dp2", "gradient", "", "the loss scale left in")
_bug("stale_gather", "Megatron #950, #663", "dp2", "half copy", missing=STALE)
_bug("unit_freed_early", "pytorch #194519", "dp2-parameters", "gradient", "blocks.", "lost: nothing but zeros")
_bug("stale_shards", "Megatron #950, #663", "dp2-parameters", "half copy", missing=STALE)
_bug("gradients_freed_early", "DeepSpeed #7965, #5545", "dp2-gradients", "gradient", "", "rank 1's part is missing")
_bug(
    "tied_table_not_summed", "several", "pp2", "copies (gradient of rank 1 differs", "embedding.weight",
    missing="the check says it: two copies differ",
)  # fmt: skip
AVERAGE = {"average": 0.9}
_bug("average_moves_on_skipped", "several", "dp2", "average after an overflow", job=AVERAGE, **NO_STEP)
_bug("average_of_halves", "several", "dp2-parameters", "average", job=AVERAGE)

_bug("matrices_by_parts", "DeepSpeed #7807", "dp2", "direction", job=MUON)
_bug("matrices_by_parts", "DeepSpeed #8437", "tp2", "direction", job=MUON)
_bug("tall_not_orthogonalised", "DeepSpeed #8441, #8461", "dp2", "direction", job=MUON)
EACH = "made orthogonal in each micro-batch"
_bug("muon_per_micro_batch", "DeepSpeed #8443", "dp1", "gradient", "blocks.", EACH, ranks=1, job=MUON)
MOMENTUM, ROWS = "momentum_buffer after an overflow", "direction_sq after an overflow"
_bug("momentum_moves_on_skipped", "DeepSpeed #8432", "dp2", MOMENTUM, "blocks.", job=MUON, **NO_STEP)
OF_ROWS = MUON | {"muon": {"row_beta2": 0.9}}
_bug("moments_move_on_skipped", "several", "dp2", ROWS, "blocks.", job=OF_ROWS, **NO_STEP)
PER_HEAD = MUON | {"family": "per_head"}
_bug("heads_not_split", "xtuner #2030, miles #3096", "dp2", "direction", "query.weight, rows ", job=PER_HEAD)
_bug("matrices_decay_twice", "Neuron_SP #13", "dp2", "weight", "blocks.", "weight decay twice", job=MUON)

BETAS = {"groups": [{"pattern": "embedding.*", "betas": [0.5, 0.6], "eps": 1e-6}]}
MET = "Paddle #63616, DeepSpeed #8440"
_bug("betas_of_the_first_group", MET, "dp2", "exp_avg", "embedding.weight", job=BETAS)
SCHEDULES = {"momentum": {"start": 0.5, "warmup_steps": 2}, "weight_decay": {"end": 0.0}}
SCHEDULED = {"name": "nag", "schedules": SCHEDULES}
_bug("momentum_one_update_early", "mmcv #1626", "dp2", "weight", job=SCHEDULED)

MET = "DeepSpeed #6545, pytorch #160285"
_bug("expert_gradients_larger", MET, "dp2", "gradient", WEIGHT, "1.1 times the right one", job=MIXTURE)
AT_ROUTER = {"where": "blocks.1.feed_forward.router on rank 0", "job": MIXTURE}
_bug("router_in_half", "torchtitan #2389, prime-rl #2952", "dp2", "scores", **AT_ROUTER)
NO_KIND = "no kind gives these numbers"
_bug("biased_weights", "transformers #39581", "dp2", "gradient", WEIGHT, job=MIXTURE, missing=NO_KIND)
RECOMPUTED = {"model": {"experts": EXPERTS, "recompute": "full"}}
ON_0 = f"{BALANCE} on rank 0"
_bug("counted_in_recompute", "torchtitan #1593", "dp2", "counts", ON_0, job=RECOMPUTED)
MET = "TransformerEngine #3471"
_bug("bias_of_own_counts", MET, "dp2", "tally", f"{BALANCE}.value on rank", job=MIXTURE)

for layout in ("dp2", "pp2"):
    _bug("norm_counted_per_rank", "", layout, "norm", "all gradients", "times the root of 2")
    _bug("norm_of_one_rank", "", layout, "norm", "all gradients", ONE_RANK)
_bug("norm_leaves_out", "", "dp2", "norm", "all gradients", "it leaves out embedding.weight")
for layout in ("dp2", "tp2"):
    _bug("wrong_divisor", "", layout, "gradient", "", "divided by the number of micro-batches twice")
for layout in ("tp2", "pp2"):
    _bug("scale_applied_twice", "", layout, "gradient", "", "the loss scale left in")
_bug("loss_counted_per_part", "", "cp2", "gradient", "", "2 times the right one")
_bug("weight_counted_per_part", "", "cp2", "loss")
FLAG = "overflow flag"
_bug("scale_applied_twice", "", "dp2", FLAG, "one rank, which has none", job={"loss_scale": 2.0**10})
_bug("stale_gather", "", "tp2", "half copy")
_bug("gradients_freed_early", "", "dp2-parameters", "gradient", "", OWN)
_bug("table_moves_on_skipped", "", "tp2", "buffer", "rotary.cos on rank 1", attempt=OVERFLOW_AT)

LATE = {"keys": {"lr_schedule": {"warmup_steps": 4}}}
WANT = "where the schedule has 0.005 for update 2"
_bug("schedule_one_update_late", "", "dp1", "lr", "", WANT, attempt=None, ranks=1, job=LATE)
for form in ("gradient", "velocity"):
    coupled, decoupled = (
        {"name": "nag", "nag": {"momentum": 0.9, "momentum_form": form, "decoupled_weight_decay": rule}}
        for rule in (False, True)
    )
    TAKEN, ADDED = "weight decay taken from the weights, not added", "weight decay added to the gradient, not to the"
    _bug("decay_by_the_other_rule", "", "dp2", "weight", "", TAKEN, job=coupled)
    _bug("decay_by_the_other_rule", "", "dp2", "weight", "", ADDED, job=decoupled)
PLAIN = {"name": "nag", "nag": {"momentum": 0.0}}
_bug("decay_on_all", "", "dp2", "weight", "norm.weight", job=PLAIN)
NORMS = {"groups": [{"pattern": "*norm.weight", "weight_decay": 0.3}]}
_bug("decay_on_all", "", "tp2", "weight", "norm.weight", job=NORMS)
FROZEN = {"groups": [{"pattern": "embedding.*", "lr_factor": 0.0}]}
_bug("frozen_moves", "", "dp2", "weight", "embedding.weight", "moved, though its group is frozen", job=FROZEN)
_bug("recomputed_elsewhere", "", "tp2", "gradient", "blocks.", job={"model": {"recompute": "full"}})
PACKED = {"packing": "documents", "model": {"recompute": "selective"}}
_bug("documents_seen_across", "", "dp2", "gradient", job=PACKED)
if FULL:  # the compiler takes a minute
    _bug("wrong_divisor", "", "dp2", "gradient", "", "0.5 times the", job={"model": {"compile": True}})

_bug("expert_gradients_over_ep", "", "dp2ep2", "gradient", WEIGHT, "0.5 times the right one", job=MIXTURE)
_bug("rows_of_the_other_rank", "", "dp2ep2", "gradient", "norm.weight", job=MIXTURE)
_bug("rows_not_regrouped", "", "dp2ep2", "gradient", "norm.weight", job=MIXTURE)
_bug("experts_permuted", "", "dp2", "gradient", "norm.weight", "that of stacks turned by 1", job=MIXTURE)
for bug in ("worst_experts_chosen", "choice_by_rounded_scores"):
    _bug(bug, "", "dp2", "choice of experts", "router on rank", "not by its own scores", job=MIXTURE)
_bug("bias_moves_on_skipped", "", "dp2", "tally", f"{BALANCE}.value on rank 0", job=MIXTURE, **NO_STEP)
_bug("experts_not_reduced", "", "dp4ep2", "gradient", WEIGHT, ranks=4, job=MIXTURE)
