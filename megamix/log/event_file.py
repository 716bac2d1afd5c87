"""TensorBoard event file of a run."""

import io
import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megamix.base.log_file import LogFile


class EventFile:
    """New TensorBoard event file in `folder`: each scalar, histogram and text is one record.

    TensorBoard's own code frames the records. torch's SummaryWriter would write them in a thread, which ends at the
    first error of a full disk.
    """

    def __init__(self, folder: Path, first_step: int):
        """Start a new file; TensorBoard forgets the points of older files in the folder from `first_step` on."""
        from tensorboard.compat.proto import event_pb2  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]
        from torch.utils.tensorboard import summary

        self._summary: Any = summary
        self._event_pb2, self._record_writer = event_pb2, RecordWriter
        # TensorBoard reads files in the order of their names.
        path = folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._log = LogFile(path, head=self._records([{"file_version": "brain.Event:2"}]))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._log.append(self._records([{"step": first_step, "session_log": start}]))

    def add(self, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Mapping[str, Any]]) -> None:
        """Append points by their tags. A histogram is given as the arguments of torch's `histogram_raw`."""
        points = [self._summary.scalar(tag, value) for tag, value in scalars.items()]
        points += [self._summary.histogram_raw(tag, **values) for tag, values in histograms.items()]
        self._log.append(self._records([{"step": step, "summary": point} for point in points]))

    def text(self, step: int, tag: str, markdown: str) -> None:
        self._log.append(self._records([{"step": step, "summary": self._summary.text(tag, markdown)}]))

    def hparams(self, settings: Mapping[str, Any], metrics: Sequence[str]) -> None:
        """Append the settings that tell this run from others, and the tags by which it is judged."""
        points = self._summary.hparams(dict(settings), dict.fromkeys(metrics))
        self._log.append(self._records([{"summary": point} for point in points]))

    def close(self) -> None:
        self._log.close()

    def _records(self, events: list[dict[str, Any]]) -> bytes:
        buffer = io.BytesIO()
        for event in events:
            self._record_writer(buffer).write(self._event_pb2.Event(wall_time=time.time(), **event).SerializeToString())
        return buffer.getvalue()
