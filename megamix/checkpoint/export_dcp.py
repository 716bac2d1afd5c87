"""The export of a checkpoint as a folder of torch.distributed.checkpoint (DCP): full tensors under torch's names.

`model.NAME` holds the masters in FP32, under every name of a shared parameter, and the buffers. `average.NAME` holds
their average, if the run kept one.
`optimizer.state.NAME.STATE` holds the optimizer's states. Its `step` is the number of applied updates, as in torch's
AdamW. A checkpoint does not hold the optimizer's settings (torch's `param_groups`); it holds the run's configuration.
"""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from megamix.checkpoint.boxes import Box, sub_boxes
from megamix.checkpoint.folder import new_folder
from megamix.checkpoint.manifest import AVERAGE, BUFFER, MASTER
from megamix.checkpoint.snapshot import DTYPES
from megamix.checkpoint.verify import Checkpoint

_Path = tuple[str, ...]  # a tensor's keys in the nested state dict that DCP's users load


def export_dcp(checkpoint: Checkpoint, output: Path) -> None:
    """Write a folder that torch.distributed.checkpoint.load reads. Memory holds one box at a time. The folder appears
    at `output` only when it is complete.

    Raises: ValueError if `output` exists; OSError.
    """
    with new_folder(output, "OUT:") as aside:
        try:
            with warnings.catch_warnings(category=UserWarning, action="ignore"):  # DCP warns of a single process
                save({}, storage_writer=FileSystemWriter(aside), planner=_Planner(checkpoint), no_dist=True)
        except CheckpointException as error:  # it is no Exception but a BaseException, which callers would miss
            reasons = "; ".join(str(reason) for reason, _ in error.failures.values())
            raise OSError(f"{output} cannot be written: {reasons}") from None


class _Planner(DefaultSavePlanner):
    """A planner that plans by the manifest alone, and reads each box when torch is about to write it."""

    def __init__(self, checkpoint: Checkpoint):
        super().__init__()
        self._checkpoint = checkpoint
        self._items = list[WriteItem]()
        self._nesting: dict[str, _Path] = {}  # by torch's flat name
        self._reads: dict[MetadataIndex, Callable[[], Tensor]] = {}

    def create_local_plan(self) -> SavePlan:
        manifest = self._checkpoint.manifest
        step = torch.tensor(float(manifest.applied_updates))
        names = {param.name: (param.name, *param.aliases) for param in manifest.params}
        for name, state, shape, dtype in manifest.tensors():
            for stored in self._checkpoint.stored[name, state]:
                for sub_box in sub_boxes(stored.box):
                    for path in _paths(names[name], state):
                        self._add(path, shape, DTYPES[dtype], sub_box, partial(self._checkpoint.read, stored, sub_box))
            if state == MASTER:
                self._add(("optimizer", "state", name, "step"), (), step.dtype, Box.whole(()), lambda: step)
        self.plan = SavePlan(self._items, planner_data=self._nesting)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._reads[write_item.index]()

    def _add(
        self, path: _Path, shape: tuple[int, ...], dtype: torch.dtype, sub_box: Box, read: Callable[[], Tensor]
    ) -> None:
        where = ChunkStorageMetadata(torch.Size(sub_box.offset), torch.Size(sub_box.size))
        content = TensorWriteData(where, TensorProperties(dtype=dtype), torch.Size(shape))
        index = MetadataIndex(".".join(path), where.offsets)
        self._items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=content))
        self._nesting[index.fqn] = path
        self._reads[index] = read


def _paths(names: tuple[str, ...], state: str) -> list[_Path]:
    if state in (MASTER, BUFFER, AVERAGE):
        table = AVERAGE if state == AVERAGE else "model"
        return [(table, name) for name in names]
    return [("optimizer", "state", names[0], state)]
