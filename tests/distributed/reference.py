"""The plain loop that the engine must equal: one process, no buckets, no shards, every virtual rank in turn."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megamix.mixed_precision.optim.muon import MOMENTUM, Muon
from megamix.mixed_precision.optim.nag import NAG


class Reference(NamedTuple):
    """Result of the loop."""

    states: dict[str, dict[str, Tensor]]  # by parameter: "master" and the optimizer's; FP32, flat, zeros up to 64 n
    losses: list[list[float]]  # per step, for every (rank, micro-batch)
    grad_norms: list[float]


def train_reference(
    model,
    loss_of,  # takes model, step, rank, micro-batch
    optimizer,
    settings,  # steps, dp_size, micro_batches, accumulate, dtype, grad_dtype, reduce_dtype, loss_scale, clip_grad
):
    """Train by the plain loop.

    Each rank's micro-batches are added in order in the gradient's dtype, then the ranks' sums in FP32, rounded once
    unless the sum stays in FP32. With `accumulate` "owner" this is done for each micro-batch, and the results are added
    in FP32.
    """
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    # Padded, because a fused kernel's scalar tail rounds differently from its vector body, and a row of the norm has 64
    # elements.
    masters = {
        name: F.pad(param.detach().float().flatten(), (0, -param.numel() % 64)) for name, param in params.items()
    }
    model.to(settings.dtype)  # frozen parameters, too
    torch_optimizer = _torch_optimizer(optimizer, params, masters)
    result = Reference({}, [], [])
    for step in range(settings.steps):
        for name, param in params.items():
            param.data = masters[name][: param.numel()].view(param.shape).to(settings.dtype)
        # Gradients by group of micro-batches that is summed over the ranks at once (all of them, or each alone), by
        # rank and by name.
        turns = {}
        losses = []
        for rank in range(settings.dp_size):
            for micro_batch in range(settings.micro_batches(step, rank)):
                loss = loss_of(model, step, rank, micro_batch).float()
                losses.append(loss.item())
                grads = torch.autograd.grad(loss * settings.loss_scale, list(params.values()), allow_unused=True)
                turn = turns.setdefault(micro_batch if settings.accumulate == "owner" else 0, {})
                sums = turn.setdefault(rank, {})
                for name, grad in zip(params, grads, strict=True):
                    if grad is not None:
                        grad = grad.to(settings.grad_dtype)
                        sums[name] = sums[name] + grad if name in sums else grad
        total = {}
        for name, param in params.items():
            zeros = torch.zeros_like(param, dtype=settings.grad_dtype)
            parts = []
            for turn in turns.values():
                part = sum(turn[rank].get(name, zeros).float() for rank in range(settings.dp_size))
                parts.append(part if settings.reduce_dtype == "half_fp32_sum" else part.to(settings.grad_dtype).float())
            total[name] = sum(parts[1:], start=parts[0])
            total[name] = F.pad(total[name].flatten(), (0, -param.numel() % 64))
        divisor = settings.loss_scale * len(losses)
        rows = torch.cat([grad.view(-1, 64).square().sum(1) for grad in total.values()])
        grad_norm = rows.double().sum().sqrt() / divisor
        clip = (settings.clip_grad / (grad_norm + 1e-6)).clamp(max=1.0) if settings.clip_grad else torch.ones(())
        for name, master in masters.items():
            master.grad = total[name] * (clip / divisor).float()
        torch_optimizer.step()
        result.losses.append(losses)
        result.grad_norms.append(float(grad_norm.float()))
    for name, master in masters.items():
        shape = tuple(params[name].shape)
        states = (*optimizer.states(name, shape), *optimizer.state_lengths(name, shape))
        result.states[name] = {"master": master, **{state: torch_optimizer.state[master][state] for state in states}}
    return result


def _torch_optimizer(optimizer, params, masters):
    groups = []
    for name, param in params.items():
        group = optimizer.group_of(name, tuple(param.shape))
        lr = torch.tensor(optimizer.lr_table()[0]) * group.lr_factor[0]
        groups.append({"params": [masters[name]], "lr": lr, "weight_decay": group.weight_decay[0]})
    if isinstance(optimizer, Muon):
        return PlainMuon(optimizer, params, masters, groups)
    if isinstance(optimizer, NAG):
        if optimizer.momentum_form == "velocity":
            return VelocityNag(groups, {"momentum": optimizer.momentum, "decoupled": optimizer.decoupled_weight_decay})
        momentum = optimizer.momentum
        return torch.optim.SGD(groups, lr=0.0, momentum=momentum, nesterov=momentum > 0, fused=True)
    return torch.optim.AdamW(groups, lr=torch.tensor(0.0), betas=optimizer.betas, eps=optimizer.eps, fused=True)


class VelocityNag(torch.optim.Optimizer):
    """The velocity form, which torch does not have: the operations of docs/numerics.md, in their order."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            (master,), lr, momentum = group["params"], group["lr"], group["momentum"]
            grad, velocity = master.grad, self.state[master].get("velocity", torch.zeros_like(master))
            if group["decoupled"]:
                master.sub_(lr * group["weight_decay"] * master)
            else:
                grad = grad + group["weight_decay"] * master
            velocity = momentum * velocity - lr * grad
            master.add_(momentum * velocity).sub_(lr * grad)
            self.state[master]["velocity"] = velocity


class PlainMuon:
    """Muon on each matrix by itself, in full, and torch's AdamW on the rest. It shares with the engine what makes a
    direction of a matrix, and nothing else.
    """

    def __init__(self, optimizer, params, masters, groups):
        self.optimizer, self.matrices, rest = optimizer, [], []
        for (name, param), group in zip(params.items(), groups, strict=True):
            if rows := optimizer.matrices(name, tuple(param.shape)):
                self.matrices.append((group, rows, param.shape[-1]))
            else:
                rest.append(group)
        self.rest = torch.optim.AdamW(rest, lr=torch.tensor(0.0), betas=optimizer.betas, eps=optimizer.eps, fused=True)
        self.state = self.rest.state
        for group, all_rows, columns in self.matrices:
            state = self.state[group["params"][0]] = {MOMENTUM: torch.zeros_like(group["params"][0])}
            lengths = [optimizer.matrix_states(rows, columns) for rows in all_rows]
            state |= {name: torch.zeros(sum(one[name] for one in lengths)) for name in lengths[0]}

    @torch.no_grad()
    def step(self):
        self.rest.step()
        for group, all_rows, columns in self.matrices:
            (master,), lr, optimizer = group["params"], group["lr"], self.optimizer
            momentum = optimizer.momentum
            buffer = self.state[master][MOMENTUM]
            buffer.copy_(torch.lerp(buffer, master.grad, 1 - momentum))
            ahead = torch.lerp(master.grad, buffer, momentum) if optimizer.nesterov else buffer
            direction, start = torch.zeros_like(master), 0
            ends = dict.fromkeys(optimizer.matrix_states(1, 1), 0)
            for rows in all_rows:
                end = start + rows * columns
                matrix = ahead[start:end].to(optimizer.ns_dtype).view(rows, columns)
                scale = optimizer.lr_scale(rows, columns)
                own = {}
                for name, length in optimizer.matrix_states(rows, columns).items():
                    own[name] = self.state[master][name][ends[name] : ends[name] + length]
                    ends[name] += length
                made, new = optimizer.direction(matrix, own)
                for name, state in own.items():
                    state.copy_(new[name])
                direction[start:end] = made.flatten().float() * scale
                start = end
            decay = lr * group["weight_decay"] * master
            if optimizer.cautious_weight_decay:
                decay = torch.where(direction * master >= 0, decay, torch.zeros(()))
            master.copy_(master - decay - lr * direction)
