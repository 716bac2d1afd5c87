import functools
import math

import pytest
import torch
from torch import Tensor

from megamix.config import ModelConfig
from megamix.model.generation import _sample, generate
from megamix.model.transformer import Transformer


def model_of(compile: bool = False) -> Transformer:
    torch.manual_seed(0)
    return Transformer(
        ModelConfig(vocab_size=31, seq_len=6, hidden_size=16, num_layers=1, num_heads=2, init_std=0.3, compile=compile)
    )


PROMPT = torch.tensor([[3, 1, 4], [1, 5, 9]])


def test_greedy_text_is_the_likeliest_token_of_each_window() -> None:
    model = model_of()
    tokens = generate(model, PROMPT, 8, temperature=0)
    assert tokens.shape == (2, 11)
    assert torch.equal(tokens[:, :3], PROMPT)
    for end in range(3, 11):  # windows grow to seq_len 6, then slide
        logits = model(tokens[:, max(0, end - 6) : end])[:, -1]
        assert torch.equal(tokens[:, end], logits.argmax(-1))


def test_samples_follow_softmax_of_logits_over_temperature() -> None:
    logits, generator = torch.tensor([[0.0, 1.0, -torch.inf]]).expand(4000, 3), torch.Generator().manual_seed(0)
    share = _sample(logits, 0.5, generator).float().mean().item()
    assert share == pytest.approx(1 / (1 + math.exp(-2)), abs=4 * math.sqrt(0.88 * 0.12 / 4000))  # four deviations


def test_samples_follow_the_generator() -> None:
    model = model_of()

    def sample(seed: int) -> Tensor:
        return generate(model, PROMPT, 40, 1.0, torch.Generator().manual_seed(seed))

    assert torch.equal(sample(0), sample(0))
    assert not torch.equal(sample(0), sample(1))


def test_nothing_is_kept_for_backward() -> None:
    assert not generate(model_of(), PROMPT, 1).requires_grad
    with torch.autograd.graph.saved_tensors_hooks(pytest.fail, lambda x: x):
        generate(model_of(), PROMPT, 1)


def test_a_compiled_model_generates_eagerly_and_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=lambda *_: pytest.fail("compiled")))
    assert torch.equal(generate(model_of(compile=True), PROMPT, 4, 0), generate(model_of(), PROMPT, 4, 0))


def test_an_empty_prompt_and_a_negative_temperature_are_refused() -> None:
    with pytest.raises(ValueError, match="tokens has no position to continue from: pass at least one token"):
        generate(model_of(), PROMPT[:, :0], 1)
    with pytest.raises(ValueError, match="temperature must be 0 .* or positive, got -1"):
        generate(model_of(), PROMPT, 1, temperature=-1)
