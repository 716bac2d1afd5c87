"""`megamix prepare`: a corpus becomes a tokenizer, train and valid token files and manifest.json in one directory.

Unfinished work lies in OUTPUT.partial: the tokenizer, and the encoded pieces of the corpus. A rerun of the same request
continues from it; another request begins anew. The last act is the rename that gives the result its name.
"""

import fcntl
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from megamix.base.durable import folder_aside, lock_file, remove_asides, write_text
from megamix.base.machine import num_cores
from megamix.base.names import first_few
from megamix.base.progress import ProgressLine
from megamix.data.prepare import MANIFEST_NAME
from megamix.data.prepare.corpus import Corpus, counted
from megamix.data.prepare.lost import BAD_RECORDS_NAME, check_losses, count_losses, line_of, told_losses, write_lines
from megamix.data.prepare.pieces import EncodingJob, PieceReport, merge_pieces
from megamix.data.prepare.plan import PIECE_BYTES, Plan, make_plan
from megamix.data.prepare.records import BadRecord
from megamix.data.prepare.split import split_of
from megamix.data.prepare.tokenizer_choice import TRAIN, TRAIN_BYTES, TokenizerChoice, make_tokenizer, sample_texts
from megamix.data.prepare.workers import call_apart, encode_pieces, wait_for_orphans
from megamix.data.steady_file import file_fingerprint
from megamix.data.tokenizer import open_tokenizer

log = logging.getLogger("megamix")

_FORMAT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The settings beside the corpus: some decide the result; others only how the work is done, and change no byte."""

    tokenizer: TokenizerChoice
    valid_fraction: float  # share of the documents that training never sees, 0 <= F < 1; 0 writes no valid files
    text_key: str = "text"  # key or column of the text in files of records
    num_workers: int | None = None  # number of processes; None: one for each core
    max_bad_records: int = 100  # bad records and files that are left out; more stop the run
    allow_lost: float = 1.0  # percent of the bytes that are left out; more stop the run
    piece_bytes: int = PIECE_BYTES

    def __post_init__(self) -> None:
        if not 0 <= self.valid_fraction < 1:
            raise ValueError(
                f"--valid-fraction {self.valid_fraction} must lie in 0 <= F < 1; 0.05 keeps one document in twenty"
            )
        if self.num_workers is not None and self.num_workers < 1:
            raise ValueError(f"--workers {self.num_workers} must be at least 1; leave it out for one a core")
        if self.max_bad_records < 0:
            raise ValueError(f"--max-bad-records {self.max_bad_records} must be at least 0; 0 stops at the first")
        if not 0 <= self.allow_lost <= 100:
            raise ValueError(f"--allow-lost {self.allow_lost:g} must lie in 0 <= PERCENT <= 100; 1 is the default")

    def manifest(self, corpus: Corpus, plan: Plan) -> dict[str, Any]:
        """Return everything that decides the result: if two of these are equal, the results' bytes are, too."""
        return {
            "format": _FORMAT,
            "corpus": corpus.flag,
            **self.tokenizer.manifest(),
            "valid_fraction": self.valid_fraction,
            "text_key": self.text_key,
            "files": [{"path": x.file.name, "num_bytes": x.num_bytes, "sha256": x.sha256} for x in plan.files],
        }


class Prepared(NamedTuple):
    """The result in the output directory."""

    output_dir: Path
    reused: bool  # True: an earlier prepare of the same request has left the result
    manifest: dict[str, Any]

    def summary(self) -> str:
        noted = self.manifest
        counts = [
            f"{name} {counted(part['num_documents'], 'document')}, {part['num_tokens']:,} tokens"
            for name, part in noted["parts"].items()
        ]
        sample = noted.get("tokenizer_bytes")
        learned = f", learned from {sample / 2**20:g} MiB spread over the corpus" if sample else ""
        asked = noted["request"].get("vocab_size") or 0  # 0: no tokenizer was trained
        fewer = f" (asked for {asked}: the text has no more to learn)" if noted["vocab_size"] < asked else ""
        left_out = ""
        if noted["num_bad_records"]:
            text = (self.output_dir / BAD_RECORDS_NAME).read_text(encoding="utf-8")
            told = told_losses([json.loads(line) for line in text.splitlines()])
            left_out = f"; left out {noted['lost']['percent']:.2f} % of the bytes ({BAD_RECORDS_NAME}): {told}"
        empty = [file["path"] for file in noted["request"]["files"] if not file["num_bytes"]]
        if num_empty := noted["num_empty"]:
            named = f" (empty files: {first_few(empty)})" if empty else ""
            left_out += f"; {counted(num_empty, 'empty document')} left out{named}"
        return (
            f"{self.output_dir}: {'already prepared' if self.reused else 'prepared'}; "
            f"vocabulary {noted['vocab_size']}{fewer}{learned}; {'; '.join(counts)}{left_out}"
        )


def prepare_corpus(
    corpus: Corpus, output_dir: Path, request: Request, progress: ProgressLine | None = None
) -> Prepared:
    """Make the tokenizer, encode all pieces, join them, and commit by one rename.

    Raises: ValueError naming flag, value and fix; OSError of a full disk or a worker that was killed. After any
    error the finished work is kept beside the output for a rerun.
    """
    progress = progress or ProgressLine()
    output_dir = output_dir.resolve()
    unfinished = output_dir.with_name(f"{output_dir.name}.partial")
    corpus = corpus.outside(output_dir, unfinished)
    plan = make_plan(corpus, progress, request.text_key, request.piece_bytes)
    if not plan.pieces or not plan.num_bytes:
        empty = f"{counted(len(plan.files), 'file')} without a byte or a row"
        raise ValueError(f"{corpus.flag} holds no text, only {empty}; give other files by --input PATH")
    manifest = request.manifest(corpus, plan)
    if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
        return Prepared(output_dir=output_dir, reused=True, manifest=_finished_manifest(output_dir, manifest))
    faults = [line_of(file, 1, BadRecord(file.fault)) for file in plan.files if file.fault]
    check_losses(faults, plan.sizes, request.max_bad_records, request.allow_lost)
    with _work_folder(unfinished, {"piece_bytes": request.piece_bytes, **manifest}):
        # The commit is a rename, which the system refuses if the output has been filled meanwhile.
        with folder_aside(output_dir, inside=unfinished) as result:
            manifest = _write(corpus, plan, request, unfinished, result, progress) | {"request": manifest}
            write_text(result / MANIFEST_NAME, json.dumps(manifest, indent=1) + "\n")
        shutil.rmtree(unfinished)
    return Prepared(output_dir=output_dir, reused=False, manifest=manifest)


@contextmanager
def _work_folder(unfinished: Path, request: dict[str, Any]) -> Iterator[None]:
    """Lock the folder of unfinished work until the end of the block. Work of another request is removed first.

    Raises: ValueError if the folder cannot be made, or another process holds it.
    """
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output: {error}; name a place in a folder that you may write to") from error
    with (unfinished / "lock").open("w") as lock:
        try:
            has_lock = lock_file(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"--output: another prepare is at work in {unfinished}; wait for it, or end it") from error
        if not has_lock:
            log.warning("--output: no locks on this file system: start no other prepare that writes to %s", unfinished)
        wait_for_orphans(unfinished)
        for folder in (unfinished, unfinished / "pieces"):
            remove_asides(folder, "*")
        text = json.dumps(request)
        noted = unfinished / "request.json"
        if not noted.is_file() or noted.read_text(encoding="utf-8") != text:
            noted.unlink(missing_ok=True)  # first: a half-removed folder must belong to no request
            for name in ("pieces", "tokenizer"):
                shutil.rmtree(unfinished / name, ignore_errors=True)
            (unfinished / BAD_RECORDS_NAME).unlink(missing_ok=True)
            write_text(noted, text)
        (unfinished / "pieces").mkdir(exist_ok=True)
        try:
            yield
        except ValueError:
            if not any(any((unfinished / name).glob("*")) for name in ("pieces", "tokenizer")):  # no use for a rerun
                shutil.rmtree(unfinished)
            raise


def _write(
    corpus: Corpus, plan: Plan, request: Request, unfinished: Path, result: Path, progress: ProgressLine
) -> dict[str, Any]:
    """Write everything but the manifest to the result's folder. Return the manifest's facts about it."""
    split = split_of(plan.files, request.valid_fraction)
    num_workers = plan.num_workers(request.num_workers or num_cores())
    make = partial(make_tokenizer, request.tokenizer, plan, split, unfinished / "tokenizer")
    with progress.aside():  # which the other process has for itself
        path = call_apart(unfinished, make) if num_workers > 1 else make()  # frees the trainer's memory
    progress.begin("encoding")
    tokenizer = open_tokenizer(path, request.tokenizer.end_token)
    job = EncodingJob(
        folder=unfinished / "pieces",
        tokenizer=path,
        end_token=tokenizer.end_token,
        fast=tokenizer.speed_up(sample_texts(plan)),
        split=split,
        max_bad_records=request.max_bad_records,
    )
    vocab_size, end_of_text, begin = tokenizer.vocab_size, tokenizer.end_of_text, tokenizer.begin
    del tokenizer  # each worker opens the tokenizer itself
    reports = _encode(job, plan, num_workers, request, progress)
    bad_records = [line for report in reports for line in report.left_out]
    num_empty = sum(report.num_empty for report in reports)
    if not any(report.num_chunks for report in reports):
        for useless in (job.folder, path.parent):
            shutil.rmtree(useless, ignore_errors=True)
        found = f"{counted(num_empty, 'empty document')}; {told_losses(bad_records)}".rstrip("; ")
        fix = "name the key of the text by --text-key, or give other files"
        raise ValueError(f"{corpus.flag} holds no text, only {found}; {fix}")
    progress.begin("joining the pieces")
    counts = merge_pieces(job, reports, result, vocab_size)
    shutil.copytree(path.parent, result, copy_function=shutil.copyfile, dirs_exist_ok=True)
    if bad_records:
        write_lines(result / BAD_RECORDS_NAME, bad_records)
    is_sampled = request.tokenizer.what == TRAIN and plan.num_bytes > TRAIN_BYTES
    return {
        "vocab_size": vocab_size,  # may be below the wanted size: a small corpus has few pairs
        **({"tokenizer_bytes": TRAIN_BYTES} if is_sampled else {}),
        "end_token": {"text": job.end_token, "id": end_of_text},
        **({"begin": begin} if begin else {}),  # ids before each document
        "parts": counts,
        "num_empty": num_empty,
        "num_bad_records": len(bad_records),
        "lost": count_losses(bad_records, plan.sizes),
        "outputs": {
            str(file.relative_to(result)): {"num_bytes": file.stat().st_size, "sha256": file_fingerprint(file)}
            for file in sorted(result.rglob("*"))
            if file.is_file()
        },
    }


def _encode(
    job: EncodingJob, plan: Plan, num_workers: int, request: Request, progress: ProgressLine
) -> list[PieceReport]:
    """Encode the pieces that are not there yet. Return the reports of all pieces.

    Raises: ValueError if too much would be left out; the side file then lists what was found so far.
    """
    missing = dict(enumerate(plan.pieces))
    total = sum(piece.num_bytes for piece in plan.pieces)
    reports = {number: report for number in [*missing] if (report := job.finished_report(number))}
    done = sum(missing.pop(number).num_bytes for number in reports)
    progress.begin(f"encoding {total:,} bytes", total, done)

    def check() -> None:
        lines = [line for number in sorted(reports) for line in reports[number].left_out]
        side_file = job.folder.parent / BAD_RECORDS_NAME
        check_losses(lines, plan.sizes, request.max_bad_records, request.allow_lost, side_file)

    check()
    for number, report in encode_pieces(job, missing, num_workers):
        reports[number] = report
        progress.advance(plan.pieces[number].num_bytes)
        if report.left_out:
            check()
    return [reports[number] for number in sorted(reports)]


def _finished_manifest(output_dir: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest of a directory that holds the complete result of this request.

    Raises: ValueError if the directory holds anything else.
    """
    other = f"--output {str(output_dir)!r}"
    fix = "choose another --output or delete it first"
    try:
        manifest: dict[str, Any] = json.loads((output_dir / MANIFEST_NAME).read_text(encoding="utf-8"))
        there, outputs = manifest["request"], manifest["outputs"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        is_there = (output_dir / MANIFEST_NAME).is_file()
        why = f"its {MANIFEST_NAME} is none of prepare's ({error})" if is_there else f"it has no {MANIFEST_NAME}"
        raise ValueError(f"{other} is not empty and holds no result of prepare: {why}; {fix}") from error
    if details := ", ".join(
        "other files or other contents" if key == "files" else f"{key} {there.get(key)!r}, asked {asked!r}"
        for key, asked in request.items()
        if asked != there.get(key)
    ):
        raise ValueError(f"{other} was prepared otherwise: {details}; {fix}")
    for name, file in outputs.items():
        path = output_dir / name
        size = path.stat().st_size if path.is_file() else None
        if size != file["num_bytes"]:
            raise ValueError(f"{other}: {name} has {size} bytes, the manifest says {file['num_bytes']}; {fix}")
    return manifest
