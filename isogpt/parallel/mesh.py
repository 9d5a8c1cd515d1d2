"""
How the ranks divide the work: the axes of the mesh, this rank's coordinates, and the arithmetic of degrees.
"""

import warnings
from dataclasses import dataclass, field
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout, get_backend_config

from isogpt.launch.device import collectives_timeout
from isogpt.parallel.plan import Plan

# HSDP with further axes needs a slice of a flattened mesh dimension: torch 2.13 offers no other way
warnings.filterwarnings("ignore", message="Slicing a flattened dim")
# neighbouring ranks differ in tp, which communicates most
AXES = ("islands", "pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")
DATA_AXES = ("dp_replicate", "dp_shard", "ep", "cp")  # the ranks along these average their gradients
READING_AXES = ("islands", "dp_replicate", "dp_shard", "ep")  # the ranks along these read different sequences


@dataclass
class Mesh:
    """
    The ranks as a grid with one axis for each way of dividing the work.

    The axes are groups that train separately for some steps (islands), pipeline stages (pp), copies of the
    model (dp_replicate), shards of each parameter (dp_shard, ZeRO-2 and 3), groups of experts (ep), parts of
    each sequence (cp), and parts of each matrix (tp). Parameters are sharded over dp_shard x ep x cp, because
    ranks with parts of a sequence use the same parameters. Experts, which ep has divided already, are sharded
    over dp_shard x cp.

    Data is divided by `data_rank` and `data_size`, never by rank and world size.
    """

    rank: int = 0
    islands: int = 1
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1
    timeout_s: float = 600.0  # timeout of collectives in the groups of the mesh
    devices: DeviceMesh | None = field(default=None, compare=False)  # the axes with more than one rank

    def size(self, *axes: str) -> int:
        """Number of ranks along these axes together."""
        return prod(getattr(self, axis) for axis in axes)

    def index(self, axis: str, rank: int | None = None) -> int:
        """The coordinate of this rank, or of a given rank, along an axis."""
        inner = prod(getattr(self, a) for a in AXES[AXES.index(axis) + 1 :])
        return (self.rank if rank is None else rank) // inner % getattr(self, axis)

    def rank_and_size(self, *axes: str, rank: int | None = None) -> tuple[int, int]:
        """(number of this or a given rank among the ranks along these axes, how many ranks these are)."""
        number = 0
        for axis in axes:
            number = number * self.size(axis) + self.index(axis, rank)
        return number, self.size(*axes)

    @property
    def data_rank(self) -> int:
        """Which share of the batch this rank reads."""
        return self.data_rank_of(self.rank)

    def data_rank_of(self, rank: int) -> int:
        """Which share of the batch a rank reads."""
        return self.rank_and_size(*READING_AXES, rank=rank)[0]

    @property
    def data_size(self) -> int:
        """How many shares a batch is divided into."""
        return self.size(*READING_AXES)

    def chunks(self, index: int) -> tuple[int, int]:
        """
        The two of 2 cp chunks of a sequence that rank `index` of a cp group holds: an early and a late chunk.
        Chunk i attends to i + 1 chunks, so each rank computes the attention of 2 cp + 1 pairs of chunks, and
        none waits.
        """
        return index, 2 * self.cp - 1 - index

    def own_positions(self, length: int) -> Tensor | None:
        """
        The positions of a sequence of `length` tokens that this rank holds, (length / cp,); None for all.
        """
        if self.cp == 1:
            return None
        chunks = torch.arange(length).chunk(2 * self.cp)
        return torch.cat([chunks[c] for c in self.chunks(self.index("cp"))])

    def replicas(self, zero: int) -> int:
        """How many ranks of an island average gradients of the same parameters, with a ZeRO stage."""
        return self.dp_replicate if zero >= 2 else self.size(*DATA_AXES)

    def ddp_group(self, zero: int) -> ProcessGroup | None:
        """
        The ranks whose gradients DistributedDataParallel averages (all ranks): those that hold the same
        parameters, except experts, and read different tokens. None if this rank is alone, with zero 2 and 3,
        where fully_shard reduces gradients, and in a pipeline, where a step's end does.
        """
        return None if zero >= 2 or self.pp > 1 else self.group("dp_replicate", "ep", "cp")

    @property
    def splits_model(self) -> bool:
        """Whether a rank holds only some of the layers or experts, or parts of matrices."""
        return self.pp > 1 or self.tp > 1 or self.ep > 1

    def connect(self, device_type: str, uses_fsdp: bool, offloads: bool = False) -> None:
        """
        Create the process groups (all ranks).

        Args:
            uses_fsdp: whether fully_shard is used (zero 2 and 3), which needs a mesh even for a single rank.
            offloads: with cpu_offload, the mesh needs an axis of replicas even for a single replica, see
                data_parallel.no_sync.
        """
        kept = {"dp_shard": uses_fsdp, "dp_replicate": uses_fsdp and offloads}
        sizes = {a: self.size(a) for a in AXES if self.size(a) > 1 or kept.get(a)}
        if len(sizes) > 1 or uses_fsdp:  # for one axis the default group will do
            self.devices = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
            for axis in sizes:
                self.limit(self.devices.get_group(axis))

    def limit(self, group: ProcessGroup, timeout_s: float | None = None) -> ProcessGroup:
        """
        Set a group's timeout, by default the mesh's. A new group uses the backend's timeout, up to half an
        hour.
        """
        _set_pg_timeout(
            collectives_timeout(timeout_s or self.timeout_s, str(get_backend_config(group))), group
        )
        return group

    def submesh(self, *axes: str) -> DeviceMesh:
        """The one-dimensional mesh of the ranks that differ from this rank only in these axes (all ranks)."""
        present = [axis for axis in axes if axis in self.devices.mesh_dim_names]
        part = self.devices[tuple(present)]
        if len(present) == 1:
            return part
        flat = part._flatten("_".join(present))
        self.limit(flat.get_group())
        return flat

    def group(self, *axes: str) -> ProcessGroup | None:
        """
        The group of the ranks that differ from this rank only in these axes (all ranks); None if this rank is
        alone.
        """
        if self.size(*axes) == 1:
            return None
        if self.size(*axes) == self.size(*AXES):
            return dist.group.WORLD
        return self.submesh(*axes).get_group()

    def fsdp_mesh(self, has_replicas: bool, *shard_axes: str) -> DeviceMesh:
        """The mesh for fully_shard: one axis, or (replicas, shards) for HSDP if has_replicas (all ranks)."""
        shards = self.submesh(*shard_axes)
        if not has_replicas or "dp_replicate" not in self.devices.mesh_dim_names:
            return shards
        return self.devices["dp_replicate", shards.mesh_dim_names[0]]


def make_mesh(rank: int, plan: Plan, timeout_s: float = 600.0) -> Mesh:
    """
    Make the mesh of a plan, for one of its ranks. The ranks that pp, cp and tp leave divide the batch. Within
    an island, ZeRO stages 0 and 1 replicate the parameters over these ranks, stages 2 and 3 shard them; ep
    divides experts.
    """
    left = plan.world_size // (plan.islands * plan.pp * plan.ep * plan.cp * plan.tp)
    replicate, shard = left, 1
    if plan.zero >= 2:
        replicate, shard = plan.dp_replicate, left // plan.dp_replicate
    return Mesh(rank, plan.islands, plan.pp, replicate, shard, plan.ep, plan.cp, plan.tp, timeout_s)


def connect_mesh(rank: int, plan: Plan, timeout_s: float) -> Mesh:
    """Make the mesh of a plan, and create its process groups (all ranks)."""
    mesh = make_mesh(rank, plan, timeout_s)
    mesh.connect(plan.device_type, uses_fsdp=plan.zero >= 2, offloads=plan.cpu_offload)
    return mesh


def stages_per_rank(pp_schedule: str) -> int:
    """How many pipeline stages each rank holds."""
    return 1 if pp_schedule in ("gpipe", "1f1b") else 2


def bubble_formula(pp: int, micro_steps: int, pp_schedule: str) -> float | None:
    """
    The share of a pipeline's time in which a rank waits; None for zero-bubble schedules, which stay below
    1f1b's.
    """
    if pp_schedule in ("zero_bubble", "zbv"):
        return None
    return (pp - 1) / (stages_per_rank(pp_schedule) * micro_steps + pp - 1)
