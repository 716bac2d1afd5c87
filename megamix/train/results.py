"""The results of a run for use elsewhere: its weights, and a text that the model writes with the run's tokenizer."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from megamix.base.console import Console
from megamix.base.durable import write_text, written_aside
from megamix.checkpoint.snapshot import DTYPE_NAMES
from megamix.checkpoint.tensor_file import safetensors_header, tensor_chunks
from megamix.data.text_tokenizer import TextTokenizer
from megamix.data.tokenizer import open_tokenizer
from megamix.launch import run_folder
from megamix.log.overflows import GaveUpError
from megamix.mixed_precision.engine import ShardedEngine
from megamix.model.generation import check_sampling, generate
from megamix.model.language_model import LanguageModel

SAMPLE_TOKENS = 192
# With these settings the tokens are likelier than those of `megamix generate`, so a small model shows what it has
# learned.
SAMPLE_TEMPERATURE, SAMPLE_TOP_P = 0.5, 0.9
TellText = Callable[[int, str, str], None]  # takes a step, a name and a text


@dataclass(frozen=True)
class Sample:
    """The text at the end of a run, which its model writes with the run's tokenizer."""

    tokenizer: Path
    prompt: str
    seed: int
    step: int  # the last one
    whole: Callable[[], LanguageModel]  # returns the whole model, with other weights

    def write(self, path: Path, model: nn.Module, console: Console, tell_text: TellText | None) -> None:
        """Have the model write it. Only the first rank gives `tell_text`, and writes the file."""
        assert isinstance(model, LanguageModel)
        model.eval()  # without dropout
        sampling = Sampling(SAMPLE_TOKENS, self.seed, SAMPLE_TEMPERATURE, SAMPLE_TOP_P)
        text = sample_text(model, open_tokenizer(self.tokenizer), self.prompt, sampling)
        if text.strip() == self.prompt.strip():
            console.line("no sample of text: the model writes nothing but white space; train longer")
        elif tell_text is not None:
            with console.telling(path):
                write_text(path, text)
            console.line(f"sample of text ({path}):\n{text}")
            tell_text(self.step, "sample", text)


def write_results(
    folder: Path,
    engine: ShardedEngine,
    console: Console,
    gave_up: GaveUpError | None,
    sample: Sample | None,
    tell_text: TellText | None,
) -> None:
    """Write the files that a run leaves when it is finished or gives up.

    Every rank must call it. The first rank writes the files, and calls `tell_text` with the sample.
    """
    topology = engine.topology
    first = topology.world.rank == 0

    def written(path: Path, what: str) -> dict[str, Tensor]:
        weights = engine.full_weights()
        if first:
            # A failed write must not hide that the run gave up.
            with nullcontext() if gave_up is None else console.telling(path):
                write_weights(path, weights)
                console.line(f"{what} in FP32: {path}")
        return weights

    with engine.clock.span("weights"):
        if engine.average_decay is not None:  # first, so that the host holds one of both at a time
            with engine.averaged_weights():
                written(folder / run_folder.AVERAGED, "their average")
        weights = written(folder / run_folder.WEIGHTS, "weights")
    if gave_up is not None:
        if first:
            with console.telling(folder / run_folder.GAVE_UP):
                write_text(folder / run_folder.GAVE_UP, f"{gave_up}\n")
    elif sample is not None:
        model = engine.module
        if first and topology.pp.size > 1:  # no rank of a pipeline has the whole model
            model = sample.whole()
            model.load_state_dict(weights)
            model.to(engine.plan.precision.dtype)
        with engine.whole_parameters():  # only some ranks compute below
            if first or (topology.pp.size == 1 and topology.computes_with_first):
                sample.write(folder / run_folder.SAMPLE, model, console, tell_text)


def write_weights(path: Path, weights: dict[str, Tensor]) -> None:
    """Write a safetensors file: the FP32 weights, and the buffers in their own dtypes.

    A tensor with several names is written once, under the first. The file is either whole or not there.
    """
    once: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in weights.items():
        once.setdefault(id(tensor), (name, tensor))
    tensors = dict(once.values())
    # safetensors' save_file would make a file that only its owner may read, whatever the umask.
    with written_aside(path) as file:
        kinds = {name: (DTYPE_NAMES[str(tensor.dtype)], tensor.shape) for name, tensor in tensors.items()}
        file.write(safetensors_header(kinds))
        for tensor in tensors.values():
            for chunk in tensor_chunks(tensor.reshape(-1)):
                file.write(chunk)


@dataclass(frozen=True, slots=True)
class Sampling:
    """The settings by which a text is continued; see megamix.model.generation.

    Raises: ValueError naming the value that is out of its range.
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
    model: LanguageModel,
    tokenizer: TextTokenizer,
    prompt: str,
    sampling: Sampling,
    end_tokens: Sequence[int] = (),
    on_token: Callable[[], None] = lambda: None,
) -> str:
    """Return `prompt` and its continuation, without the token that ends it.

    `on_token` is called after each token.
    The text is the same for the same seed, weights and machine.
    Raises: ValueError if the prompt is no valid text, if the tokenizer has no token with which an empty prompt could
    begin, or if a token's id is beyond the model's vocabulary.
    """
    if any("\ud800" <= character <= "\udfff" for character in prompt):  # surrogates stand for bytes that are no UTF-8
        raise ValueError(f"prompt must be UTF-8, got {prompt!r}: write it in UTF-8")
    device = next(model.parameters()).device
    told = tokenizer.encode_prompt(prompt)
    token_ids = told or [*end_tokens[:1]] or [tokenizer.end_of_text]
    opens = len(tokenizer.begin) or int(not told)  # tokens before the text of a document
    if max(token_ids) >= model.config.vocab_size:
        raise ValueError(
            f"prompt {prompt!r}: the tokenizer makes it token id {max(token_ids)}, the model's vocabulary has "
            f"{model.config.vocab_size}: give the model's own tokenizer"
        )
    generator = torch.Generator(device).manual_seed(sampling.seed)
    (text,) = generate(
        model, torch.tensor([token_ids], device=device), sampling.max_new_tokens, sampling.temperature, generator,
        sampling.top_p, end_tokens, on_token,
    ).tolist()  # fmt: skip
    if len(text) > len(token_ids) and text[-1] in end_tokens:
        text.pop()
    return tokenizer.decode(text[opens:])
