"""
Checkpoints in shards: each rank writes the parts that it holds with torch.distributed.checkpoint (DCP), by
parameter name, and reads the parts that it holds from shards of any layout.
"""

import io
import os
import pickle
import socket
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from isogpt.checkpoint.manifest import damaged_file
from isogpt.common.files import HashedFile, check_no_link, check_regular, load_pickle, reason_of
from isogpt.parallel.local_parts import LocalPart

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # single-process use is intended
PATHS = {"PosixPath", "Path", "PurePosixPath", "WindowsPath", "PureWindowsPath"}
# the classes in the pickle of DCP's metadata
METADATA = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "StorageMeta",
        "ChunkStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "pathlib": PATHS,
    "pathlib._local": PATHS,
}


def write(folder: Path, parts: dict[str, LocalPart], group: dist.ProcessGroup | None) -> dict:
    """
    Write the parts that this rank holds, by name, into a folder (all ranks of `group`; None: one process).
    Returns when all ranks have written. Raises OSError if a rank fails, or if files are missing on rank 0.

    Returns:
        On rank 0 the manifest's entries of all files, which each rank has hashed while it wrote its own; on
        other ranks {}.
    """
    writer = Writer(folder)
    try:
        dcp.save(
            parts,
            storage_writer=writer,
            planner=SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as e:
        raise OSError(reason_of(e)) from e
    is_first = group is None or dist.get_rank(group) == 0
    if is_first:
        check_complete(folder)
    entries = [writer.fs.entries]
    if group is not None:
        entries = [None] * dist.get_world_size(group) if is_first else []
        dist.gather_object(writer.fs.entries, entries if is_first else None, group=group, group_dst=0)
    return {name: entry for of_rank in entries for name, entry in of_rank.items()}


def check_complete(folder: Path) -> None:
    """
    Raise OSError if a file that the metadata names is missing or too short, as when ranks write to different
    folders.
    """
    ends = {}  # where the last tensor of each file ends
    for saved in PlainReader(folder).read_metadata().storage_data.values():
        ends[saved.relative_path] = max(saved.offset + saved.length, ends.get(saved.relative_path, 0))
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    if incomplete := sorted(name for name, end in ends.items() if sizes.get(name, 0) < end):
        names = ", ".join(incomplete[:3])
        raise OSError(
            f"{len(incomplete)} of {len(ends)} files of the checkpoint are missing or too short in "
            f"{folder.absolute()} ({names}): do all ranks write to this folder?"
        )


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Raise ValueError if reading a folder in the block fails; damaged files raise nearly anything."""
    try:
        yield
    except (Exception, CheckpointException) as e:
        raise ValueError(f"{folder} cannot be loaded: {reason_of(e)[:300]}") from e


def shapes(folder: Path, unverified: dict) -> dict[str, torch.Size]:
    """The shape of each saved tensor, by name. Raises ValueError if the metadata cannot be read."""
    with explained(folder):
        saved = PlainReader(folder, unverified).read_metadata().state_dict_metadata
        return {str(name): torch.Size(tensor.size) for name, tensor in saved.items()}


class NewFiles(FileSystem):
    """
    DCP's file system for writing, with new files only: no link to a file elsewhere is followed. `entries` are
    the manifest's entries of the files, which are hashed while they are written.
    """

    def __init__(self) -> None:
        self.entries: dict[str, dict] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[HashedFile]:
        with super().create_stream(path, mode.replace("w", "x")) as file:
            hashed = HashedFile(file)
            yield hashed
        self.entries[Path(path).name] = hashed.entry()

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.entries[Path(new_path).name] = self.entries.pop(Path(path).name)


class Writer(dcp.FileSystemWriter):
    """DCP's writer, with errors that say why a file could not be written."""

    def __init__(self, folder: Path) -> None:
        # copying ahead is not needed, since the parts are copies, and it uses GPU 0 on every rank
        super().__init__(folder, per_thread_copy_ahead=0)
        self.fs = NewFiles()

    def write_data(self, *args: object) -> object:
        try:
            check_no_link(Path(self.path))
            return super().write_data(*args)
        # the context of torch.save's error, such as a full disk, is lost on the way to the other ranks
        except Exception as e:
            raise OSError(reason_of(e)) from e


class SavePlanner(dcp.DefaultSavePlanner):
    """
    DCP's planner for LocalParts: ranks can hold several pieces of a tensor. Equal pieces are written once.
    """

    def create_local_plan(self) -> dcp.SavePlan:
        items = []
        for name, part in self.state_dict.items():
            for offsets, piece in part.pieces:
                data = TensorWriteData(
                    chunk_of(offsets, piece), TensorProperties.create_from_tensor(piece), part.shape
                )
                items.append(
                    WriteItem(MetadataIndex(name, torch.Size(offsets)), WriteItemType.SHARD, tensor_data=data)
                )
        self.plan = dcp.SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.state_dict[index.fqn].piece(index.offset)


class LoadPlanner(dcp.DefaultLoadPlanner):
    """DCP's planner for loading LocalParts."""

    def set_up_planner(self, state_dict: dict, metadata: dcp.Metadata, is_coordinator: bool) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> dcp.LoadPlan:
        items = []
        for name, part in self.state_dict.items():
            saved = self.metadata.state_dict_metadata[name]
            chunks = [chunk_of(offsets, piece) for offsets, piece in part.pieces]
            items += create_read_items_for_chunk_list(name, saved, chunks)
        return dcp.LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        # by number: pieces that are copies of each other have the same offset
        return self.state_dict[index.fqn].pieces[index.index][1]


def chunk_of(offsets: tuple[int, ...], piece: Tensor) -> dcp.ChunkStorageMetadata:
    """Where a piece is in the whole tensor."""
    return dcp.ChunkStorageMetadata(torch.Size(offsets), piece.shape)


class PlainReader(dcp.FileSystemReader):
    """
    DCP's reader, restricted: the pickled metadata may contain only DCP's own classes, and only tensors are
    read.
    """

    def __init__(self, folder: Path, unverified: dict | None = None) -> None:
        """`unverified`: the manifest's entries of what is verified when it is read."""
        super().__init__(folder)
        self.unverified = unverified or {}

    def verify(self, name: str) -> None:
        """
        Raise ValueError if a file of the folder does not match the manifest's checksum, and OSError if it is
        not a file.
        """
        check_regular(Path(self.path) / name)
        if name in self.unverified and damaged_file(Path(self.path) / name, self.unverified):
            raise ValueError(self.about_damage(name))

    def about_damage(self, name: str) -> str:
        """What to do about a file that does not match a checksum."""
        where = f"it is damaged on {socket.gethostname()}: the checksum of {name} does not match"
        return f"{where}. Copy it from rank 0's machine again"

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> object:
        for name in {self.storage_data[item.storage_index].relative_path for item in plan.items}:
            check_regular(Path(self.path) / name)
        return super().read_data(plan, planner)

    def _slice_file(self, file: IO[bytes], info: _StorageInfo) -> IO[bytes]:
        """
        The part of a file that contains a tensor, of which DCP reads no other part. If nobody has verified
        the file on this machine, the checksums of what torch.save wrote for this tensor are compared: the
        file's own would need all that other ranks hold.
        """
        part = super()._slice_file(file, info)
        if info.relative_path in self.unverified:
            try:
                bad = zipfile.ZipFile(io.BytesIO(part.read())).testzip()
            except zipfile.BadZipFile as e:
                bad = e
            if bad:
                raise ValueError(self.about_damage(info.relative_path))
            part.seek(0)
        return part

    def read_metadata(self, *args: object, **kwargs: object) -> dcp.Metadata:
        self.verify(".metadata")
        metadata = load_pickle(Path(self.path) / ".metadata", METADATA)
        if not all(isinstance(m, dcp.TensorStorageMetadata) for m in metadata.state_dict_metadata.values()):
            # DCP would unpickle such objects unchecked
            raise pickle.UnpicklingError("it holds objects other than tensors")
        if not all(Path(i.relative_path).name == i.relative_path for i in metadata.storage_data.values()):
            raise pickle.UnpicklingError("it names files outside of the folder")
        return metadata
