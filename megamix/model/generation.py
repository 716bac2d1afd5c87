"""Plain sampling: one forward over the window per new token, no cache of keys and values."""

import contextlib

import torch
from torch import Tensor

from megamix.model.transformer import Transformer


@torch.no_grad()
def generate(
    model: Transformer,
    tokens: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Append max_new_tokens sampled from softmax(logits / temperature); temperature 0 takes the likeliest.

    Shapes: tokens INT64 (B, T), T at least 1 -> (B, T + max_new_tokens). The model sees the last seq_len of them.
    Raises: ValueError for an empty prompt or a negative temperature.
    """
    if tokens.shape[-1] == 0:
        raise ValueError("tokens has no position to continue from: pass at least one token, such as the end of text")
    if temperature < 0:
        raise ValueError(
            f"temperature must be 0 (likeliest token) or positive, got {temperature}: pass for example 0.8"
        )
    with _eager(model):
        for _ in range(max_new_tokens):
            logits = model(tokens[:, -model.config.seq_len :])[:, -1].float()  # FP32 (B, vocab_size)
            tokens = torch.cat((tokens, _sample(logits, temperature, generator)), dim=1)
    return tokens


def _sample(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)


def _eager(model: Transformer) -> contextlib.AbstractContextManager[object]:
    # Every length of the growing window would be compiled anew, up to torch's limit of 8.
    return torch.compiler.set_stance("force_eager") if model.is_compiled else contextlib.nullcontext()
