"""How the ranks divide the work: the axes of the mesh, this rank's coordinates, and the arithmetic of degrees."""

from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout


@dataclass(frozen=True)
class Mesh:
    """
    The ranks as a grid of dp_replicate x dp_shard: neighbours shard the model, and each group of dp_shard ranks holds
    one copy of it. With dp_shard 1 (DDP, ZeRO-1) every rank holds all parameters.

    Data, losses and dropout seeds are divided by `data_rank` and `data_size`, never by rank and world size.
    """

    rank: int
    dp_replicate: int
    dp_shard: int
    timeout_s: float = 600.0  # of the collectives of the groups within the mesh

    @property
    def data_rank(self) -> int:
        """Which share of the batch this rank reads."""
        return self.rank

    @property
    def data_size(self) -> int:
        """How many shares a batch is divided into."""
        return self.dp_replicate * self.dp_shard

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """The mesh for fully_shard: ("shard",), or ("replicate", "shard") for HSDP."""
        if self.dp_replicate == 1:
            return init_device_mesh(device_type, (self.dp_shard,), mesh_dim_names=("shard",))
        names = ("replicate", "shard")
        mesh = init_device_mesh(device_type, (self.dp_replicate, self.dp_shard), mesh_dim_names=names)
        for name in names:  # the default for a new group is the backend's, up to half an hour
            _set_pg_timeout(timedelta(seconds=self.timeout_s), mesh.get_group(name))
        return mesh


def check_degrees(world_size: int, dp_replicate: int) -> None:
    """Raise ValueError if the degrees do not fit the world size. For use before the ranks connect."""
    if world_size % dp_replicate:
        raise ValueError(f"dp_replicate is {dp_replicate}: it must divide {world_size}, the world size")


def make_mesh(rank: int, world_size: int, zero: int, dp_replicate: int, timeout_s: float) -> Mesh:
    """
    The mesh for a ZeRO stage: stages 0 and 1 replicate the parameters, 2 and 3 shard them over world_size /
    dp_replicate ranks.
    """
    if zero < 2:
        return Mesh(rank, world_size, 1, timeout_s)
    return Mesh(rank, dp_replicate, world_size // dp_replicate, timeout_s)
