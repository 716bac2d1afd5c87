"""The verb `prepare`. Heavy modules load inside."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from megamix.cli.parser import Parser, lines_told


def prepare_arguments(parser: Parser) -> None:
    parser.example = "megamix prepare --input my_texts/ --output runs/data/mine"
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--corpus", choices=["stdlib", "torch"], default="stdlib", help="sources on this machine")
    text.add_argument(
        "--input", metavar="PATH", nargs="+",
        help="files or folders instead: .jsonl, .ndjson, .json, .parquet, .arrow or a dataset of `datasets` hold "
        "records, any other file is one document; text may be compressed (.gz, .zst); hf:NAME is loaded by `datasets`",
    )  # fmt: skip
    parser.add_value("--output", "DIR", Path, "reused if it holds the same result", required=True)
    parser.add_argument("--text-key", metavar="KEY", default="text", help="key or column of a record's text (text)")
    parser.add_argument("--split", metavar="NAME", default="train", help="split of a dataset that has several (train)")
    parser.add_argument(
        "--tokenizer", metavar="WHAT", default="train",
        help="train: a byte-level BPE on this text (default); bytes; or a tokenizer.json or SentencePiece .model",
    )  # fmt: skip
    parser.add_value("--vocab-size", "N", int, "tokens of a tokenizer that is trained (2048)")
    parser.add_argument("--end-token", metavar="TOKEN", help="ends each document, if the tokenizer's files do not say")
    parser.add_argument("--begin-token", metavar="TOKEN", nargs="?", const="", help="begins each document, too (none)")
    parser.add_value("--valid-fraction", "F", float, "share of the documents kept apart (0.05)", default=0.05)
    parser.add_value("--workers", "N", int, "processes that encode (one for each core)")
    bad = "more, or more files that cannot be read, stop the run; fewer are listed in bad_records.jsonl (100)"
    parser.add_value("--max-bad-records", "N", int, bad, default=100)
    lost = "a larger share of the bytes that cannot be read stops the run; 100 allows all (1)"
    parser.add_value("--allow-lost", "PERCENT", float, lost, default=1.0)


@lines_told
def run_prepare(arguments: argparse.Namespace) -> Iterator[str]:
    from megamix.data.prepare.corpus import input_corpus, named_corpus
    from megamix.data.prepare.prepare_corpus import Request, prepare_corpus
    from megamix.data.prepare.tokenizer_choice import TokenizerChoice

    what, vocab_size = arguments.tokenizer, arguments.vocab_size
    vocab_size = 2048 if vocab_size is None and what == "train" else vocab_size
    try:
        request = Request(
            tokenizer=TokenizerChoice(what, vocab_size, arguments.end_token, arguments.begin_token),
            valid_fraction=arguments.valid_fraction,
            text_key=arguments.text_key,
            num_workers=arguments.workers,
            max_bad_records=arguments.max_bad_records,
            allow_lost=arguments.allow_lost,
        )
        asked = (arguments.input, arguments.split, arguments.text_key)
        corpus = input_corpus(*asked) if arguments.input else named_corpus(arguments.corpus)
        yield prepare_corpus(corpus, arguments.output, request, arguments.progress).summary()
    except OSError as error:  # an error of the disk or of memory
        raise ValueError(f"{error}; correct that and run the same command again: it continues") from error
