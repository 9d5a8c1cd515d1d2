"""
What torch 2.11 and 2.13 call differently: a name of 2.13 if it exists, since 2.13 warns about the old one.
"""

import torch.distributed as dist
import torch.distributed._functional_collectives as functional

all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
# with gradients
all_gather_autograd = getattr(functional, "all_gather_single_autograd", functional.all_gather_tensor_autograd)
reduce_scatter_autograd = getattr(
    functional, "reduce_scatter_single_autograd", functional.reduce_scatter_tensor_autograd
)
