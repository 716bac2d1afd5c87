"""Readers of a column of strings in Parquet files, or in Arrow files as `datasets` saves them."""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from megamix.data import import_extra
from megamix.data.prepare.records import BadRecord, Records, Stretch, decoded

_ROWS = 64  # rows of Parquet read at a time: a row of text may be long
_STRINGS = ("string", "large_string", "string_view", "null")  # null: a shard without a single text

Columns: TypeAlias = Callable[[Any, str, Stretch, str], Iterator[Any]]


def table_fault(path: str, kind: str) -> str:
    """Return why nothing can be read of a table, by its footer or head; empty if something may be."""
    pyarrow = _import_pyarrow(path)
    try:
        if kind == "parquet":
            pyarrow.parquet.read_metadata(path)
        else:
            next(_batches(pyarrow, path), None)
    except (pyarrow.ArrowException, OSError) as error:
        return f"no table that can be read: {error}"
    return ""


def cut_parquet(path: str) -> list[Stretch]:
    metadata = _import_pyarrow(path).parquet.read_metadata(path)
    stretches, num_rows = [], 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        stretches.append(Stretch(number, number + 1, num_rows, group.total_byte_size))
        num_rows += group.num_rows
    return stretches


def read_table(columns: Columns, path: str, text_key: str, stretch: Stretch) -> Records:
    """Yield the records of a column. Strings are read as bytes, so that one that is not UTF-8 does not affect others.

    `columns`: `parquet_columns` or `arrow_columns`.
    """
    pyarrow = _import_pyarrow(path)
    try:
        for column in columns(pyarrow, path, stretch, text_key):
            for content in column.cast(pyarrow.large_binary()).to_pylist():
                yield "" if content is None else decoded(content)
    except (pyarrow.ArrowException, OSError) as error:
        yield BadRecord(f"no table that can be read: {error}")


def parquet_columns(pyarrow: Any, path: str, stretch: Stretch, text_key: str) -> Iterator[Any]:
    with pyarrow.parquet.ParquetFile(path) as file:
        _check_column(path, file.schema_arrow, text_key)
        groups = list(range(stretch.start, stretch.stop))
        for batch in file.iter_batches(batch_size=_ROWS, row_groups=groups, columns=[text_key], use_threads=False):
            yield batch.column(0)


def arrow_columns(pyarrow: Any, path: str, stretch: Stretch, text_key: str) -> Iterator[Any]:
    for batch in _batches(pyarrow, path):  # mapped: memory holds one
        _check_column(path, batch.schema, text_key)
        yield batch.column(text_key)


def _batches(pyarrow: Any, path: str) -> Iterator[Any]:
    with pyarrow.memory_map(path) as file:
        if file.read(6) == b"ARROW1":
            reader = pyarrow.ipc.open_file(file)
            yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            file.seek(0)
            yield from pyarrow.ipc.open_stream(file)


def _import_pyarrow(path: str) -> Any:
    return import_extra("pyarrow", "data", "ipc", "parquet", what=f"{path}: ")


def _check_column(path: str, schema: Any, text_key: str) -> None:
    """Refuse a table without such a column of strings. Raises: ValueError."""
    fix = "name the column of the text by --text-key"
    if text_key not in schema.names:
        raise ValueError(f"{path} has no column {text_key!r} (columns: {', '.join(schema.names)}); {fix}")
    kind = schema.field(text_key).type
    if "list" in str(kind):
        fix = f"make a row of each string (pandas: explode({text_key!r})), or {fix}"
    if str(kind.value_type if hasattr(kind, "index_type") else kind) not in _STRINGS:  # or a dictionary of strings
        raise ValueError(f"{path}: column {text_key!r} holds {kind}, not strings; {fix}")
