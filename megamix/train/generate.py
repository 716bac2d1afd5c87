"""Text from a trained model: the sample at the end of a run, and the verb `generate`."""

from __future__ import annotations

from pathlib import Path

import torch

from megamix.data.tokenizer import open_tokenizer
from megamix.model.generation import generate
from megamix.model.transformer import Transformer
from megamix.train.build import DTYPES
from megamix.train.run_folder import read_run


def sample_text(
    model: Transformer, tokenizer_path: Path, prompt: str, *, max_new_tokens: int, seed: int, temperature: float = 0.8
) -> str:
    """`prompt` and its continuation; the same for the same seed, weights and machine."""
    tokenizer = open_tokenizer(tokenizer_path)
    device = next(model.parameters()).device
    token_ids = tokenizer.encode(prompt) or [tokenizer.end_of_text]
    tokens = torch.tensor([token_ids], device=device)
    generator = torch.Generator(device).manual_seed(seed)
    return tokenizer.decode(generate(model, tokens, max_new_tokens, temperature, generator)[0].tolist())


def load_model(folder: Path) -> tuple[Transformer, Path]:
    """(the model of a finished run with its weights, in the run's dtype; its tokenizer).

    Raises: ValueError naming what is missing.
    """
    config, weights = read_run(folder)
    if config.data.tokenizer is None:
        raise ValueError(f"data.tokenizer: the run in {folder} was made without one; set it in its config.toml")
    model = Transformer(config.model)
    # A tied head is stored once, under the embedding's name: only its absence is allowed.
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - ({"head.weight"} if config.model.tie_embeddings else set()):
        raise ValueError(
            f"RUN: the weights in {folder} are not its config.toml's: missing {missing}, extra {unexpected}"
        )
    return model.to(DTYPES[config.precision.dtype]), Path(config.data.tokenizer)
