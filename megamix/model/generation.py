"""Sampling of text. As long as the text fits into seq_len, a new token costs one position. After that each token costs
all seq_len positions, because the window slides.
"""

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megamix.model.language_model import LanguageModel

LEAST_TEMPERATURE = 1e-6  # logits divided by a smaller temperature could leave FP32's range


@torch.no_grad()
def generate(
    model: LanguageModel,
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
    top_p: float = 1.0,
    end_tokens: Sequence[int] = (),
    on_token: Callable[[], None] = lambda: None,
) -> Tensor:
    """Append up to max_new_tokens tokens, each sampled from softmax(logits / temperature). Temperature 0 takes the
    likeliest token.

    `top_p`: sample only from the likeliest tokens that together reach this probability (nucleus sampling, Holtzman et
    al. 2020, section 3.1). `end_tokens`: a text ends with any of them; its row then repeats its last token until all
    texts have ended. `on_token`: called after each token.
    Shapes: tokens INT64 (B, T), T at least 1 -> (B, T + up to max_new_tokens). The model sees the last seq_len tokens.
    Raises: ValueError for an empty prompt or for logits that are not finite; also as `check_sampling`.
    """
    if tokens.shape[-1] == 0:
        raise ValueError("tokens has no position to continue from: pass at least one token, such as the end of text")
    check_sampling(max_new_tokens, temperature, top_p)
    seq_len = model.config.seq_len
    room = min(tokens.shape[1] + max_new_tokens, seq_len)
    cache = model.new_cache(room)
    ends = tokens.new_tensor(end_tokens)
    ended = torch.zeros(tokens.shape[0], 1, dtype=torch.bool, device=tokens.device)
    # The model runs without the compiler, which would compile for every length of the window, up to its limit of 8.
    with torch.compiler.set_stance("force_eager") if model.is_compiled else contextlib.nullcontext():
        for _ in range(max_new_tokens):
            if tokens.shape[1] <= seq_len:
                logits = model(tokens[:, cache.length :], cache=cache)
            else:  # the window slides: every token has another position, so the cache is no longer valid
                logits = model(tokens[:, -seq_len:])
            new = _sample(logits[:, -1].float(), temperature, generator, top_p)
            new = torch.where(ended, tokens[:, -1:], new)
            tokens, ended = torch.cat((tokens, new), dim=1), ended | torch.isin(new, ends)
            on_token()
            if len(ends) and ended.all():
                break
    return tokens


def check_sampling(max_new_tokens: int, temperature: float, top_p: float) -> None:
    """Refuse settings out of range. Raises: ValueError naming the setting."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}: pass for example 128")
    if temperature != 0 and not temperature >= LEAST_TEMPERATURE:  # refuses NaN, too
        raise ValueError(
            f"temperature must be 0 (likeliest token) or {LEAST_TEMPERATURE:g} and more, got {temperature}: pass for "
            "example 0.8"
        )
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1 (all tokens), got {top_p}: pass for example 0.95")


def _sample(logits: Tensor, temperature: float, generator: torch.Generator | None, top_p: float = 1.0) -> Tensor:
    """Sample one token per row. Shapes: logits FP32 (B, vocab_size) -> INT64 (B, 1)."""
    if not torch.isfinite(logits.amax(-1)).all():  # a single logit may be -inf: that token never comes
        raise ValueError("the model's logits are not finite: its weights are damaged, or too large for this dtype")
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    shares = torch.softmax(logits / temperature, -1)
    if top_p < 1:
        ordered, places = shares.sort(-1, descending=True)
        # Drop a token once the likelier tokens before it reach top_p together.
        ordered[ordered.cumsum(-1) - ordered >= top_p] = 0
        shares = torch.zeros_like(shares).scatter_(-1, places, ordered)
    return torch.multinomial(shares, 1, generator=generator)
