"""Readers of a column of strings in Parquet files, or in Arrow files as `datasets` saves them."""

from collections.abc import Iterator
from typing import Any

from megamix.data import import_extra
from megamix.data.prepare.records import BadRecord, Blocks, Records, Stretch, decoded

_ROWS = 64  # rows of Parquet read at a time: a row of text may be long


def cut_parquet(path: str, blocks: Blocks, piece_bytes: int) -> list[Stretch]:
    pyarrow = _import_pyarrow(path)
    try:
        metadata = pyarrow.parquet.read_metadata(path)
    except (pyarrow.ArrowException, OSError):
        return [Stretch(0, 0, 0, 0)]  # `read` will report the damage
    stretches, num_rows = [], 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        stretches.append(Stretch(number, number + 1, num_rows, group.total_byte_size))
        num_rows += group.num_rows
    return stretches


def read_parquet(path: str, stretch: Stretch, text_key: str) -> Records:
    pyarrow = _import_pyarrow(path)
    number = stretch.num_records_before
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _check_column(path, file.schema_arrow, text_key)
            groups = list(range(stretch.start, stretch.stop))
            for batch in file.iter_batches(batch_size=_ROWS, row_groups=groups, columns=[text_key], use_threads=False):
                yield from _read_column(pyarrow, batch.column(0), number)
                number += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        yield BadRecord(number + 1, f"no Parquet that can be read: {error}")


def cut_arrow(path: str, blocks: Blocks, piece_bytes: int) -> list[Stretch]:
    pyarrow = _import_pyarrow(path)
    stretches: list[Stretch] = []
    start, num_rows_before, num_rows, num_bytes, number = 0, 0, 0, 0, -1
    try:
        for number, batch in enumerate(_batches(pyarrow, path)):  # mapped: only batches' headers are read
            num_rows += batch.num_rows
            num_bytes += batch.nbytes
            if num_bytes >= piece_bytes:
                stretches.append(Stretch(start, number + 1, num_rows_before, num_bytes))
                start, num_rows_before, num_bytes = number + 1, num_rows, 0
    except (pyarrow.ArrowException, OSError):
        num_bytes, number = num_bytes + 1, number + 1  # include the batch at which `read` will report the damage
    if num_bytes:
        stretches.append(Stretch(start, number + 1, num_rows_before, num_bytes))
    return stretches


def read_arrow(path: str, stretch: Stretch, text_key: str) -> Records:
    pyarrow = _import_pyarrow(path)
    num_rows = stretch.num_records_before
    try:
        for number, batch in enumerate(_batches(pyarrow, path)):
            if number >= stretch.stop:
                break
            if number >= stretch.start:
                _check_column(path, batch.schema, text_key)
                yield from _read_column(pyarrow, batch.column(text_key), num_rows)
                num_rows += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        yield BadRecord(num_rows + 1, f"no Arrow data that can be read: {error}")


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
    value_kind = getattr(kind, "value_type", kind)  # a dictionary-encoded column has its values' type
    if str(value_kind) not in ("string", "large_string", "string_view"):
        raise ValueError(f"{path}: column {text_key!r} holds {kind}, not strings; {fix}")


def _read_column(pyarrow: Any, column: Any, num_rows_before: int) -> Records:
    """Yield a column's documents. Strings are read as bytes, so that one that is not UTF-8 does not affect others."""
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    for number, content in enumerate(column.cast(pyarrow.large_binary()).to_pylist(), num_rows_before + 1):
        yield BadRecord(number, "null, not a string") if content is None else decoded(number, content)
