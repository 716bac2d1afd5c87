"""Steps that come to nothing. Each function takes an engine and a function that returns a loss of its module."""

import pytest


def _raise(*_):
    raise ValueError("planted")


def discarded(engine, forward):
    engine.backward(forward())
    engine.discard_step()


def failed_in_backward(engine, forward):
    loss = forward()
    hook = next(engine.module.parameters()).register_hook(_raise)  # the gradients of others have come by then
    with pytest.raises(ValueError, match="planted"):
        engine.backward(loss)
    hook.remove()


def failed_in_forward(engine, forward):
    *_, last = engine.module.children()
    hook = last.register_forward_pre_hook(_raise)
    with pytest.raises(ValueError, match="planted"):
        forward()
    hook.remove()
    engine.discard_step()


def probed(engine, forward):
    for _ in range(engine.grad_accum_steps):
        engine.backward(forward())
    engine.probe_loss_scale()


SPOILERS = [discarded, failed_in_backward, failed_in_forward, probed]
