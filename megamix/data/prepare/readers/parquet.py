"""A column of a Parquet file; row groups are read on their own."""

from megamix.data.prepare.readers.columns import check_column, import_pyarrow, read_column
from megamix.data.prepare.readers.record import BadRecord, Blocks, Records, Stretch

_ROWS = 64  # read in one go: a row of text may be long


def cut(path: str, blocks: Blocks, piece_bytes: int) -> list[Stretch]:
    pyarrow = import_pyarrow(path)
    try:
        metadata = pyarrow.parquet.read_metadata(path)
    except (pyarrow.ArrowException, OSError):
        return [Stretch(0, 0, 0, 0)]  # `read` will say so
    stretches, num_rows = [], 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        stretches.append(Stretch(number, number + 1, num_rows, group.total_byte_size))
        num_rows += group.num_rows
    return stretches


def read(path: str, stretch: Stretch, text_key: str) -> Records:
    pyarrow = import_pyarrow(path)
    number = stretch.num_records_before
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            check_column(path, file.schema_arrow, text_key)
            groups = list(range(stretch.start, stretch.stop))
            for batch in file.iter_batches(batch_size=_ROWS, row_groups=groups, columns=[text_key], use_threads=False):
                yield from read_column(pyarrow, batch.column(0), number)
                number += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        yield BadRecord(number + 1, f"no Parquet that can be read: {error}")
