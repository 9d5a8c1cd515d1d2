"""
Checkpoints in shards: each rank writes the parts that it holds with torch.distributed.checkpoint (DCP), by
parameter name, and reads the parts that it holds from shards of any layout. The form is DCP's own, so torch's
tools read them, too.

    __3_0.distcp    the pieces of tensors that rank 3 has written
    .metadata       the shape of each tensor, and where its pieces are
"""

import os
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import MetadataIndex

from isogpt.checkpoint.ckpt_file import reading
from isogpt.common.files import HashedFile, load_pickle, reason_of
from isogpt.launch.together import is_main
from isogpt.parallel.local_parts import LocalPart

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # single-process use is intended
PATHS = {"PosixPath", "Path", "PurePosixPath", "WindowsPath", "PureWindowsPath"}
DTYPES = {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
RECORDS = {name for name, value in vars(metadata).items() if is_dataclass(value)}
# the classes in the pickle of DCP's metadata
METADATA = {
    metadata.__name__: {"_MEM_FORMAT_ENCODING", *RECORDS},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", *DTYPES},
    "torch.serialization": {"_get_layout"},
    "pathlib": PATHS,
    "pathlib._local": PATHS,
}


def write(folder: Path, parts: dict[str, LocalPart], group: dist.ProcessGroup | None) -> dict[str, dict]:
    """
    Write the parts that this rank holds, by name, into a folder (all ranks of `group`; None: one process).
    Returns on rank 0 the manifest's entries of all files, which the ranks have hashed while they wrote them.

    Raises:
        OSError: a rank has failed, or rank 0 does not see what the others have written.
    """
    # the ranks send what they hold to rank 0 only if it has changed since the last call
    planner = SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False, enable_plan_caching=True)
    writer = Writer(folder, planner)
    try:
        dcp.save(parts, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    except CheckpointException as e:
        raise OSError(reason_of(e)) from e
    entries = writer.fs.entries
    if group:  # only rank 0 writes the manifest: on the others, nothing grows with the number of ranks
        written = [{}] * group.size() if is_main() else None
        dist.gather_object(entries, written, group=group)
        entries = {}
        for of_rank in written or ():
            entries |= of_rank
    for name in entries:
        (folder / name).stat()  # a rank may have written to a folder that this one does not see
    return entries


def shapes(folder: Path) -> tuple[dict[str, torch.Size], dict[str, torch.dtype]]:
    """The shape and the dtype of each saved tensor. Raises ValueError if the metadata cannot be read."""
    with reading(folder):
        tensors = {str(name): t for name, t in read_metadata(folder).state_dict_metadata.items()}
        dtypes = {name: tensor.properties.dtype for name, tensor in tensors.items()}
        return {name: torch.Size(tensor.size) for name, tensor in tensors.items()}, dtypes


def read(folder: Path, parts: dict[str, LocalPart]) -> None:
    """
    Fill parts, by name, from a folder of any layout, without communication. Raises ValueError if a file is
    damaged or missing, or would run code.
    """
    if not parts:
        return
    with reading(folder):
        reader = Reader(folder, read_metadata(folder))
        try:
            dcp.load(parts, storage_reader=reader, planner=LoadPlanner(), no_dist=True)
        except CheckpointException as e:  # it is no Exception
            raise OSError(reason_of(e)) from e


def read_metadata(folder: Path) -> dcp.Metadata:
    """Read DCP's metadata, whose pickle may contain only DCP's own classes."""
    if (folder / "tensors.json").exists():
        advice = "convert it with that version's export.py --to=ckpt.pt"
        raise ValueError(f"an earlier version wrote it: {advice}")
    content = load_pickle(folder / ".metadata", METADATA)
    for entry in content.state_dict_metadata.values():
        if not isinstance(entry, dcp.TensorStorageMetadata):
            raise pickle.UnpicklingError("it holds other objects than tensors")
    for info in content.storage_data.values():
        name = info.relative_path
        if Path(name).name != name:
            raise pickle.UnpicklingError("it names files elsewhere")
    return content


class HashedFiles(FileSystem):
    """
    DCP's file system for new files, so that no link to a file elsewhere is followed. `entries` are the
    manifest's entries of the files, which are hashed while they are written.
    """

    def __init__(self) -> None:
        self.entries: dict[str, dict] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[HashedFile]:
        try:
            with HashedFile(path) as file:
                yield file
        # torch.save's error hides that of the disk, and its context is lost on the way to the other ranks
        except Exception as e:
            raise OSError(reason_of(e)) from e
        self.entries[Path(path).name.removesuffix(".tmp")] = file.entry()  # .metadata is renamed


class Writer(dcp.FileSystemWriter):
    """DCP's writer of files that are hashed."""

    def __init__(self, folder: Path, planner: "SavePlanner") -> None:
        # copying ahead is not needed, since the parts are copies, and it uses GPU 0 on every rank
        super().__init__(folder, per_thread_copy_ahead=0)
        self.fs, self.planner = HashedFiles(), planner

    def finish(self, metadata: dcp.Metadata, results: list) -> None:
        super().finish(self.planner.metadata, results)


class Reader(dcp.FileSystemReader):
    """DCP's reader, with metadata that was read without running code."""

    def __init__(self, folder: Path, metadata: dcp.Metadata) -> None:
        super().__init__(folder)
        self.metadata = metadata

    def read_metadata(self, *args: object, **kwargs: object) -> dcp.Metadata:
        return self.metadata


class SavePlanner(dcp.DefaultSavePlanner):
    """DCP's planner for LocalParts: ranks can hold several pieces of a tensor."""

    def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> tuple[list[dcp.SavePlan], dcp.Metadata]:
        plans, _ = super().create_global_plan(all_plans)
        return plans, dcp.Metadata({})  # DCP sends it to all ranks; Writer takes self.metadata

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return dict(self.state_dict[index.fqn].pieces)[tuple(index.offset)]


class LoadPlanner(dcp.DefaultLoadPlanner):
    """The same for loading."""

    def set_up_planner(self, state_dict: dict, metadata: dcp.Metadata, is_coordinator: bool) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator
        self.flatten_state_dict = False

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        # by number: pieces that are copies of each other have the same offset
        return self.state_dict[index.fqn].pieces[index.index][1]
