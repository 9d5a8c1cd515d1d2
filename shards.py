"""
A save in shards: each rank writes what it holds with torch.distributed.checkpoint (DCP), by the names of an unsharded
model, and reads what it holds, whatever layout wrote it. checkpoint.py says when, where, and which one.
"""

import pickle
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.tensor import DTensor

ERRORS = (Exception, CheckpointException)


def start_write(folder: Path, weights: dict, moments: dict, group: dist.ProcessGroup | None) -> Future:
    """Begin to write this rank's part into folder (all ranks of group); returns when the tensors have been copied."""
    state, writer = {"model": weights, "optim": moments}, dcp.FileSystemWriter(folder)
    if any(w.device.type != "cpu" for w in weights.values()):
        return dcp.async_save(state, storage_writer=writer, process_group=group)
    # on a CPU DCP's own way of copying takes longer for each tensor than the copy does
    state["model"] = {name: copy_of(w) for name, w in weights.items()}
    state["optim"] = {name: {k: copy_of(v) for k, v in m.items()} for name, m in moments.items()}
    background = ThreadPoolExecutor(1, thread_name_prefix="shards")
    return background.submit(dcp.save, state, storage_writer=writer, process_group=group)


def copy_of(value: Tensor) -> Tensor:
    """A copy of a tensor, or of what this rank holds of a DTensor."""
    if not hasattr(value, "to_local"):
        return value.clone()
    local = value.to_local().clone()
    return DTensor.from_local(
        local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )


def write(folder: Path, weights: dict, moments: dict) -> None:
    """Write all of it, from one process."""
    dcp.save({"model": weights, "optim": moments}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def read(folder: Path, wanted: dict) -> None:
    """
    Fill the tensors of wanted, {"model": by name, "optim": by name}, from the pieces that overlap with them.

    Raises:
        any of ERRORS: a file is damaged, or its pickle names what it should not.
    """
    reader = PlainReader(folder)
    reader.read_metadata()  # DCP reads it again, but would wrap what this raises in a page of log
    dcp.load(wanted, storage_reader=reader, no_dist=True)


class PlainReader(dcp.FileSystemReader):
    """DCP's reader, but its metadata, a pickle, may only name DCP's own records, and only tensors are read."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as f:
            metadata = MetadataUnpickler(f).load()
        if not all(isinstance(m, TensorStorageMetadata) for m in metadata.state_dict_metadata.values()):
            raise pickle.UnpicklingError("it holds objects other than tensors")  # DCP would unpickle those freely
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class MetadataUnpickler(pickle.Unpickler):
    """Reads the dataclasses of DCP's metadata and nothing that could run."""

    RECORDS = {
        "torch.distributed.checkpoint.metadata": {
            "Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
            "StorageMeta", "_MEM_FORMAT_ENCODING",
        },
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch": {"Size"},
        "torch.serialization": {"_get_layout"},
        "pathlib": {"PosixPath", "Path", "PurePosixPath"},
        "pathlib._local": {"PosixPath", "Path", "PurePosixPath"},
    }  # fmt: skip

    def find_class(self, module: str, name: str) -> object:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name in self.RECORDS.get(module, ()) or dtype:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it wants to run {module}.{name}")
