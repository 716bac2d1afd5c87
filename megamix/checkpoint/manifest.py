"""The manifest: the JSON file that says what a checkpoint holds. A folder without a manifest is no checkpoint.

Its last line is a checksum of every byte before that line. It tells a damaged manifest from one that was written wrong.

JSON is checked when it is read: unknown fields and other types are refused.
"""

import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from safetensors import SafetensorError

from megamix.config import ConfigError, saved_tree


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the path before the text of any error about the file's content. Raises: ValueError instead of that error."""
    try:
        yield
    except (ValueError, SafetensorError) as error:
        raise ValueError(f"{path}: {error}") from None


class DamagedCheckpoint(ValueError):
    """The error of a checkpoint that must not be loaded. Each of `problems` is a line that names a file."""

    def __init__(self, problems: list[str]):
        self.problems = problems
        super().__init__("; ".join(self.problems))


class Record(BaseModel):
    """Base class of everything that is kept as JSON."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse a record. Raises: ValueError naming the wrong fields."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            where = [f"{'.'.join(map(str, it['loc'])) or 'the text'}: {it['msg']}" for it in error.errors()]
            raise ValueError("; ".join(where)) from None


_VERSION = re.compile(rb'\{\s*"format": "megamix checkpoint",\s*"version": (\d{1,9}),')
# The last commit that reads each version. Version 1 has other configuration keys and names in `layout`, version 2 other
# names in `layout`.
_LAST_TO_READ = {"1": "50476c4", "2": "27f03f17"}
_CHECKSUM_LINE = ',\n"crc32":"%08x"}\n'
_CHECKSUM_LENGTH = len(_CHECKSUM_LINE % 0)

Dtype = Literal["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"]  # safetensors' names
# Dtypes by name of the state. F32[n] is that of FP32 numbers with a shape of their own: one dim, of length n.
StateSet = dict[str, str]

# The state name of the weights. It equals update_slice.MASTER, whose module would import torch. The optimizer names the
# other states.
MASTER = "master"
AVERAGE = "average"  # the state name of an average of the weights; likewise update_slice.AVERAGE
BUFFER = "buffer"  # the only state name of a persistent buffer
OF_BUFFER: StateSet = {BUFFER: "F32"}  # the states of a router's biases
UNTRAINED: StateSet = {MASTER: "F32"}  # the states of a model that nobody has trained yet


def states_text(states: StateSet) -> str:
    """Return a set's state names as text, each with its dtype unless the dtype is FP32."""
    return ", ".join(state if dtype == "F32" else f"{state} ({dtype})" for state, dtype in states.items())


class FileRecord(Record):
    """One file: its name in the checkpoint's folder, its size in bytes and its checksum."""

    name: Annotated[str, Field(pattern=r"^rank_\d{5,9}\.safetensors$")]  # the pattern admits no path out of the folder
    size: int
    crc32: int


def check_size(path: Path, record: FileRecord) -> None:
    """Refuse a file that is missing, or of another size. Raises: ValueError, OSError."""
    if not path.is_file():
        raise ValueError(f"{path}: not there, or no file")
    if (size := path.stat().st_size) != record.size:
        raise ValueError(f"{path}: {size} bytes, but {record.size} were written")


class ParamRecord(Record):
    """One whole parameter or persistent buffer, under its first registered name."""

    name: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...]
    state_set: int = Field(default=0, alias="states")  # index of its set in `Manifest.states`


class LayoutRecord(Record):
    """The layout of the ranks that saved. It only informs people: loading does not depend on it."""

    axes: dict[str, int]  # ranks along each axis, in the order of the mesh
    buckets: tuple[int, ...]  # elements of each bucket of the first rank, with padding


class RunRecord(Record):
    """Holds the values that the caller gets back with the state. A checkpoint keeps them unchanged."""

    progress: dict[str, JsonValue] = Field(default_factory=dict)  # such as consumed samples and batches to try again
    config: str = ""  # the effective configuration, TOML
    fingerprints: dict[str, str] = Field(default_factory=dict)  # fingerprints of data files, by configuration key
    code: dict[str, str] = Field(default_factory=dict)  # versions and hashes of sources; empty: not recorded
    # The rule by which every random number follows from its arguments, so there is no generator state to keep.
    rng_rule: str = ""

    def tables(self) -> dict[str, dict[str, Any]]:
        """Return the configuration, by section, with the present keys. Raises: ValueError if it is no TOML."""
        return saved_tree(self.config)


class Manifest(Record):
    """Everything that a checkpoint says about itself."""

    format: Literal["megamix checkpoint"] = "megamix checkpoint"
    version: Literal[3] = 3
    applied_updates: int
    skipped_steps: int
    loss_scale: dict[str, float | list[float]]  # by the loss scale's own state names
    loss_scale_rule: str | None = None  # the rule whose states `loss_scale` has; None: nobody has trained the model
    run: RunRecord
    layout: LayoutRecord
    states: tuple[StateSet, ...]  # sets of states: "master" and the optimizer's states, or "buffer" alone
    params: tuple[ParamRecord, ...]
    # Dtype and SHA-256 of each frozen parameter, by name, in checkpoints of a version that saved no frozen values.
    frozen: dict[str, str] | None = None
    files: tuple[FileRecord, ...] = ()

    @property
    def weights_only(self) -> bool:
        """Return whether the checkpoint holds only masters and buffers, with which a run begins, and no state of a
        training.
        """
        trained = any(states != UNTRAINED for states in self.states if [*states] != [BUFFER])
        return not (trained or self.applied_updates or self.run.progress)

    def tensors(self) -> Iterator[tuple[str, str, tuple[int, ...], str]]:
        """Yield every tensor that the files hold: name of the parameter or buffer, state, shape, dtype."""
        for param in self.params:
            for state, dtype in self.states[param.state_set].items():
                dtype, _, length = dtype.rstrip("]").partition("[")
                yield param.name, state, (int(length),) if length else param.shape, dtype


def manifest_text(manifest: Manifest) -> bytes:
    body = manifest.model_dump_json(indent=1, by_alias=True).removesuffix("\n}").encode()
    return body + (_CHECKSUM_LINE % zlib.crc32(body)).encode()


def _refuse_other_version(path: Path, body: bytes) -> None:
    """Refuse a manifest of another version. Raises: ConfigError. It is not DamagedCheckpoint, because a checkpoint must
    not be set aside only because this code cannot read it.
    """
    found = _VERSION.match(body)
    if found is None or found[1] == b"3":
        return
    version = found[1].decode()
    fix = "update megamix to the version that saved it"
    if version in _LAST_TO_READ:
        fix = f"commit {_LAST_TO_READ[version]} is the last that reads it: train or export its weights with that commit"
    raise ConfigError([f"{path}: its version is {version}, but this megamix reads version 3; {fix}"], "job")


def read_manifest(path: Path) -> Manifest:
    """Read and check a manifest.

    Raises: ValueError naming the file, and the field if one is wrong; ConfigError for another version; OSError.
    """
    if not path.is_file():
        raise ValueError(f"{path}: not there, or no file")
    text = path.read_bytes()
    body, checksum = text[:-_CHECKSUM_LENGTH], text[-_CHECKSUM_LENGTH:]
    if checksum != (_CHECKSUM_LINE % zlib.crc32(body)).encode():
        is_prepared = any(path.parent.glob("*.idx"))
        why = "it describes prepared texts, no checkpoint" if is_prepared else "its checksum does not fit its content"
        raise ValueError(f"{path}: {why}")
    _refuse_other_version(path, body)
    with naming(path):
        return Manifest.from_json(body + b"}")
