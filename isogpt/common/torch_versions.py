"""
What torch 2.11 and 2.13 call differently: a name of 2.13 if it exists, since 2.13 warns about the old one.
"""

import torch.distributed as dist

all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
