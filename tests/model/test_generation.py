"""Greedy text and samples follow the logits, top-p takes the fewest tokens, the KV cache changes no logits."""

import functools
import math

import pytest
import torch

from megamix.config import ModelConfig
from megamix.model.context import KeyValueCache
from megamix.model.generation import _sample, generate
from megamix.model.transformer import Transformer


def model_of(compile=False):
    torch.manual_seed(0)
    return Transformer(
        ModelConfig(vocab_size=31, seq_len=6, hidden_size=16, num_layers=1, num_heads=2, init_std=0.3, compile=compile)
    )


PROMPT = torch.tensor([[3, 1, 4], [1, 5, 9]])


def test_greedy_text_is_the_likeliest_token_of_each_window():
    model = model_of()
    tokens = generate(model, PROMPT, 8, temperature=0)
    assert not tokens.requires_grad
    assert tokens.shape == (2, 11)
    assert torch.equal(tokens[:, :3], PROMPT)
    for end in range(3, 11):  # windows grow to seq_len 6, then slide
        logits = model(tokens[:, max(0, end - 6) : end])[:, -1]
        assert torch.equal(tokens[:, end], logits.argmax(-1))


@pytest.mark.parametrize("rope", [{}, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kept_keys_and_values_give_the_logits_of_the_whole_text(dtype, rope):
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "seq_len": 12, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    model = Transformer(ModelConfig(**sizes, rope=rope, qk_norm="head", init_std=0.3)).to(dtype).eval()
    tokens = torch.randint(31, (3, 12))
    cache = KeyValueCache(model.config.num_layers, 12)
    with torch.no_grad():
        whole = model(tokens)
        for start, end in ((0, 4), (4, 5), (5, 9), (9, 10), (10, 12)):  # one or several at a time
            last = model(tokens[:, start:end], cache=cache)
            # The kernels for one query and for many add up in another order; a few roundings of the largest logit.
            bound = 40 * torch.finfo(dtype).eps * float(whole.abs().max())
            assert float((last[:, 0] - whole[:, end - 1]).abs().max()) <= bound
        with pytest.raises(ValueError, match="tokens has 13 positions"):
            model(tokens[:, :1], cache=cache)
    with pytest.raises(ValueError, match="tokens has no position to continue from: pass at least one token"):
        generate(model, tokens[:, :0], 1)


def test_a_token_costs_one_position_as_long_as_the_text_fits():
    model, lengths = model_of(), []
    model.embedding.register_forward_pre_hook(lambda _, tokens: lengths.append(tokens[0].shape[1]))
    generate(model, PROMPT, 6, temperature=0)
    assert lengths == [3, 1, 1, 1, 6, 6]  # then the window slides


def test_top_p_samples_from_the_fewest_tokens_that_hold_it():
    logits = torch.tensor([[0.15, 0.5, 0.05, 0.3]]).log().expand(2000, 4)
    for top_p, want in ((0.5, {1}), (0.51, {1, 3}), (0.8, {1, 3}), (0.81, {0, 1, 3}), (1.0, {0, 1, 2, 3})):
        drawn = _sample(logits, 1.0, torch.Generator().manual_seed(0), top_p)
        assert set(drawn.flatten().tolist()) == want, top_p


def test_samples_follow_softmax_of_logits_over_temperature():
    logits = torch.tensor([[0.0, 1.0, -torch.inf]]).expand(4000, 3)
    share = _sample(logits, 0.5, torch.Generator().manual_seed(0)).float().mean().item()
    assert share == pytest.approx(1 / (1 + math.exp(-2)), abs=4 * math.sqrt(0.88 * 0.12 / 4000))  # four deviations


def test_a_text_ends_with_an_end_token_and_all_do_not_wait_for_max_new_tokens():
    model = model_of()
    free = generate(model, PROMPT, 8, temperature=0)
    first, second = int(free[0, 4]), int(free[1, 7])
    ended = generate(model, PROMPT, 8, temperature=0, end_tokens=(first, second))
    for row, (got, want) in enumerate(zip(ended.tolist(), free.tolist(), strict=True)):
        stop = next(place for place in range(3, 11) if want[place] in (first, second))
        assert got == want[: stop + 1] + [want[stop]] * (len(got) - stop - 1), row
    assert ended.shape[1] < free.shape[1]


def test_a_compiled_model_generates_eagerly_and_compiles_nothing(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=lambda *_: pytest.fail("compiled")))
    assert torch.equal(generate(model_of(compile=True), PROMPT, 4, 0), generate(model_of(), PROMPT, 4, 0))
