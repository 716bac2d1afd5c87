"""The verbs import, export, generate and evaluate: arguments and output. Heavy modules are loaded when a verb runs."""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megamix.cli.parser import Parser, lines_told
from megamix.hf.place import CONFIG, find_model, is_hugging_face, read_json

if TYPE_CHECKING:
    from megamix.hf.source import Source

_MODEL = "a run's folder, an imported one, a checkpoint, or a Hugging Face folder"
_DTYPES = ["fp32", "bf16", "fp16"]


def import_arguments(parser: Parser) -> None:
    parser.example = "megamix import hf/gpt2 --output runs/imported"
    parser.add_value("folder", "HF_DIR", Path, "config.json and safetensors")
    parser.add_value("--output", "DIR", Path, "must not be there yet", required=True)
    _add_allow(parser)


@lines_told
def run_import(arguments: argparse.Namespace) -> Iterator[str]:
    read_json(arguments.folder / CONFIG)  # fail early: the imports below load torch, which takes seconds
    arguments.progress.begin("loading torch")
    from megamix.hf.convert import MODEL, import_model

    checkpoint = import_model(
        arguments.folder, arguments.output, allow_non_finite=arguments.allow_non_finite, progress=arguments.progress
    )
    yield f"{checkpoint}: the weights; a run begins from them with base = {str(arguments.output / MODEL)!r}"


def export_arguments(parser: Parser) -> None:
    parser.example = "megamix export runs/mine --to hf hf/mine --dtype bf16"
    _add_model(parser, "CHECKPOINT")
    parser.add_argument("--to", choices=["hf"], required=True, help="hf: config.json, safetensors and tokenizer")
    parser.add_value("output", "DIR", Path, "must not be there yet")
    parser.add_argument("--dtype", choices=_DTYPES, default="fp32", help="of the weights (fp32)")
    parser.add_value("--shard-gb", "N", float, "a file's largest size in GB (5)", default=5.0)
    parser.add_value("--tokenizer", "FILE", Path, "tokenizer.json or .model (the model's own)")


@lines_told
def run_export(arguments: argparse.Namespace) -> Iterator[str]:
    if not 0 < arguments.shard_gb < math.inf:
        raise ValueError(f"--shard-gb {arguments.shard_gb} must be positive and finite; write --shard-gb 5")
    source = _open(arguments)
    from megamix.hf.convert import export_model

    shard_size = int(arguments.shard_gb * 1e9)
    size = export_model(source, arguments.output, arguments.dtype, shard_size, arguments.tokenizer, arguments.progress)
    yield f"{arguments.output}: {source.path} in {arguments.dtype}, {size / 1e6:,.1f} MB"


def generate_arguments(parser: Parser) -> None:
    parser.example = "megamix generate runs/mine --prompt 'def '"
    _add_model(parser, "MODEL")
    parser.add_argument(
        "--prompt", metavar="TEXT", action="append", help="the text to continue; may be repeated (none)"
    )
    parser.add_value("--max-new-tokens", "N", int, "tokens to add at most (128)", default=128)
    parser.add_value("--temperature", "T", float, "0: always the likeliest (0.8)", default=0.8)
    parser.add_value("--top-p", "P", float, "nucleus sampling with this mass (1)", default=1.0)
    parser.add_value("--seed", "N", int, "seed of the sampling, the same for each prompt (0)", default=0)
    parser.add_argument("--dtype", choices=_DTYPES, help="to compute in (as it was trained)")
    parser.add_value("--tokenizer", "FILE", Path, "tokenizer.json or .model (the model's own)")
    _add_allow(parser)


@lines_told
def run_generate(arguments: argparse.Namespace) -> Iterator[str]:
    source, progress = _open(arguments), arguments.progress
    from megamix.comm.topology import local_device
    from megamix.data.tokenizer import open_tokenizer
    from megamix.hf.tokenizer_files import end_ids, special_ids
    from megamix.train.objects import DTYPES
    from megamix.train.results import Sampling, sample_text

    sampling = Sampling(arguments.max_new_tokens, arguments.seed, arguments.temperature, arguments.top_p)
    path = arguments.tokenizer or source.tokenizer
    if path is None:
        raise ValueError(f"{source.path} has no tokenizer; name one with --tokenizer FILE")
    tokenizer, ends = open_tokenizer(path), end_ids(special_ids(source.home, path))
    dtype = DTYPES[arguments.dtype or source.dtype]
    progress.begin("loading the model")
    model = source.load(dtype, local_device(), allow_non_finite=arguments.allow_non_finite)
    for prompt in arguments.prompt or [""]:
        progress.begin(f"up to {sampling.max_new_tokens} tokens", total=sampling.max_new_tokens)
        yield sample_text(model, tokenizer, prompt, sampling, ends, lambda: progress.advance(1))


def evaluate_arguments(parser: Parser) -> None:
    parser.example = "megamix evaluate runs/mine --data runs/data/mine/valid"
    _add_model(parser, "MODEL")
    parser.add_value("--data", "PREFIX", Path, "PREFIX.bin and PREFIX.idx (the run's data.valid)")
    parser.add_value("--seq-len", "N", int, "tokens in a window (the model's seq_len)")
    parser.add_value("--stride", "N", int, "tokens from one window's start to the next (a window)")
    parser.add_value("--max-tokens", "N", int, "only the first N tokens of the file (all)")
    parser.add_argument("--dtype", choices=_DTYPES, help="to compute in (as it was trained)")
    parser.add_flag("--json", "print JSON")
    parser.add_argument("--harness", metavar="TASKS", help="tasks of lm-eval-harness instead, with commas between")
    _add_allow(parser)


@lines_told
def run_evaluate(arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.max_tokens is not None and arguments.max_tokens < 2:
        raise ValueError(
            f"--max-tokens {arguments.max_tokens} must be at least 2, as the first token is not predicted; "
            "write --max-tokens 1000000"
        )
    source = _open(arguments)
    from megamix.comm.topology import local_device
    from megamix.hf.evaluate import evaluate
    from megamix.train.objects import DTYPES

    dtype = arguments.dtype or source.dtype
    if arguments.harness is not None:
        yield from _harness(arguments, source, dtype)
        return
    sets = source.valid if arguments.data is None else {"": str(arguments.data)}
    if not sets:
        raise ValueError(f"{source.path} names no held-out token file, or several; give --data PREFIX")
    seq_len = _within("--seq-len", arguments.seq_len, source.config.seq_len, "the model's seq_len")
    stride = _within("--stride", arguments.stride, seq_len, "the tokens of a window")
    arguments.progress.begin("loading the model")
    model = source.load(DTYPES[dtype], local_device(), allow_non_finite=arguments.allow_non_finite)
    all_facts = list[dict[str, object]]()
    for name, prefix in sets.items():
        result = evaluate(model, Path(prefix), stride, seq_len, arguments.max_tokens, arguments.progress)
        facts = {
            "model": str(source.path), "data": str(prefix), "dtype": dtype, "seq_len": seq_len,
            "stride": stride, **result._asdict(),
        }  # fmt: skip
        all_facts.append({"set": name, **facts} if name else facts)
        bits = "" if result.bits_per_byte is None else f", {result.bits_per_byte:.4f} bits a byte"
        if not arguments.json:
            yield (
                f"{source.path} in {dtype} on {f'{name}, ' if name else ''}{prefix}: {result.targets:,} tokens in "
                f"windows of {seq_len}, {stride} apart: {result.nats_per_token:.4f} nats a token, "
                f"perplexity {result.perplexity:.4f}{bits}"
            )
    if arguments.json:
        yield json.dumps(all_facts[0] if "" in sets else all_facts, indent=2)


def _add_allow(parser: Parser) -> None:
    parser.add_flag("--allow-non-finite", "take weights that are NaN or inf as they are")


def _add_model(parser: Parser, name: str) -> None:
    parser.add_value("path", name, Path, _MODEL)
    parser.add_flag("--average", "the average of its weights ([training.average])")


def _open(arguments: argparse.Namespace) -> Source:
    find_model(arguments.path)  # fail early: the imports below load torch, which takes seconds
    arguments.progress.begin("loading torch")
    from megamix.hf.source import open_source

    return open_source(arguments.path, average=arguments.average)


def _within(flag: str, value: int | None, most: int, what: str) -> int:
    """Return the flag's value; `most` if it is not set. Raises: ValueError if it is not in 1 .. `most`."""
    if value is None:
        return most
    if not 1 <= value <= most:
        raise ValueError(f"{flag} {value} must lie in 1 .. {most}, {what}; write {flag} {most}, or leave it out")
    return value


def _harness(arguments: argparse.Namespace, source: Source, dtype: str) -> Iterator[str]:
    from megamix.data import import_extra
    from megamix.hf.convert import export_model
    from megamix.hf.evaluate import run_harness
    from megamix.train.objects import DTYPES

    import_extra("lm_eval", "harness", what="--harness: ")  # fail before an export of many gigabytes
    torch_name = str(DTYPES[dtype]).removeprefix("torch.")
    with tempfile.TemporaryDirectory(prefix="megamix-") as folder:
        path = source.path
        if not is_hugging_face(path):
            path = Path(folder) / "export"
            export_model(source, path, dtype, progress=arguments.progress)
        arguments.progress.begin(f"lm-eval-harness on {arguments.harness}")
        scores = run_harness(path, arguments.harness.split(","), torch_name)
    if arguments.json:
        yield json.dumps(scores, indent=2)
        return
    for task, metrics in scores.items():
        yield f"{task}: " + ", ".join(f"{name} {value}" for name, value in metrics.items())
