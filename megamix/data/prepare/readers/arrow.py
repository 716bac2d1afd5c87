"""A column of an Arrow file, as `datasets` saves them: a stream of batches, or a file of batches with a footer."""

from collections.abc import Iterator
from typing import Any

from megamix.data.prepare.readers.columns import check_column, import_pyarrow, read_column
from megamix.data.prepare.readers.record import BadRecord, Blocks, Records, Stretch


def cut(path: str, blocks: Blocks, piece_bytes: int) -> list[Stretch]:
    pyarrow = import_pyarrow(path)
    stretches: list[Stretch] = []
    start, num_rows_before, num_rows, num_bytes, number = 0, 0, 0, 0, -1
    try:
        for number, batch in enumerate(_batches(pyarrow, path)):  # mapped: only the heads of batches are read
            num_rows += batch.num_rows
            num_bytes += batch.nbytes
            if num_bytes >= piece_bytes:
                stretches.append(Stretch(start, number + 1, num_rows_before, num_bytes))
                start, num_rows_before, num_bytes = number + 1, num_rows, 0
    except (pyarrow.ArrowException, OSError):
        num_bytes, number = num_bytes + 1, number + 1  # the batch that `read` will stumble over
    if num_bytes:
        stretches.append(Stretch(start, number + 1, num_rows_before, num_bytes))
    return stretches


def read(path: str, stretch: Stretch, text_key: str) -> Records:
    pyarrow = import_pyarrow(path)
    num_rows = stretch.num_records_before
    try:
        for number, batch in enumerate(_batches(pyarrow, path)):
            if number >= stretch.stop:
                break
            if number >= stretch.start:
                check_column(path, batch.schema, text_key)
                yield from read_column(pyarrow, batch.column(text_key), num_rows)
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
