"""
Checkpoints in shards: each rank writes what it holds with torch.distributed.checkpoint (DCP), by parameter name, and
reads what it holds from shards of any layout.
"""

import pickle
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from isogpt.files import load_pickle

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # single-process use is intended
ERRORS = (Exception, CheckpointException)
PATHS = {"PosixPath", "Path", "PurePosixPath", "WindowsPath", "PureWindowsPath"}
# the classes in the pickle of DCP's metadata
METADATA = {
    "torch.distributed.checkpoint.metadata": {"Metadata", "MetadataIndex", "TensorStorageMetadata", "StorageMeta",
                                              "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "pathlib": PATHS, "pathlib._local": PATHS,
}  # fmt: skip


def start_write(folder: Path, weights: dict, state: dict, group: dist.ProcessGroup | None) -> Future:
    """Start to write this rank's part into folder (all ranks of group); returns when the tensors have been copied."""
    content, writer = {"model": weights, "optim": state}, writer_for(folder)
    if any(w.device.type != "cpu" for w in weights.values()):
        return dcp.async_save(content, storage_writer=writer, process_group=group)
    # on a CPU DCP's staging takes longer for each tensor than a plain copy
    content["model"] = {name: copy_of(w) for name, w in weights.items()}
    content["optim"] = {name: {k: copy_of(v) for k, v in tensors.items()} for name, tensors in state.items()}
    background = ThreadPoolExecutor(1, thread_name_prefix="shards")
    return background.submit(dcp.save, content, storage_writer=writer, process_group=group)


def writer_for(folder: Path) -> dcp.FileSystemWriter:
    """DCP's writer. Without copying ahead, which the tensors' copies do not need and which uses GPU 0 on every rank."""
    return dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)


def copy_of(value: Tensor) -> Tensor:
    """A copy of a tensor, or of this rank's part of a DTensor."""
    if not hasattr(value, "to_local"):
        return value.clone()
    part, layout = value.to_local().clone(), (value.device_mesh, value.placements)
    return DTensor.from_local(part, *layout, run_check=False, shape=value.shape, stride=value.stride())


def write(folder: Path, weights: dict, state: dict) -> None:
    """Write everything from one process. Raises OSError."""
    try:
        dcp.save({"model": weights, "optim": state}, storage_writer=writer_for(folder), no_dist=True)
    except CheckpointException as e:
        raise OSError(str(e).strip().splitlines()[-1].removeprefix("OSError: ")) from e


def read(folder: Path, wanted: dict) -> None:
    """
    Fill the tensors of wanted, {"model": by name, "optim": by name}, from the parts that overlap with them.

    Raises:
        any of ERRORS: a file is damaged, or its pickle would run code.
    """
    reader = PlainReader(folder)
    reader.read_metadata()  # DCP reads it again, but would wrap an error of ours into a page of log
    dcp.load(wanted, storage_reader=reader, no_dist=True)


class PlainReader(dcp.FileSystemReader):
    """DCP's reader, restricted: the pickled metadata may contain only DCP's own classes, and only tensors are read."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        metadata = load_pickle(Path(self.path) / ".metadata", METADATA)
        if not all(isinstance(m, TensorStorageMetadata) for m in metadata.state_dict_metadata.values()):
            raise pickle.UnpicklingError("it holds objects other than tensors")  # DCP would unpickle them unchecked
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
