"""TensorBoard's event files: each scalar and histogram as a record, framed by TensorBoard's own code.

torch's SummaryWriter would write them in a thread, which dies of a disk that is full for a moment, and would open its
file by name again for each record.
"""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megamix.train.log_file import LogFile


class EventFile:
    """Appends to a new event file in `folder`.

    Raises: ValueError if TensorBoard is not installed.
    """

    def __init__(self, folder: Path, first_step: int):
        """TensorBoard forgets what older files in the folder say of `first_step` and later ones."""
        try:
            from tensorboard.compat.proto import event_pb2  # type: ignore[import-untyped]
            from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]
            from torch.utils.tensorboard import summary
        except ImportError as error:
            raise ValueError(
                "metrics.tensorboard = true, but the Python package 'tensorboard' is not installed; "
                "run: pip install 'megamix[tensorboard]', or set metrics.tensorboard=false"
            ) from error
        self._summary: Any = summary
        self._event_pb2, self._record_writer = event_pb2, RecordWriter

        def new_path() -> Path:  # TensorBoard reads files in the order of their names
            return folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"

        self._log = LogFile(new_path, head=self._records([{"file_version": "brain.Event:2"}]))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._log.append(self._records([{"step": first_step, "session_log": start}]))

    def add(self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Mapping[str, Any]]) -> None:
        """Append points by their tags; a histogram is given by the arguments of torch's `histogram_raw`."""
        points = [self._summary.scalar(tag, value) for tag, value in scalars.items()]
        points += [self._summary.histogram_raw(tag, **values) for tag, values in histograms.items()]
        self._log.append(self._records([{"step": step, "summary": point} for point in points]))

    def close(self) -> None:
        self._log.close()

    def _records(self, events: list[dict[str, Any]]) -> bytes:
        buffer = io.BytesIO()
        for event in events:
            self._record_writer(buffer).write(self._event_pb2.Event(wall_time=time.time(), **event).SerializeToString())
        return buffer.getvalue()
