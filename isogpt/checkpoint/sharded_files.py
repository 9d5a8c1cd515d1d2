"""
Checkpoints in shards: each rank writes the parts that it holds with torch.distributed.checkpoint (DCP), by
parameter name, and reads the parts that it holds from shards of any layout.

    __3_0.distcp      the pieces of tensors that rank 3 has written
    __3_index.json    where each of them is in this file, and which ranks have written other pieces that
                      rank 3 holds: a rank that resumes on the same layout opens no index but these
    tensors.json      the shape of each tensor, and the values of those that are single numbers

No file describes all pieces, and no rank gathers such a description, because there can be as many pieces as
ranks times tensors. DCP's own .metadata, which describes all of them, is read if it is there.
"""

import io
import json
import os
import pickle
import socket
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from isogpt.checkpoint.manifest import damaged_file
from isogpt.common import console
from isogpt.common.files import (
    HashedFile,
    check_no_link,
    check_regular,
    load_pickle,
    parse_json,
    read_utf8,
    reason_of,
)
from isogpt.launch.together import own_rank
from isogpt.parallel.local_parts import LocalPart, Offsets

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


TENSORS = "tensors.json"


class Written(NamedTuple):
    """What a rank has written."""

    files: dict[str, dict]  # the manifest's entry of each file
    count: int  # numbers in all pieces
    shapes: dict[str, tuple[int, ...]]  # of the whole tensors whose first piece the rank has written
    numbers: dict[str, float]  # the tensors without dimensions


class Division(NamedTuple):
    """Which rank writes each of the pieces that this rank holds."""

    digests: np.ndarray  # see digests_of
    writers: np.ndarray  # (pieces,)


def write(
    folder: Path,
    parts: dict[str, LocalPart],
    group: dist.ProcessGroup | None,
    division: Division | None = None,
) -> tuple[Division, dict]:
    """
    Write the parts that this rank holds, by name, into a folder (all ranks of `group`; None: one process).
    Returns when all ranks have written. Raises OSError if a rank fails, or if files are missing on rank 0.

    Args:
        division: what the previous call returned. The ranks divide the pieces again only if one of them now
            holds different pieces.

    Returns:
        (the division; on rank 0 the manifest's entries of all files, which each rank has hashed while it
        wrote its own, on other ranks {})
    """
    together = _DistWrapper(group, use_dist=group is not None, coordinator_rank=0)
    digests = digests_of(parts)
    is_same = division is not None and np.array_equal(digests, division.digests)
    try:
        if not together.all_reduce("compare", partial(bool, is_same), all):
            writers = together.reduce_scatter("divide", partial(np.array, digests), choose_writers)
            division = Division(digests, writers)
        write_mine = partial(write_pieces, folder, parts, division.writers, together.rank)
        files = {}
        together.all_reduce("write", write_mine, partial(complete, folder, files))
    except CheckpointException as e:
        raise OSError(reason_of(e)) from e
    return division, files


def pieces_of(parts: dict[str, LocalPart]) -> Iterator[tuple[str, LocalPart, Offsets, Tensor]]:
    """
    Yield (name, part, offsets, piece) for each piece that is written to a rank's file, that is, all but
    single numbers.
    """
    for name, part in parts.items():
        for offsets, piece in part.pieces if part.shape else ():
            yield name, part, offsets, piece


def digests_of(parts: dict[str, LocalPart]) -> np.ndarray:
    """
    Identify each piece by 8 bytes, and its size by another 8: (pieces, 2). Ranks that hold the same piece
    have the same digest. This is all that rank 0 gathers about pieces, and only at a run's first checkpoint.
    """
    rows = []
    for name, _, offsets, piece in pieces_of(parts):
        identity = repr((name, tuple(offsets), tuple(piece.shape))).encode()
        digest = int.from_bytes(blake2b(identity, digest_size=8).digest(), "little", signed=True)
        rows.append((digest, piece.nbytes))
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def choose_writers(digests: list[np.ndarray]) -> list[np.ndarray]:
    """
    Choose for each piece one of the ranks that hold it, so that all write about as many bytes. Returns, for
    each rank, the writer of each of its pieces.
    """
    lengths = [len(rows) for rows in digests]
    holders = np.repeat(np.arange(len(digests), dtype=np.int32), lengths)
    keys, sizes = np.concatenate(digests).T
    _, first, piece, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    sizes = sizes[first]
    by_piece = holders[np.argsort(piece, kind="stable")]
    starts = np.cumsum(counts) - counts
    writers = by_piece[starts]  # of a piece that one rank holds
    bytes_of = np.bincount(writers[counts == 1], sizes[counts == 1], minlength=len(digests))
    shared = np.flatnonzero(counts > 1)
    for i in shared[np.argsort(-sizes[shared], kind="stable")]:  # the largest first
        candidates = by_piece[starts[i] : starts[i] + counts[i]]
        writers[i] = candidates[bytes_of[candidates].argmin()]
        bytes_of[writers[i]] += sizes[i]
    return np.split(writers[piece], np.cumsum(lengths)[:-1])


def write_pieces(folder: Path, parts: dict[str, LocalPart], writers: np.ndarray, rank: int) -> Written:
    """Write the pieces of which this rank is the writer, and the index of its file."""
    kept, shapes = {}, {}
    for writer, (name, part, offsets, piece) in zip(writers, pieces_of(parts), strict=True):
        if writer == rank:
            kept.setdefault(name, []).append((offsets, piece))
            if not any(offsets):
                shapes[name] = tuple(part.shape)
    mine = {name: LocalPart(parts[name].shape, tuple(pieces)) for name, pieces in kept.items()}
    others = sorted({int(writer) for writer in writers} - {rank})
    writer = Writer(folder, rank, others)
    planner = SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save(mine, storage_writer=writer, planner=planner, no_dist=True)
    count = sum(piece.numel() for part in mine.values() for _, piece in part.pieces)
    numbers = {name: part.piece(()).item() for name, part in parts.items() if not part.shape}
    return Written(writer.fs.entries, count, shapes, numbers)


def data_file(folder: Path, rank: int) -> Path:
    """The file with the pieces that a rank has written."""
    return folder / f"__{rank}_0.distcp"


def index_file(folder: Path, rank: int) -> Path:
    """The file that says where in `data_file` each of these pieces is."""
    return folder / f"__{rank}_index.json"


def complete(folder: Path, files: dict[str, dict], ranks: list[Written]) -> None:
    """
    Write tensors.json, and add the manifest's entries of all files to `files` (rank 0). Raises OSError if a
    file is missing or too short, as when ranks write to different folders, and ValueError if pieces are
    missing.
    """
    for written in ranks:
        files |= written.files
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    if incomplete := sorted(name for name, entry in files.items() if sizes.get(name, 0) < entry["bytes"]):
        names = ", ".join(incomplete[:3])
        raise OSError(
            f"files of the checkpoint that are missing or too short in {folder.absolute()}: "
            f"{len(incomplete)} of {len(files)} ({names}): do all ranks write to this folder?"
        )
    shapes = {name: shape for written in ranks for name, shape in written.shapes.items()}
    numbers = {name: value for written in ranks for name, value in written.numbers.items()}
    count, needed = sum(written.count for written in ranks), sum(map(prod, shapes.values()))
    if count != needed:
        raise ValueError(f"the ranks hold {count:,} of the tensors' {needed:,} numbers: pieces are missing")
    files |= write_json(folder / TENSORS, {"shapes": shapes, "numbers": numbers})


def write_json(path: Path, content: dict) -> dict[str, dict]:
    """Write a new file to the disk. Returns its entry in the manifest, by name."""
    fs = NewFiles()
    with fs.create_stream(path, "wb") as stream:
        stream.write(json.dumps(content).encode())
        os.fsync(stream.fileno())
    return fs.entries


@contextmanager
def explained(folder: Path) -> Iterator[None]:
    """Raise ValueError if reading a folder in the block fails; damaged files raise nearly anything."""
    try:
        yield
    except (Exception, CheckpointException) as e:
        raise ValueError(f"{folder} cannot be loaded: {reason_of(e)[:300]}") from e


def shapes(folder: Path, unverified: dict) -> dict[str, torch.Size]:
    """The shape of each saved tensor, by name. Raises ValueError if they cannot be read."""
    with explained(folder):
        return PlainReader(folder, {}, unverified).shapes()


def read(folder: Path, parts: dict[str, LocalPart], unverified: dict) -> None:
    """
    Fill parts, by name, from a folder of any layout, without communication. For `unverified` see PlainReader.
    Raises ValueError if a file is damaged or missing, or would run code.
    """
    if not parts:
        return
    with explained(folder):
        reader = PlainReader(folder, parts, unverified)
        reader.fill_numbers()
        dcp.load(
            {name: part for name, part in parts.items() if part.shape or reader.has_metadata},
            storage_reader=reader,
            planner=LoadPlanner(),
            no_dist=True,
        )


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


class Writer(dcp.FileSystemWriter):
    """
    DCP's writer for the file of one rank, with an index in place of DCP's metadata, and with errors that say
    why a file could not be written.
    """

    def __init__(self, folder: Path, number: int, others: list[int]) -> None:
        """
        Args:
            number: the rank.
            others: the ranks that write other pieces that this rank holds.
        """
        # copying ahead is not needed, since the parts are copies, and it uses GPU 0 on every rank
        super().__init__(folder, per_thread_copy_ahead=0)
        self.fs = NewFiles()
        self.number, self.others = number, others

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        super().set_up_storage_writer(is_coordinator, rank=self.number, use_collectives=False)

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index: for each tensor, (offsets, shape, start and length in the file) of each piece."""
        sizes = {
            (name, tuple(chunk.offsets)): tuple(chunk.sizes)
            for name, tensor in metadata.state_dict_metadata.items()
            for chunk in tensor.chunks
        }
        pieces = {}
        for result in (result for written in results for result in written):
            name, offsets, place = result.index.fqn, tuple(result.index.offset), result.storage_data
            piece = (offsets, sizes[name, offsets], place.offset, place.length)
            pieces.setdefault(name, []).append(piece)
        content = {"written_by": self.others, "pieces": pieces}
        self.fs.entries |= write_json(index_file(Path(self.path), self.number), content)

    def write_data(self, *args: object) -> object:
        try:
            check_no_link(Path(self.path))
            return super().write_data(*args)
        # the context of torch.save's error, such as a full disk, is lost on the way to the other ranks
        except Exception as e:
            raise OSError(reason_of(e)) from e


class SavePlanner(dcp.DefaultSavePlanner):
    """DCP's planner for LocalParts: ranks can hold several pieces of a tensor."""

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
    DCP's reader for parts of tensors. It opens the indices that describe these parts. Only tensors and plain
    numbers are read: the pickle in .metadata may contain only DCP's own classes.
    """

    def __init__(self, folder: Path, parts: dict[str, LocalPart], unverified: dict | None = None) -> None:
        """`unverified`: the manifest's entries of what is verified when it is read."""
        super().__init__(folder)
        self.parts, self.unverified = parts, unverified or {}

    @property
    def has_metadata(self) -> bool:
        """
        Whether DCP's metadata describes the pieces, rather than indices. Metadata beside indices is left over
        from a different checkpoint.
        """
        return not (Path(self.path) / TENSORS).exists()

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
        Return the part of a file that contains a tensor; DCP reads no other part. If the file was not
        verified on this machine, compare the checksums in what torch.save wrote for this tensor, since the
        checksum of the whole file would also need what other ranks hold.
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
        return self.read_whole_metadata() if self.has_metadata else self.read_indices()

    def read_json(self, path: Path) -> dict:
        """Verify and read a JSON file in the folder."""
        self.verify(path.name)
        return parse_json(read_utf8(path))

    def shapes(self) -> dict[str, torch.Size]:
        """The shape of each tensor."""
        if self.has_metadata:
            saved = self.read_whole_metadata().state_dict_metadata
            return {str(name): torch.Size(tensor.size) for name, tensor in saved.items()}
        content = self.read_json(Path(self.path) / TENSORS)
        saved = content["shapes"] | dict.fromkeys(content["numbers"], ())
        return {name: torch.Size(shape) for name, shape in saved.items()}

    def fill_numbers(self) -> None:
        """Fill the parts that are numbers."""
        names = [name for name, part in self.parts.items() if not part.shape]
        if self.has_metadata or not names:
            return
        numbers = self.read_json(Path(self.path) / TENSORS)["numbers"]
        for name in names:
            for _, piece in self.parts[name].pieces:
                piece.fill_(numbers[name])

    def read_indices(self) -> dcp.Metadata:
        """
        Describe the pieces that overlap the parts. On the same layout, the indices of this rank and of the
        ranks in its list suffice; on a different one, indices are read until nothing is missing.
        """
        folder, rank = Path(self.path), own_rank()
        wanted = {name: part for name, part in self.parts.items() if part.shape}
        missing = {name: sum(piece.numel() for _, piece in part.pieces) for name, part in wanted.items()}
        tensors = {
            name: dcp.TensorStorageMetadata(TensorProperties(), part.shape, [])
            for name, part in wanted.items()
        }
        places = {}
        numbers = range(len(list(folder.glob("__*_index.json"))))
        waiting, seen = [rank] if rank in numbers else [], set()
        while any(missing.values()):
            if not waiting:
                waiting = [number for number in numbers if number not in seen]
            if not waiting:
                names = [name for name, count in missing.items() if count]
                raise ValueError(f"pieces of these tensors are missing: {console.shortened(names)}")
            number = waiting.pop(0)
            seen.add(number)
            index = self.read_json(index_file(folder, number))
            if number == rank:
                waiting = [other for other in index["written_by"] if other in numbers and other != rank]
            for name in wanted.keys() & index["pieces"].keys():
                for offsets, shape, start, length in index["pieces"][name]:
                    saved = dcp.ChunkStorageMetadata(torch.Size(offsets), torch.Size(shape))
                    if overlap := sum(common(saved, *piece) for piece in wanted[name].pieces):
                        missing[name] -= overlap
                        tensors[name].chunks.append(saved)
                        file = data_file(folder, number).name
                        places[MetadataIndex(name, saved.offsets)] = _StorageInfo(file, start, length)
        return dcp.Metadata(tensors, storage_data=places)

    def read_whole_metadata(self) -> dcp.Metadata:
        """DCP's metadata of all pieces."""
        self.verify(".metadata")
        metadata = load_pickle(Path(self.path) / ".metadata", METADATA)
        if not all(isinstance(m, dcp.TensorStorageMetadata) for m in metadata.state_dict_metadata.values()):
            # DCP would unpickle such objects unchecked
            raise pickle.UnpicklingError("it holds objects other than tensors")
        if not all(Path(i.relative_path).name == i.relative_path for i in metadata.storage_data.values()):
            raise pickle.UnpicklingError("it names files outside of the folder")
        return metadata


def common(saved: dcp.ChunkStorageMetadata, offsets: Offsets, piece: Tensor) -> int:
    """How many numbers a saved piece and a piece of a part have in common."""
    lengths = (
        min(start + n, first + m) - max(start, first)
        for start, n, first, m in zip(saved.offsets, saved.sizes, offsets, piece.shape, strict=True)
    )
    return prod(max(0, length) for length in lengths)
