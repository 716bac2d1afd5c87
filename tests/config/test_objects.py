"""Every setting reaches the object it is for."""

import inspect

import pytest
import torch

from megamix import NAG, AdamW, Muon, ParamGroup
from megamix.config import PrecisionConfig
from megamix.mixed_precision.optim import schedules
from megamix.model.layers import Embedding
from megamix.model.transformer import Transformer
from megamix.plugins import LOSS_SCALES
from megamix.train.engine import build_training
from megamix.train.objects import build_loss_scale, build_optimizer, build_precision
from tests.builders import lrs_of, tiny_job


@pytest.mark.parametrize(
    ("section", "rule"),
    [
        ({"dtype": "fp16"}, "dynamic"),
        ({"dtype": "bf16"}, None),
        ({"dtype": "bf16", "loss_scale": {"rule": "dynamic"}}, "dynamic"),
        ({"dtype": "bf16", "loss_scale": {"rule": "off"}}, None),
        ({"dtype": "fp16", "loss_scale": {"rule": "static", "init_scale": 1024.0}}, "static"),
    ],
)
def test_the_loss_scale_of_a_precision_section(section, rule):
    scale = build_loss_scale(PrecisionConfig(**section))
    assert scale is None if rule is None else type(scale) is LOSS_SCALES.registered[rule]


SETTINGS = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 7, "hysteresis": 3}
SETTINGS |= {"consecutive_hysteresis": True, "margin": 8.0, "min_scale": 2.0, "max_scale": 2.0**20}


RULES = [rule for rule in LOSS_SCALES.registered if rule != "static"]


@pytest.mark.parametrize("kind", RULES)
def test_every_setting_of_a_loss_scale_arrives(kind):
    keys = LOSS_SCALES.sections[kind].model_fields.keys() - {"rule", "init_scale"}
    reads = inspect.signature(LOSS_SCALES.registered[kind]).parameters.keys() - {"init_scale", "window"}
    assert reads == keys  # headroom's window is no key
    given = {name: SETTINGS[name] for name in keys}
    scale = build_loss_scale(PrecisionConfig(loss_scale={"rule": kind, "init_scale": 2.0**10, **given}))
    assert (type(scale), float(scale.loss_scale)) == (LOSS_SCALES.registered[kind], 2.0**10)
    assert {name: getattr(scale, name) for name in reads} == {name: SETTINGS[name] for name in reads}


@pytest.mark.parametrize("kind", RULES)
def test_a_loss_scale_without_settings_is_as_the_engine_s_own(kind):
    built, own = build_loss_scale(PrecisionConfig(loss_scale={"rule": kind})), LOSS_SCALES.registered[kind]()
    plain = {name: value for name, value in vars(own).items() if not isinstance(value, torch.Tensor)}
    assert {name: getattr(built, name) for name in plain} == plain
    assert torch.equal(built.loss_scale, own.loss_scale)


def test_every_setting_of_the_optimizers_arrives(tmp_path):
    group = {"pattern": "*.bias", "lr_factor": 2.0, "weight_decay": 0.5}
    own = {"pattern": "*.bias", "momentum": 0.5}

    def built(group, **table):
        return build_optimizer(tiny_job(tmp_path, optimizer={"weight_decay": 0.2, "groups": [group]} | table))

    def wanted(kind, group, **settings):
        lr = lrs_of(tiny_job(tmp_path))
        return kind(lr=lr, weight_decay=0.2, groups=(ParamGroup(**group),), **settings)

    adamw = {"betas": (0.8, 0.9), "eps": 1e-6}
    assert built(group, adamw=adamw) == wanted(AdamW, group, **adamw)
    forms = {"momentum": 0.7, "momentum_form": "velocity", "decoupled_weight_decay": True}
    for settings, groups in ((forms, group), ({"nesterov": False}, own)):
        assert built(groups, name="nag", nag=settings) == wanted(NAG, groups, **settings)
    muon = adamw | {
        "momentum": 0.9, "nesterov": False, "ns_steps": 6, "ns_coefficients": (3.0, -3.2, 1.2), "adjust_lr": "original",
        "adamw_lr_factor": 0.5, "matrix": ("a",), "adamw": ("b",),
    }  # fmt: skip
    dtypes = {"ns_dtype": torch.float32, "state_dtype": torch.bfloat16}
    assert built(group, name="muon", muon=muon | {"ns_dtype": "fp32", "state_dtype": "bf16"}) == wanted(
        Muon, group, tables=Transformer.tables, **muon, **dtypes
    )


def test_schedules_of_a_job_are_a_programs(tmp_path):
    by_name = {"weight_decay": {"end": 0.0}, "momentum": {"start": 0.85, "warmup_steps": 2}, "beta2": {"end": 0.9}}
    groups = [{"pattern": "*.up.*", "weight_decay": 0.4}, {"pattern": "head.*", "weight_decay": 0.0}, {"pattern": "*"}]
    keys = {"name": "muon", "weight_decay": 0.2, "schedules": by_name, "groups": groups}
    optimizer = build_optimizer(tiny_job(tmp_path, optimizer=keys, steps=4))
    assert isinstance(optimizer, Muon)
    assert optimizer.weight_decay == pytest.approx((0.2, 0.15, 0.1, 0.05))
    tall, head, others = (group.weight_decay for group in optimizer.groups)
    assert tall == pytest.approx((0.4, 0.3, 0.2, 0.1))
    assert head == (0.0,) * 4
    assert others is None
    assert optimizer.momentum == pytest.approx((0.85, 0.9, 0.95, 0.95))
    assert optimizer.betas == (0.9, tuple(schedules.setting(0.95, 4, end=0.9)))


class _Salted(Transformer):
    """Family with a table in each block that it has not named."""

    def block(self, config, layer):
        block = super().block(config, layer)
        block.salt = Embedding(8, config.hidden_size, self.ops, std=0.02)
        return block


def test_a_family_s_tables_are_known_by_their_type(tmp_path, monkeypatch):
    """The optimizer itself knows them, without an engine: `plan`, `verify` and the check of a checkpoint ask it."""
    monkeypatch.setattr("megamix.train.objects.family_of", lambda model: _Salted)
    config = tiny_job(tmp_path, optimizer={"name": "muon"})
    optimizer = build_optimizer(config)
    names = [name for name, shape in _Salted.shapes(config.model).items() if optimizer.matrices(name, shape)]
    assert "blocks.1.attention.query.weight" in names
    assert not any("salt" in name for name in names)


def test_every_setting_of_the_precision_arrives(tmp_path):
    keys = {"reduce_dtype": "half_fp32_sum"}, {"grad_dtype": "fp32"}
    wide, fp32 = (build_precision(tiny_job(tmp_path, precision=one).precision) for one in keys)
    assert (wide.dtype, wide.grad_dtype, wide.reduce_dtype) == (torch.float16, torch.float16, "half_fp32_sum")
    assert (fp32.dtype, fp32.grad_dtype, fp32.reduce_dtype) == (torch.float16, torch.float32, None)
    assert [wide.sum_dtype(dp_size) for dp_size in (1, 2)] == [torch.float16, torch.float32]


@pytest.mark.parametrize(("grad_dtype", "want"), [("half", torch.float16), ("fp32", torch.float32)])
def test_the_engine_gets_its_sections(tmp_path, grad_dtype, want):
    config = tiny_job(
        tmp_path, grad_dtype=grad_dtype, clip_grad=0.5, bucket_size=10_000, overlap=False, global_batch_size=24
    )
    engine = build_training(config, torch.device("cpu")).engine
    assert (engine.plan.precision.dtype, engine.buckets[0].grads.dtype) == (torch.float16, want)
    assert (engine.clip_grad, engine.grad_accum_steps, engine.update_path) == (0.5, 12, "library")
    assert len(engine.plan.layout.buckets) == 3
    assert not engine.plan.sharding.overlap
    assert len(lrs := engine.optimizer.lr_table()) == config.training.steps
    assert lrs[1] == pytest.approx(config.optimizer.lr)
