"""Interface of `megamix verify --trainer` to anybody's training, and facts that it reads from the usual wrappers."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from megamix.tools.ranks import ToldError
from megamix.tools.verify.core.reference import moved
from megamix.tools.verify.core.tape import Dtypes, fsdp_params, plain_name, tensors_in
from megamix.tools.verify.core.verdict import U32, Tensors

IMPLEMENTATIONS = {"foreach", "fused", "capturable", "differentiable"}  # options that change no result


METHODS = ("model", "loss", "batches", "optimizer", "setup", "step")
_NOT_THEIRS = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[3]}{os.sep}", "<frozen ")


class WrongTrainer(ToldError, ValueError):
    """Mistake that a trainer's author must mend before anything can be compared."""


@contextmanager
def loaded_trainer(where: str, rank: int = 0, ranks: int = 1) -> Iterator[ForeignTrainer]:
    """Load a trainer, and show only the author's own lines of an error in its methods, not those of megamix and torch.

    Raises: WrongTrainer instead of that error. An error without any line of the author stays as it is.
    """
    trainer = load_trainer(where, rank, ranks)
    try:
        yield trainer
    except WrongTrainer:
        raise
    except Exception as error:
        frames = [it for it in traceback.extract_tb(error.__traceback__) if not it.filename.startswith(_NOT_THEIRS)]
        if not any(Path(frame.filename).resolve() == Path(type(trainer).__module__) for frame in frames):
            raise
        fix = ""
        if "dtype" in str(error):
            fix = "; verify also calls loss with the model in FP64: cast to a weight's dtype, as x.to(weight.dtype)"
        what = f"{type(trainer).__name__} raised {type(error).__name__}: {error}{fix}"
        raise WrongTrainer(f"{what}\n{''.join(traceback.format_list(frames))}".rstrip()) from error


class ForeignTrainer:
    """Your training as `verify` asks for it: subclass this and write the first six methods.

    The plain model, its loss and its optimizer say what one process would do. `setup` and `step` are your own code. No
    dropout, and no data that is drawn anew: the same call gives the same.
    """

    rank = 0  # rank and ranks are set before `setup`
    ranks = 1
    clip_grad = 0.0  # norm to which your step clips, 0 for none
    master_dtype = torch.float32  # dtype in which the optimizer must keep the weights
    scaler: torch.amp.GradScaler | None = None  # your GradScaler, if you use one

    def model(self) -> nn.Module:
        """Return the model before any wrapping, FP32 on the CPU, with the weights that every run starts from."""
        raise WrongTrainer(f"{type(self).__name__} lacks model(self): return the plain nn.Module")

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss of a micro-batch: a scalar, with gradients."""
        raise WrongTrainer(f"{type(self).__name__} lacks loss(self, model, batch): return the mean loss")

    def batches(self, step: int, rank: int, ranks: int) -> Sequence[Any]:
        """Return the micro-batches of one rank in one step: tensors, or tuples, lists or mappings of tensors."""
        raise WrongTrainer(f"{type(self).__name__} lacks batches(self, step, rank, ranks): return a list")

    def optimizer(self, model: nn.Module) -> Optimizer | Sequence[Optimizer]:
        """Return your optimizer for this module, or all of them.

        It is called with the plain model here, and by your `setup` if you like.
        """
        raise WrongTrainer(f"{type(self).__name__} lacks optimizer(self, model): return a torch optimizer")

    def setup(self, model: nn.Module) -> tuple[nn.Module, Optimizer | Sequence[Optimizer]]:
        """Wrap the model and make its optimizer, as your script does, and keep both. Each rank calls it once."""
        raise WrongTrainer(f"{type(self).__name__} lacks setup(self, model): return (module, optimizer)")

    def step(self, batches: Sequence[Any]) -> Mapping[str, float] | None:
        """Take one training step of these micro-batches, as your script does.

        Return `loss` and `grad_norm` (before clipping), as far as it reports them. Other keys are not read.
        """
        raise WrongTrainer(f"{type(self).__name__} lacks step(self, batches): train on them")

    def scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """Return your schedule for an optimizer, if you have one.

        It is called for each optimizer; one step is one update.
        """
        return None

    def targets(self, batch: Any) -> float:
        """Return the weight of a micro-batch in the mean of a step: its number of targets.

        It must be defined if the numbers differ.
        """
        return 1.0

    def weights(self, module: nn.Module, optimizer: Optimizer) -> Tensors:
        """Return the weights that the optimizer updates, whole, by the plain model's names."""
        return {name: whole(param) for name, param in named_parameters(module)}

    def gradients(self, module: nn.Module, optimizer: Optimizer) -> Tensors:
        """Return the gradients that the optimizer is about to use, whole, unscaled and clipped."""
        by_scale = getattr(optimizer, "grad_scale", None)  # GradScaler leaves unscaling to a fused optimizer
        grads = {name: param.grad for name, param in named_parameters(module) if param.grad is not None}
        return {name: whole(grad) if by_scale is None else whole(grad) / by_scale for name, grad in grads.items()}

    def groups(self, module: nn.Module, optimizer: Optimizer) -> dict[str, Mapping[str, Any]]:
        """Return the optimizer's group of each parameter, by name."""
        of = {param: group for group in optimizer.param_groups for param in group["params"]}
        return {name: of[param] for name, param in named_parameters(module) if param in of}

    def states(self, module: nn.Module, optimizer: Optimizer) -> dict[tuple[str, str], Tensor]:
        """Return the optimizer's states of each parameter, whole, by state and name.

        States that only count are left out.
        """
        inner = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer holds this rank's states in there
        return {
            (state, name): whole(tensor) for name, param in named_parameters(module)
            for state, tensor in inner.state.get(param, {}).items()
            if isinstance(tensor, Tensor) and (tensor.dim() or tensor.shape == param.shape)
        }  # fmt: skip


def load_trainer(where: str, rank: int = 0, ranks: int = 1) -> ForeignTrainer:
    """Return the trainer that FILE.py:CLASS names. Raises: WrongTrainer that says what is missing."""
    file, _, name = where.rpartition(":")
    path = Path(file)
    if not name.isidentifier() or path.suffix != ".py":
        raise WrongTrainer(f"--trainer: got {where}, must be a file and a class in it; write my_trainer.py:MyTrainer")
    if not path.is_file():
        raise WrongTrainer(f"--trainer: got {where}, there is no file {file}; write the path of your trainer's file")
    module_name = str(path.resolve())  # the stem would let a torch.py take torch's place
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    sys.path.insert(0, str(path.parent.resolve()))  # the file's imports lie beside it, as for a script
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise WrongTrainer(f"--trainer: {file} cannot be imported: {traceback.format_exc(limit=-1)}") from error
    trainers = {
        key: made for key, made in vars(module).items()
        if isinstance(made, type) and issubclass(made, ForeignTrainer) and made is not ForeignTrainer
    }  # fmt: skip
    if name not in trainers:
        found = ", ".join(trainers) or "none; subclass megamix.ForeignTrainer"
        raise WrongTrainer(f"--trainer: got {where}, must be a ForeignTrainer in that file, which has {found}")
    trainer = trainers[name]()
    trainer.rank, trainer.ranks = rank, ranks
    return trainer


def check_trainer(trainer: ForeignTrainer) -> None:
    """Ask twice for model, samples and loss: values that are new each time are no reference. Raises: WrongTrainer."""
    who, ranks = type(trainer).__name__, trainer.ranks
    for name in METHODS:
        if not callable(is_now := getattr(trainer, name)):
            raise WrongTrainer(f"{who}.{name} is {is_now!r}, must be a method; write def {name}(self, ...)")
    models: list[Any] = [trainer.model() for _ in range(2)]
    if not isinstance(models[0], nn.Module):
        raise WrongTrainer(f"{who}.model() returned {type(models[0]).__name__}, must be an nn.Module; return it")
    made: list[Any] = [trainer.batches(0, 0, ranks) for _ in range(2)]
    if not isinstance(made[0], Sequence) or not made[0]:
        kind = "nothing" if isinstance(made[0], Sequence) else type(made[0]).__name__
        raise WrongTrainer(f"{who}.batches(0, 0, {ranks}) returned {kind}, must be a list of micro-batches")
    batches = [moved([*one]) for one in made]
    for needed in ("setup", "step"):  # run on the ranks only; an inherited one raises and says what is missing
        if getattr(type(trainer), needed) is getattr(ForeignTrainer, needed):
            getattr(trainer, needed)(models[0])
    optimizers_of(trainer.optimizer(models[0]), f"{who}.optimizer(model)")
    if not alike(*([*model.parameters()] for model in models)):
        raise WrongTrainer(f"{who}.model() returned other weights when called again; write torch.manual_seed(0) first")
    if not alike(*batches):
        seeded = "draw them with torch.Generator().manual_seed(1000 * step + rank)"
        raise WrongTrainer(f"{who}.batches(0, 0, {ranks}) returned other samples when called again; {seeded}")
    if type(trainer).targets is ForeignTrainer.targets:
        each = [batch for rank in range(ranks) for batch in trainer.batches(0, rank, ranks)]
        numbers = {_targets_in(moved(batch)) for batch in each}
        if len(numbers) > 1:
            raise WrongTrainer(
                f"{who}: micro-batches of step 0 have {min(numbers)} to {max(numbers)} targets, and {who}.targets is "
                "not defined; write def targets(self, batch) that returns their number, or 1 for each if your loss is "
                "meant to be the mean of the micro-batches' means"
            )
    losses: list[Any] = [trainer.loss(model, batches[0][0]) for model in models]
    if not isinstance(losses[0], Tensor) or losses[0].numel() != 1:
        kind = f"a Tensor {tuple(losses[0].shape)}" if isinstance(losses[0], Tensor) else type(losses[0]).__name__
        raise WrongTrainer(f"{who}.loss(model, batch) returned {kind}, must be the mean loss, a Tensor of one number")
    one, other = (float(loss.detach()) for loss in losses)
    if abs(one - other) > 64 * U32 * abs(one):
        changed = f"{who}.loss(model, batch) returned {one:.7g}, then {other:.7g} for the same weights and samples"
        raise WrongTrainer(f"{changed}; set dropout to 0 in model(), and draw nothing in loss()")


def optimizers_of(made: Any, where: str) -> list[Optimizer]:
    """Return one optimizer or several as a list. Raises: WrongTrainer for an object that is no optimizer."""
    listed = made if isinstance(made, list | tuple) else [made]
    optimizers: list[Any] = [getattr(one, "optimizer", one) for one in listed]  # accelerate's wrapper has no hooks
    for one in optimizers:
        if not isinstance(one, Optimizer):
            raise WrongTrainer(
                f"{where} returned an optimizer of type {type(one).__name__}, must be a torch.optim.Optimizer or a "
                "list of them; return the one that it wraps, or make your class a subclass"
            )
    return optimizers


def options_of(group: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a parameter's group: lr, weight_decay, betas[0] and so on, without IMPLEMENTATIONS."""
    options = dict[str, float]()
    for key, value in group.items():
        if isinstance(value, tuple):
            options |= {f"{key}[{at}]": float(one) for at, one in enumerate(value) if one is not None}
        elif key not in IMPLEMENTATIONS and isinstance(value, int | float | Tensor):
            options[key] = float(value)
    return options


def _targets_in(batch: Any) -> int:
    """Return how many targets a micro-batch seems to have.

    They are taken to be the last tensor of whole numbers, without the -100 that torch's losses ignore; without such a
    tensor, each sample is one target.
    """
    tensors = [*tensors_in(batch)]
    whole_numbers = [one for one in tensors if not one.is_floating_point()]
    if whole_numbers:
        return int((whole_numbers[-1] != -100).sum())
    return len(tensors[-1]) if tensors and tensors[-1].dim() else 1


def alike(one: Any, other: Any) -> bool:
    """Return whether the tensors of two trees are equal; a NaN equals another one."""
    mine, theirs = ([*tensors_in(tree)] for tree in (one, other))
    return [(x.shape, x.dtype) for x in mine] == [(x.shape, x.dtype) for x in theirs] and all(
        torch.allclose(*pair, rtol=0.0, atol=0.0, equal_nan=True) for pair in zip(mine, theirs, strict=True)
    )


def whole(tensor: Tensor) -> Tensor:
    """Return a copy on the CPU, with its own dtype, of a whole tensor that ranks may have divided.

    All ranks must call it.
    """
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).to("cpu", copy=True)


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters by the plain model's names, in its order.

    They are those that ranks divide and an optimizer holds, even if FSDP2 has put gathered ones in their place.
    """
    held = [one for _, one, _ in fsdp_params(module)]
    divided = {one._unsharded_param: one.sharded_param for one in held if hasattr(one, "_unsharded_param")}
    for name, param in module.named_parameters():
        yield plain_name(name), divided.get(param, param)


def computes_in(module: nn.Module) -> dict[str, Dtypes]:
    """Return the dtypes in which each parameter computes and sums its gradient.

    They are its own, unless FSDP2's policy says otherwise.
    """
    divided = {one.sharded_param: dtypes for _, one, dtypes in fsdp_params(module)}
    return {name: divided.get(param, (param.dtype, param.dtype)) for name, param in named_parameters(module)}


@contextmanager
def autocast_entered() -> Iterator[set[torch.dtype]]:
    """Collect the dtypes of every autocast that is entered: by a step, a loss, or the wrapper of a module's forward.

    An autocast that torch.compile traces is not seen.
    """
    seen = set[torch.dtype]()
    enter = torch.autocast.__enter__

    def noted(self: torch.autocast) -> Any:
        entered = enter(self)  # type: ignore[no-untyped-call]  # torch gives it no types
        if torch.is_autocast_enabled(self.device):  # an autocast may be entered to switch it off
            seen.add(torch.get_autocast_dtype(self.device))
        return entered

    with mock.patch.object(torch.autocast, "__enter__", noted):  # no hook of torch sees where it begins
        yield seen
