"""`megamix.audit` says in which dtype every number of a step is kept, counts losses to within one percentage point,
names planted mistakes, is silent on a right step, and changes no bit of the training.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import megamix
from megamix.mixed_precision.optim.muon import MOMENTUM
from megamix.tools.audit.report import WIDTH
from megamix.tools.audit.watch import zeros_among_subnormals
from tests.conftest import FULL
from tests.tools.audit.loops import (
    ALONE,
    BF16,
    FP16,
    FP32,
    TOGETHER,
    Loop,
    adamw,
    engine,
    fsdp,
    local,
    new_model,
    plain,
    same_with_and_without,
    scaled,
)

TINY_LR = 6e-6
QUICK = ("ddp, fp16 on the wire, zero", "fsdp2 bf16, fp32 sums", "engine, gradients", "engine, muon, parameters")


def after(loop, steps):
    """Return the report of a loop's last step."""
    for number in range(steps - 1):
        loop.step(number)
    return loop.audited(steps - 1)


def said(report, harms=True):
    return "\n".join(str(one) for one in report.warnings if one.harms == harms)


def row_of(report, name):
    (row,) = (row for row in report.rows if row.name == name)
    return row


def dtypes(report, name):
    """Return the cells of the row with this parameter."""
    (row,) = (row for row in report.rows if name in row.parameters)
    return " ".join(row.dtypes.values())


# storage, compute, gradient, wire, sum, master, moments, checkpoint
@pytest.mark.parametrize(
    ("name", "norm", "up"),
    [
        ("fp32", "fp32 fp32 fp32 - fp32 fp32 fp32 fp32", "fp32 fp32 fp32 - fp32 fp32 fp32 fp32"),
        ("autocast bf16", "fp32 fp32 fp32 - fp32 fp32 fp32 fp32", "fp32 bf16 bf16 - fp32 fp32 fp32 fp32"),
        ("autocast fp16, scaler", "fp32 fp32 fp32 - fp32 fp32 fp32 fp32", "fp32 fp16 fp16 - fp32 fp32 fp32 fp32"),
        ("engine bf16", "bf16 bf16 bf16 - bf16 fp32 fp32 fp32", "bf16 bf16 bf16 - bf16 fp32 fp32 fp32"),
        ("engine, frozen", "bf16 bf16 bf16 - bf16 fp32 bf16 fp32", "bf16 bf16 bf16 - bf16 fp32 bf16 fp32"),
        ("bf16", "bf16 bf16 bf16 - bf16 bf16 bf16 bf16", "bf16 bf16 bf16 - bf16 bf16 bf16 bf16"),
    ],
)
def test_every_number_s_dtype_is_told(name, norm, up):
    report = after(ALONE[name](), 3)
    assert dtypes(report, "layers.1.norm.weight") == norm
    assert dtypes(report, "layers.1.up.weight") == up
    assert report.harms == (name == "bf16")


def _cells(name):
    report = after(TOGETHER[name](), 2)
    return dtypes(report, "layers.1.up.weight"), said(report)


@pytest.mark.parametrize(
    ("name", "up"),
    [
        ("ddp, autocast", "fp32 bf16 bf16 fp32 fp32 fp32 fp32 fp32"),
        ("ddp, fp16 on the wire, zero", "fp32 fp32 fp32 fp16 fp16 fp32 fp32 fp32"),
        ("fsdp2 bf16, fp32 sums", "fp32 bf16 bf16 fp32 fp32 fp32 fp32 fp32"),
        ("fsdp2 bf16", "fp32 bf16 bf16 bf16 bf16 fp32 fp32 fp32"),
        ("engine", "bf16 bf16 bf16 bf16 fp32 fp32 fp32 fp32"),
        ("engine, gradients", "bf16 bf16 bf16 bf16 fp32 fp32 fp32 fp32"),
        ("engine, parameters", "bf16 bf16 bf16 bf16 fp32 fp32 fp32 fp32"),
        ("engine, muon, parameters", "bf16 bf16 bf16 bf16 bf16 fp32 fp32 fp32"),
    ],
)
def test_so_is_that_of_what_ranks_send_and_sum(name, up, run_ranks):
    assert run_ranks(_cells, 2, name) == [(up, "")] * 2


@pytest.mark.parametrize("name", list(ALONE) if FULL else ["bf16", "autocast fp16, scaler, fused", "engine fp16"])
def test_a_run_with_audits_is_bitwise_the_run_without(name):
    same, page = same_with_and_without(name)
    assert same
    assert max(map(len, page.split("\nlost: ")[0].splitlines())) <= WIDTH


@pytest.mark.parametrize("name", list(TOGETHER) if FULL else QUICK)
def test_so_it_is_on_ranks_and_each_reports_the_same(name, run_ranks):
    (same, page), (also, other) = run_ranks(same_with_and_without, 2, name)
    assert same
    assert also
    assert page == other


def _audit_and_count(loop):
    """Return an audit, and for each parameter the number of elements with an update, and how many of these kept their
    value. An element has an update if AdamW's, from the states after it, in FP64, is not zero.
    """
    for number in range(3):
        loop.step(number)
    before = {name: local(param).clone() for name, param in loop.model.named_parameters()}
    report, counts, group = loop.audited(3), {}, loop.optimizer.param_groups[0]
    beta1, beta2 = group["betas"]
    for name, param in loop.model.named_parameters():
        state = {key: local(value).double() for key, value in loop.optimizer.state[param].items()}
        step, old = float(state["step"]), before[name].double()
        denominator = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt() + group["eps"]
        update = group["lr"] * (state["exp_avg"] / (1 - beta1**step) / denominator + group["weight_decay"] * old)
        counts[name] = (int((update != 0).sum()), int(((update != 0) & (local(param) == before[name])).sum()))
    return report, counts


def require_close(reports, counts):
    for row in reports[0].rows:
        parts = [rank[name] for rank in counts for name in row.parameters]
        due, lost = (sum(column) for column in zip(*parts, strict=True))
        assert row.lost == pytest.approx(lost / due, abs=0.01)


def test_lost_updates_are_counted_within_a_point_and_the_missing_masters_named():
    model = new_model(BF16)
    report, exact = _audit_and_count(Loop(model, adamw(model, TINY_LR)))
    require_close([report], [exact])
    (first, *_) = report.warnings
    assert first.harms
    assert "no FP32 master; " in first.what
    assert f"of this step's updates round to nothing at lr {TINY_LR}" in first.what
    assert "autocast" in first.fix
    told = json.loads(report.to_json())
    assert [row["name"] for row in told["rows"]] == [row.name for row in report.rows]
    assert told["rows"][0]["moments"] == {"exp_avg": "bf16", "exp_avg_sq": "bf16"}
    assert told["warnings"][0]["harms"]
    assert row_of(report, "layers.*.up.weight").lost > 0.5


def _sharded_without_masters():
    return _audit_and_count(fsdp(MixedPrecisionPolicy(reduce_dtype=FP32), BF16, TINY_LR))


def test_so_are_those_of_a_sharded_model(run_ranks):
    reports, counts = zip(*run_ranks(_sharded_without_masters, 2), strict=True)
    require_close([*reports], [*counts])
    assert "no FP32 master; 100% of this step's updates" in said(reports[0])
    assert dtypes(reports[0], "layers.0.up.weight") == "bf16 bf16 bf16 fp32 fp32 bf16 bf16 bf16"


class CopiedMasters(torch.optim.AdamW):
    """Optimizer of FP32 copies of half parameters. `saves`: whether its state dict has them."""

    def __init__(self, model, saves):
        self.saves = saves
        self.masters = [half.detach().float().requires_grad_() for half in model.parameters()]
        super().__init__(self.masters, lr=1e-3)

    def state_dict(self):
        return super().state_dict() | ({"masters": self.masters} if self.saves else {})


class CopyLoop(Loop):
    def update(self):
        copies = [*zip(self.model.parameters(), self.optimizer.masters, strict=True)]
        for half, master in copies:
            master.grad, half.grad = half.grad.float(), None
        self.optimizer.step()
        for half, master in copies:
            half.data.copy_(master.data)


@pytest.mark.parametrize("saves", [True, False])
def test_separate_masters_are_found_in_any_order_and_those_that_no_checkpoint_has(saves):
    model = new_model(BF16)
    optimizer = CopiedMasters(model, saves)
    if saves:
        optimizer.param_groups[0]["params"].reverse()
    report = after(CopyLoop(model, optimizer), 2)
    assert dtypes(report, "layers.0.up.weight") == "bf16 bf16 bf16 - fp32 fp32 fp32 bf16"
    assert ("no state dict has the FP32 masters" in said(report)) != saves
    assert report.harms != saves


def test_masters_that_were_rebuilt_from_half_are_found():
    model = new_model(BF16).float()  # no mistake to begin with
    loop = Loop(model, adamw(model))
    assert not after(loop, 1).harms
    assert not after(loop, 5).harms
    with torch.no_grad():
        for param in loop.model.parameters():
            param.copy_(param.bfloat16())
    assert "rebuilt from a half copy" in said(loop.audited(5))
    assert not loop.audited(6).harms  # the next update has filled them again


def test_second_moments_that_bf16_cannot_move_are_found():
    model = new_model()
    loop = Loop(model, adamw(model))
    loop.step(0)
    for state in loop.optimizer.state.values():
        state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16()
    loop.optimizer.param_groups[0]["foreach"] = False
    assert "moments in fp32/bf16; " in said(loop.audited(1))


@pytest.mark.parametrize(("rest", "odd"), [(FP32, BF16), (BF16, FP32)])
def test_one_module_in_another_dtype_is_named(rest, odd):
    model = new_model(rest)
    up = model.layers[1].up.to(odd)
    up.register_forward_pre_hook(lambda module, inputs: inputs[0].to(odd))
    up.register_forward_hook(lambda module, inputs, output: output.to(rest))
    report = after(Loop(model, adamw(model)), 2)
    names = [one.where for one in report.warnings if "others like it" in one.what]
    assert names == ["layers.1.up.weight", "layers.1.up.bias"]
    assert [row.name for row in report.rows if "up.weight" in row.name] == [
        "layers.*.up.weight (2 of 3)", "layers.1.up.weight",
    ]  # fmt: skip


def test_what_the_optimizer_does_not_hold_and_what_got_no_gradient_is_named():
    model = new_model()
    model.unused = nn.Linear(4, 4)
    names = [param for name, param in model.named_parameters() if name != "head.bias"]
    report = after(Loop(model, torch.optim.SGD(names, lr=0.1)), 1)
    assert said(report).startswith("head.bias: requires a gradient, and the optimizer does not hold it")
    assert "unused.weight, unused.bias: its gradient is zero, or did not come" in said(report, harms=False)


def test_gradients_that_underflow_are_counted():
    loop = plain(amp=FP16)
    assert "underflow" not in said(loop.audited(0))
    loop.model.head.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 2.0**-16,))
    report = loop.audited(1)
    row = row_of(report, "layers.*.up.weight")
    assert not row.zeroed_is_exact
    assert row.zeroed > 0.05
    assert "of the gradient's elements underflow" in said(report)


def test_the_estimate_counts_what_a_cast_has_flushed_and_no_other_zero():
    exact = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    exact[3], exact[:, 5] = 0.0, 0.0  # a token that did not occur, a unit that was off
    for power in (0, 12, 20, 24):
        half = (exact * 2.0**-power).half()
        flushed = int(((exact != 0) & (half == 0)).sum())
        assert zeros_among_subnormals(half, FP16) == flushed
        assert zeros_among_subnormals(half.float(), FP16) == flushed
    assert flushed > 1000
    assert zeros_among_subnormals(torch.eye(8), FP16) == 0


def test_what_a_cast_flushes_is_counted_exactly():
    # Half weights that are computed with in FP32, so that backward ends with a cast.
    model = nn.ParameterDict({"gain": torch.ones(64, 32, dtype=FP16)})
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)) * 2.0**-25
    x[0] = 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with megamix.audit(model, optimizer) as report:
        (x * model["gain"].float()).sum().backward()
        optimizer.step()
    (row,) = report.rows
    assert row.zeroed_is_exact
    assert row.zeroed == int(((x != 0) & (x.half() == 0)).sum()) / x.numel()
    assert dtypes(report, "gain") == "fp16 fp32 fp32 - fp16 fp16 - fp16"


def test_a_step_that_the_scaler_skips_is_told_and_harms_nothing():
    report = scaled(init_scale=2.0**30).audited(0)
    assert not report.harms
    assert "this step was skipped" in said(report, harms=False)
    assert report.loss_scale == 2.0**30
    assert report.rows[0].lost is None


@pytest.mark.parametrize("loop", [plain, scaled])
def test_a_loss_that_is_not_finite_is_wrong_whether_the_step_is_skipped_or_not(loop):
    poisoned = loop()
    torch.nn.init.constant_(poisoned.model.head.weight, torch.nan)
    report = poisoned.audited(0)
    assert "the loss: is NaN or infinite, first at this step" in said(report)
    assert "is zero, or did not come" not in said(report, harms=False)


def test_headroom_follows_the_loss_scale():
    rooms = []
    for power in (10, 13):
        report = scaled(init_scale=2.0**power).audited(0)
        rooms.append(row_of(report, "head.weight").headroom)
        assert report.loss_scale == 2.0**power
    assert rooms[0] - rooms[1] == pytest.approx(3, abs=0.1)


def test_no_step_in_the_block_and_two_are_errors_with_what_to_do():
    loop = plain()
    loop.optimizer.step = lambda: None
    with pytest.raises(RuntimeError, match=r"no step was made inside the block: call optimizer.step\(\) there"):
        loop.audited(0)
    assert not loop.model.head.weight._backward_hooks
    assert not loop.optimizer._optimizer_step_pre_hooks
    loop = engine(megamix.Precision(BF16))
    step = loop.step
    loop.step = lambda number: (step(number), step(number + 1))
    with pytest.raises(RuntimeError, match=r"made 2 updates inside the block; take one step"):
        loop.audited(0)


def test_an_error_of_the_loop_passes_and_what_is_no_optimizer_is_refused():
    loop = plain()
    with pytest.raises(ZeroDivisionError), megamix.audit(loop.model, loop.optimizer):
        raise ZeroDivisionError
    for model, optimizer, told in (
        (loop.model, {}, r"takes a torch.optim.Optimizer or a megamix.ShardedEngine, got dict"),
        (loop.optimizer, loop.model, r"got a model of type AdamW; write megamix.audit\(model, optimizer\)"),
    ):
        with pytest.raises(TypeError, match=told), megamix.audit(model, optimizer):
            pass


@pytest.mark.parametrize("name", ["optimizer", "_optimizer", "base_optimizer"])
def test_an_optimizer_in_a_wrapper_such_as_accelerate_s_is_read(name):
    loop = plain(BF16)
    inner = loop.optimizer
    loop.optimizer = SimpleNamespace(step=inner.step, zero_grad=inner.zero_grad, **{name: inner})
    assert "no FP32 master" in said(after(loop, 2))


class _StackedMuon(torch.optim.Optimizer):
    """Momentum of its matrices as others keep it: stacked under the first one, in the group, or flattened."""

    def __init__(self, params, keep):
        super().__init__(params, {"lr": 1e-2})
        self.keep = keep

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = group["params"]
            stacked = torch.stack([param.grad for param in params]).bfloat16()
            if self.keep == "stacked":
                self.state[params[0]]["momentum_buffer"] = stacked
            elif self.keep == "group":
                group["momentum_buffer"] = stacked
            for param, grad in zip(params, stacked, strict=True):
                if self.keep == "flat":
                    self.state[param]["momentum_buffer"] = grad.view(-1)
                param -= group["lr"] * grad


@pytest.mark.parametrize("keep", ["stacked", "group", "flat"])
def test_momentum_that_is_kept_in_another_shape_is_each_parameters_own(keep):
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(3)))
    optimizer = _StackedMuon(model.parameters(), keep)
    for _ in range(2):  # the second update has the momentum before the step as well
        with megamix.audit(model, optimizer) as report:
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert [(row.moments, row.dtypes["moments"]) for row in report.rows] == [({"momentum_buffer": "bf16"}, "bf16")]


def test_of_muon_s_matrices_a_direction_is_what_moves_them():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.LayerNorm(2)).requires_grad_()
    optimizer = megamix.Muon(lr=1e-12, weight_decay=0.0, ns_dtype=FP32)
    trained = megamix.ShardedEngine(model, optimizer, megamix.Precision(FP32), compile_update=False)
    with megamix.audit(model, trained) as report:
        model.zero_grad()
        out = model[0](torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
        trained.backward(out.diagonal().sum() + 0 * model(out).sum())  # one of four elements has no gradient
        trained.step()
    weight, *norm = report.rows
    assert (weight.direction, weight.moments, {row.direction for row in norm}) == ("fp32", {MOMENTUM: "fp32"}, {"-"})
    assert (weight.counts["due"], weight.lost) == (4, 1.0)
    assert "\ndirect: " in str(report)
    assert "\ndirect: " not in str(after(ALONE["engine bf16"](), 1))


def test_within_the_block_nothing_is_called_right():
    loop = plain()
    with megamix.audit(loop.model, loop.optimizer) as report:
        loop.step(0)
        assert str(report).startswith("audit: nothing is known before the step is over; read the report after the")
        with pytest.raises(RuntimeError, match="nothing is known"):
            print(report.harms)
    assert str(report).endswith("no number is lost that should be kept")
    assert not report.harms


def test_an_engine_s_rebuilt_masters_are_found_and_its_skipped_step_told():
    loop = ALONE["engine fp16"]()
    loop.optimizer.loss_scale.loss_scale.fill_(2.0**40)
    assert "this step was skipped" in said(loop.audited(0), harms=False)
    loop.optimizer.loss_scale.loss_scale.fill_(2.0**10)
    assert not after(loop, 5).harms
    for owned in loop.optimizer.owned_ranges():
        owned.tensors["master"].copy_(owned.tensors["master"].half())
    assert "rebuilt from a half copy" in said(loop.audited(6))


def test_compiled_code_runs_compiled_and_its_cells_say_so():
    ran = []

    def backend(graph, inputs):
        def run(*args):
            ran.append("compiled")
            with torch.utils._python_dispatch._disable_current_modes():  # a kernel does so
                return graph.forward(*args)

        return run

    model = new_model()
    for layer in model.layers:
        layer.compile(backend=backend)
    loop = Loop(model, adamw(model))
    loop.step(0)
    calls = len(ran)
    report = loop.audited(1)
    assert len(ran) == 2 * calls
    assert "compute ? the operations inside torch.compile are not observed (6 row(s))" in str(report)
    assert "gradient ? the casts inside torch.compile are not observed (6 row(s))" in str(report)
    assert not report.harms


class _WithToken(nn.Module):
    """A model with a token in front, as vision transformers have it."""

    def __init__(self):
        super().__init__()
        self.token, self.head = nn.Parameter(torch.ones(1, 1, 8)), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(torch.cat([self.token.expand(len(x), -1, -1), x], 1))


def test_of_a_parameter_that_is_only_moved_no_cause_is_told_that_nobody_saw():
    model = _WithToken()
    optimizer = adamw(model)
    with megamix.audit(model, optimizer) as report:
        model(torch.randn(2, 3, 8)).square().mean().backward()
        optimizer.step()
    assert dtypes(report, "token").startswith("fp32 ? it is only moved")
    assert dtypes(report, "token").endswith("the copy is not observed fp32 - fp32 fp32 fp32 fp32")
    assert "torch.compile" not in str(report)
    assert report.warnings == []


def test_of_a_step_that_moves_nothing_the_last_line_says_so():
    for loop in (scaled(init_scale=2.0**30), Loop(model := new_model(), adamw(model, lr=0.0))):
        report = loop.audited(0)
        assert not report.harms
        assert str(report).splitlines()[-1].startswith("not judged: ")
