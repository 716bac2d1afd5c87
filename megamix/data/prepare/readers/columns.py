"""A column of strings, for the readers of tables."""

from typing import Any

from megamix.data.prepare.readers.record import BadRecord, Records, decoded


def import_pyarrow(path: str) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(
            f"{path}: the Python package 'pyarrow' is not installed; run: pip install 'megamix[data]'"
        ) from error
    return pyarrow


def check_column(path: str, schema: Any, text_key: str) -> None:
    """Raises: ValueError if the table has no such column of strings."""
    fix = "name the column of the text by --text-key"
    if text_key not in schema.names:
        raise ValueError(f"{path} has no column {text_key!r} (columns: {', '.join(schema.names)}); {fix}")
    kind = schema.field(text_key).type
    value_kind = getattr(kind, "value_type", kind)  # of a dictionary
    if str(value_kind) not in ("string", "large_string", "string_view"):
        raise ValueError(f"{path}: column {text_key!r} holds {kind}, not strings; {fix}")


def read_column(pyarrow: Any, column: Any, num_rows_before: int) -> Records:
    """Its documents. Strings are taken as bytes: one that is not UTF-8 must not cost its neighbours."""
    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    for number, content in enumerate(column.cast(pyarrow.large_binary()).to_pylist(), num_rows_before + 1):
        yield BadRecord(number, "null, not a string") if content is None else decoded(number, content)
