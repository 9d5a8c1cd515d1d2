"""
Compare layouts with one process (all ranks), many in one launch: see isogpt/check/layout.py.

Arguments: a JSON file with a list of [model settings, settings of the layout, break or null, name of an edit
or ""], and the folder of the repository to compare. Rank 0 writes a JSON list of the differences beside
the file, "" for an equal layout.
"""

import sys
from pathlib import Path

sys.path[:0] = [sys.argv[2], str(Path(__file__).resolve().parent.parent)]

import isogpt.launch.torch_import  # noqa: F401

import gc
import json
import os
from contextlib import nullcontext
from dataclasses import asdict

import torch
import torch.distributed as dist
from breaks import broken
from edits import edited_gpt
from runs import train_defaults

from isogpt.check.layout import first_problem
from isogpt.parallel.mesh import connect_mesh
from isogpt.parallel.plan import LayoutError, plan_of
from isogpt.training.settings import check_plan, model_args_of
from model import GPT

SMALL = dict(n_layer=4, n_head=4, n_embd=32, block_size=64, batch_size=2, gradient_accumulation_steps=8)

torch.set_num_threads(1)
path, results = Path(sys.argv[1]), []
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
for number, (model_settings, layout, fault, edit) in enumerate(json.loads(path.read_text())):
    config = train_defaults(**SMALL) | model_settings | layout
    gpt = edited_gpt(edit) if edit else GPT
    args = asdict(gpt.config_class(**model_args_of(config, vocab_size=config["vocab_size"] or 65)))
    decided = dict(world_size=size, device_type="cpu", dtype="float32", model_args=args)
    plan = plan_of(config, config["islands"], **decided)
    dist.init_process_group("gloo", f"file://{path}.{number}", rank=rank, world_size=size)
    try:
        check_plan(plan)
        with broken(*fault) if fault else nullcontext():
            mesh = connect_mesh(rank, plan, 60.0)
            problem = first_problem(gpt, plan, mesh, torch.device("cpu"), config)
        results.append(problem and f"differs: {problem}")
    except LayoutError as e:  # on all ranks
        results.append(f"refused: {e}")
    except Exception as e:
        results.append(f"crashed: {e}")
    mesh = None
    dist.destroy_process_group()  # after a crash, ends the collectives of the other ranks
    gc.collect()
if rank == 0:
    path.with_suffix(".out").write_text(json.dumps(results))
os._exit(0)
