"""
How the ranks divide the work: the axes of the mesh, the roles that ranks have for each other, this rank's
coordinates, and the arithmetic of degrees.

A way of dividing the work knows its axis. All other code asks for roles, such as `mesh.readers` or
`mesh.shards`, so that a new axis is added to the roles in this file.
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
from isogpt.parallel.local_parts import splits_of
from isogpt.parallel.plan import Plan

# HSDP with further axes needs a slice of a flattened mesh dimension: torch 2.13 offers no other way
warnings.filterwarnings("ignore", message="Slicing a flattened dim")
# neighbouring ranks differ in tp, which communicates most
AXES = ("islands", "pp", "dp_replicate", "dp_shard", "ep", "cp", "tp")


@dataclass(frozen=True)
class Role:
    """The ranks that differ from this rank only along some axes of the mesh."""

    mesh: "Mesh"
    axes: tuple[str, ...]

    @property
    def size(self) -> int:
        """How many ranks these are, including this rank."""
        return self.mesh.size(*self.axes)

    @property
    def index(self) -> int:
        """The number of this rank among them."""
        return self.mesh.index(*self.axes)

    @property
    def group(self) -> ProcessGroup | None:
        """Their process group (all ranks); None if this rank is alone."""
        return self.mesh.group(*self.axes)

    def without(self, *axes: str) -> "Role":
        """Those that do not differ along these axes."""
        return Role(self.mesh, tuple(axis for axis in self.axes if axis not in axes))


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
    shards_parameters: bool = False  # whether fully_shard divides the parameters (zero 2 and 3)
    devices: DeviceMesh | None = field(default=None, compare=False)  # the axes with more than one rank

    def __post_init__(self) -> None:
        # ranks that read different sequences of the batch
        self.readers = Role(self, ("islands", "dp_replicate", "dp_shard", "ep"))
        # ranks that read the same sequences, each for some of the layers, positions or features
        self.same_sequences = Role(self, ("pp", "cp", "tp"))
        # ranks that read the same tokens, and therefore all know their loss
        self.same_tokens = Role(self, ("pp", "tp"))
        # ranks over which an island's loss is summed, and over which gradients are averaged
        self.loss = Role(self, ("dp_replicate", "dp_shard", "ep", "cp"))
        divided = ("dp_shard", "ep", "cp") if self.shards_parameters else ()
        # those of `loss` that hold the same parameters (except experts), or the same shards of them
        self.replicas = self.loss.without(*divided)
        # those of `loss` that hold different shards of the parameters
        self.shards = Role(self, divided)
        # ranks that together hold each whole matrix of a pipeline's stage
        self.matrix_parts = Role(self, (*self.shards.axes, "tp"))
        # ranks that know the same whole matrices once those of `matrix_parts` have gathered them
        self.matrix_workers = Role(self, (*self.replicas.axes, *self.matrix_parts.axes))
        # which share of the batch this rank reads, of how many
        self.data_rank, self.data_size = self.readers.index, self.readers.size
        # whether a rank holds only some of the layers or experts, or parts of matrices
        self.splits_model = max(self.pp, self.tp, self.ep) > 1

    def size(self, *axes: str) -> int:
        """Number of ranks along these axes together."""
        return prod(getattr(self, axis) for axis in axes)

    def index(self, *axes: str) -> int:
        """The number of this rank among the ranks along these axes."""
        number = 0
        for axis in axes:
            inner = self.size(*AXES[AXES.index(axis) + 1 :])
            number = number * self.size(axis) + self.rank // inner % self.size(axis)
        return number

    def holders(self, p: Tensor) -> Role:
        """Ranks that hold the same part of a parameter, with different values on different islands."""
        ranks = Role(self, ("islands", *self.replicas.axes, "tp"))
        return ranks.without(*(split.axis for split in splits_of(p)))

    def chunks(self, index: int) -> tuple[int, int]:
        """
        Which of a sequence's 2 cp chunks rank `index` of a cp group holds: an early and a late one. Chunk i
        attends to i + 1 chunks, so each rank computes the attention of 2 cp + 1 pairs of chunks, and none
        waits.
        """
        return index, 2 * self.cp - 1 - index

    def positions(self, length: int) -> Tensor:
        """The positions of a sequence of `length` tokens that this rank holds, (length / cp,)."""
        chunks = torch.arange(length).tensor_split(2 * self.cp)
        return torch.cat([chunks[c] for c in self.chunks(self.index("cp"))])

    def connect(self, device_type: str, offloads: bool = False) -> None:
        """
        Create the process groups (all ranks).

        Args:
            offloads: with cpu_offload, the mesh needs an axis of replicas even for a single replica, see
                gradients.FloatSums.micro_batch.
        """
        # fully_shard needs a mesh even for a single rank
        needed = ["dp_shard"] * self.shards_parameters + ["dp_replicate"] * offloads
        sizes = {a: self.size(a) for a in AXES if self.size(a) > 1 or a in needed}
        if len(sizes) > 1 or self.shards_parameters:  # for one axis the default group will do
            self.devices = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
            for axis in sizes:
                self.limit(self.devices.get_group(axis))

    def limit(self, group: ProcessGroup) -> None:
        """
        Set a group's timeout to the mesh's, because a new group uses the backend's, up to half an hour.
        """
        _set_pg_timeout(collectives_timeout(self.timeout_s, str(get_backend_config(group))), group)

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

    def fsdp_mesh(self, role: Role, has_replicas: bool) -> DeviceMesh:
        """
        The mesh for fully_shard over the ranks of a role: one axis, or (replicas, shards) for HSDP if
        has_replicas (all ranks).
        """
        shards = self.submesh(*role.axes)
        if not has_replicas or "dp_replicate" not in self.devices.mesh_dim_names:
            return shards
        return self.devices["dp_replicate", shards.mesh_dim_names[0]]


def make_mesh(rank: int, plan: Plan, timeout_s: float = 600.0) -> Mesh:
    """
    Make the mesh of a plan, for one of its ranks. The batch is divided over the ranks that pp, cp and tp
    leave. Within an island, ZeRO stages 0 and 1 replicate the parameters over these ranks, stages 2 and 3
    shard them, and ep divides experts.
    """
    sizes = {axis: getattr(plan, axis) for axis in AXES if not axis.startswith("dp_")}
    ranks = plan.world_size // prod(sizes.values())
    replicate = plan.dp_replicate if plan.zero >= 2 else ranks
    sizes |= {"dp_replicate": replicate, "dp_shard": ranks // replicate}
    return Mesh(rank, **sizes, timeout_s=timeout_s, shards_parameters=plan.zero >= 2)


def connect_mesh(rank: int, plan: Plan, timeout_s: float) -> Mesh:
    """Make the mesh of a plan, and create its process groups (all ranks)."""
    mesh = make_mesh(rank, plan, timeout_s)
    mesh.connect(plan.device_type, offloads=plan.cpu_offload)
    return mesh


def stages_per_rank(pp_schedule: str) -> int:
    """How many pipeline stages each rank holds."""
    return 1 if pp_schedule in ("gpipe", "1f1b") else 2


def splits_backward(pp_schedule: str) -> bool:
    """Whether a schedule makes two backward passes, the second of which computes the gradients of weights."""
    return pp_schedule in ("zero_bubble", "zbv")
