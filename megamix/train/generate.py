"""Text from a model with a tokenizer: the sample at the end of a run, and the verb `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megamix.data.tokenizer import open_tokenizer
from megamix.model.generation import generate
from megamix.model.transformer import Transformer


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a text goes on; see megamix.model.generation."""

    max_new_tokens: int
    seed: int
    temperature: float = 0.8
    top_p: float = 1.0


def sample_text(
    model: Transformer, tokenizer_path: Path, prompt: str, sampling: Sampling, end_tokens: Sequence[int] = ()
) -> str:
    """`prompt` and its continuation, without the token that ends it; the same for the same seed, weights and machine.

    Raises: ValueError if the tokenizer cannot be read, or has nothing for an empty prompt to begin with.
    """
    tokenizer = open_tokenizer(tokenizer_path)
    device = next(model.parameters()).device
    token_ids = tokenizer.encode_prompt(prompt) or [*end_tokens[:1]] or [tokenizer.end_of_text]
    generator = torch.Generator(device).manual_seed(sampling.seed)
    (text,) = generate(
        model, torch.tensor([token_ids], device=device), sampling.max_new_tokens, sampling.temperature, generator,
        sampling.top_p, end_tokens,
    ).tolist()  # fmt: skip
    if len(text) > len(token_ids) and text[-1] in end_tokens:
        text.pop()
    return tokenizer.decode(text)
