"""
Expert parallelism (Lepikhin et al. 2020, arXiv:2006.16668): each rank of a group holds some of the experts of
each block. One all-to-all sends tokens to the ranks that hold their experts, and one sends the results back.

The table ATTACHMENTS says how the experts' parameters are divided; attach.py explains how it is applied.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

from isogpt.nn.experts import Reorder
from isogpt.parallel.attach import Attachment, attach, replace_seams
from isogpt.parallel.mesh import Mesh


@torch.compiler.disable(reason="a rank receives a different number of rows in each step")
def exchange_tokens(group: dist.ProcessGroup, experts: nn.Module, x: Tensor, counts: Tensor) -> Tensor:
    """
    Return the experts' results for this rank's rows (all ranks of the group).

    Args:
        experts: this rank's experts.
        x: rows (N, C), sorted by expert.
        counts: how many rows each expert gets from this rank, (E,).
    """
    ranks = dist.get_world_size(group)
    incoming = torch.empty_like(counts)  # rows for this rank's experts, from each rank
    dist.all_to_all_single(incoming, counts, group=group)
    incoming = incoming.view(ranks, -1)  # (ranks, E / ranks)
    # the copy waits for a GPU
    sent, received = torch.stack((counts.view(ranks, -1).sum(1), incoming.sum(1))).tolist()
    rows = all_to_all_single_autograd(x, received, sent, group)  # by rank, then by expert
    expert = torch.arange(incoming.size(1), device=x.device).repeat(ranks)  # (E,)
    expert = expert.repeat_interleave(incoming.flatten(), output_size=sum(received))  # of each row
    order = expert.argsort(stable=True)
    place = order.argsort()
    y = experts(Reorder.apply(rows, order, place), incoming.sum(0))
    return all_to_all_single_autograd(Reorder.apply(y, place, order), sent, received, group)


# experts are stacked along this dimension
ATTACHMENTS = (Attachment(r"transformer\.h\.\d+\.mlp\.experts\.c_\w+", dim=0),)


def parallelize_experts(model: nn.Module, mesh: Mesh) -> None:
    """Keep only this rank's experts in a model on the meta device, in place (all ranks)."""
    attach(model, ATTACHMENTS, mesh, "ep", ranks=None)
    replace_seams(model, experts=partial(exchange_tokens, mesh.group("ep")))
    # FloatSums.finish reduces the experts' gradients, over fewer ranks than DDP
    names = [name for name, _ in model.named_parameters() if ".experts." in name]
    model._ddp_params_and_buffers_to_ignore = names
