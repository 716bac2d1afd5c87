"""Text from a model with a tokenizer: the sample at the end of a run, and the verb `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megamix.data.tokenizer import TextTokenizer
from megamix.model.generation import check_sampling, generate
from megamix.model.transformer import Transformer


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a text goes on; see megamix.model.generation.

    Raises: ValueError naming what is out of its range.
    """

    max_new_tokens: int
    seed: int
    temperature: float = 0.8
    top_p: float = 1.0

    def __post_init__(self) -> None:
        check_sampling(self.max_new_tokens, self.temperature, self.top_p)
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must be from 0 to 2**64 - 1, got {self.seed}: pass for example 0")


def sample_text(
    model: Transformer, tokenizer: TextTokenizer, prompt: str, sampling: Sampling, end_tokens: Sequence[int] = ()
) -> str:
    """`prompt` and its continuation, without the token that ends it; the same for the same seed, weights and machine.

    Raises: ValueError if the prompt is no text, the tokenizer has nothing for an empty one to begin with, or gives ids
    that the model does not have.
    """
    if any("\ud800" <= character <= "\udfff" for character in prompt):  # what stands for bytes that are no UTF-8
        raise ValueError(f"prompt must be UTF-8, got {prompt!r}: write it in UTF-8")
    device = next(model.parameters()).device
    token_ids = tokenizer.encode_prompt(prompt) or [*end_tokens[:1]] or [tokenizer.end_of_text]
    if max(token_ids) >= model.config.vocab_size:
        raise ValueError(
            f"prompt {prompt!r}: the tokenizer makes it token id {max(token_ids)}, the model's vocabulary has "
            f"{model.config.vocab_size}: give the model's own tokenizer"
        )
    generator = torch.Generator(device).manual_seed(sampling.seed)
    (text,) = generate(
        model, torch.tensor([token_ids], device=device), sampling.max_new_tokens, sampling.temperature, generator,
        sampling.top_p, end_tokens,
    ).tolist()  # fmt: skip
    if len(text) > len(token_ids) and text[-1] in end_tokens:
        text.pop()
    return tokenizer.decode(text)
