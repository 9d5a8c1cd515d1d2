"""
What differs between torch 2.11 and 2.13, with both of which isoGPT runs.

Names: those of 2.13 where they exist, since 2.13 warns about the old ones.

The rest needs no branch, since the code is in a form that both versions compute:
- under torch.compile, 2.11 gives an autograd.Function no gradient, silently, if its forward returns what an
  operation in place returned, or one such as `contiguous()` or `to(dtype)` that returned its argument
  (pytorch #180642): ChunkedLoss and Rotate in nn/kernels.py. Those in nn/cpu_kernels.py do so, but are never
  compiled, see uses_cpu_kernels there; tests/test_compile.py compares each Function;
- inductor of 2.11 cannot divide a long cumsum over a GPU's blocks: running_sum in nn/generation.py;
- before 2.13, fused AdamW ignores grad_scale on MPS: clip_and_step in training/optim.py.

Refused at the start, in training/settings.py: zbv with 2.11 on CPUs, where a rank cannot send to itself.
"""

import torch
import torch.distributed as dist

all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
# whether gloo can send between two stages of one rank
SENDS_TO_ITSELF = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)
