"""
Compare the compiled gradients of layouts with those of eager mode (all ranks), many in one launch: a step as
train.py computes it, of a small model whose loss is computed in chunks.

Argument: a JSON file with a list of [model settings, settings of the layout]. Beside it, each rank writes for
each of them [the largest relative difference of a gradient, the parameter, compile_report].
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import isogpt.launch.torch_import  # noqa: F401

import json
import os
from dataclasses import asdict, replace
from functools import partial

import torch
import torch.distributed as dist
from runs import train_defaults
from torch._dynamo.utils import counters

from isogpt.check import facts
from isogpt.nn import kernels
from isogpt.nn.architecture import GPTConfig
from isogpt.parallel import compilation
from isogpt.parallel.local_parts import local
from isogpt.parallel.mesh import connect_mesh
from isogpt.parallel.plan import plan_of
from isogpt.training.settings import check_plan, model_args_of
from model import GPT

VOCABULARY, CPU = 512, torch.device("cpu")


def compile_here(model, plan, mesh):
    """What train.py compiles on a GPU, with a compiler that needs none."""
    torch._dynamo.reset()
    counters.clear()
    torch._dynamo.config.optimize_ddp = torch._functorch.config.donated_buffer = True
    compilation.trial_compilation = lambda device: ""
    compilation.compile_parts = lambda model, by_block, mode: compile_parts(
        model, by_block, backend="aot_eager"
    )
    compilation.compile_model(model, torch.device("cuda"), replace(plan, compile=True), mesh)


def gradients(trial, weights, is_compiled):
    """This rank's loss and gradients of a step."""
    model, pipeline = trial.divided_model(weights)
    if is_compiled:
        compile_here(model, trial.plan, trial.mesh)
    loss, _ = trial.step(model, pipeline)
    grads = {name: local(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": torch.tensor(loss)} | grads


def difference(model_settings, layout, rank, world_size):
    """The largest relative difference of a gradient, and the parameter."""
    size = dict(n_layer=2, n_head=4, n_embd=32, block_size=64)
    config = train_defaults(**size) | model_settings | layout
    args = asdict(GPTConfig(**model_args_of(config, vocab_size=VOCABULARY)))
    decided = dict(world_size=world_size, device_type="cpu", dtype="float32", model_args=args)
    plan = plan_of(config, config["islands"], **decided)
    check_plan(plan)
    mesh = connect_mesh(rank, plan, 60.0)
    facts.small_plan = lambda plan: replace(small_plan(plan), model_args=args)
    trial = facts.Trial(GPT, plan, mesh, CPU, config)
    weights = dict(trial.new_model().named_parameters())
    eager, compiled = (gradients(trial, weights, is_compiled) for is_compiled in (False, True))
    assert eager.keys() == compiled.keys()
    return max(((compiled[n] - g).norm().item() / (g.norm().item() or 1.0), n) for n, g in eager.items())


torch.set_num_threads(1)
kernels.logits_at_once = lambda *_: (2**13, 2**15, 2**15)  # two chunks of 128 rows
compile_parts, small_plan = compilation.compile_parts, facts.small_plan
# smaller buckets, at which DDP's graphs are divided
facts.DistributedDataParallel = partial(facts.DistributedDataParallel, bucket_cap_mb=1)
dist.init_process_group("gloo")
path, ranks = Path(sys.argv[1]), (dist.get_rank(), dist.get_world_size())
results = [
    [*difference(*item, *ranks), compilation.compile_report()] for item in json.loads(path.read_text())
]
path.with_suffix(f".rank{ranks[0]}").write_text(json.dumps(results))
os._exit(0)
