"""
Generate text with a trained model.

    python sample.py --out_dir=out-stdlib-char --start="def main("
    python sample.py --init_from=gpt2-xl --start="What is the answer?" --num_samples=5
    python sample.py --out_dir=out --start=FILE:prompt.txt
    torchrun --standalone --nproc_per_node=2 sample.py --out_dir=out           divide the samples
    torchrun --standalone --nproc_per_node=2 sample.py --out_dir=out --tp=2    divide the model
    torchrun --standalone --nproc_per_node=2 -- sample.py --start="def main("

In the last command, `--` is needed because torchrun accepts the option --start-method. A sample's text
depends on the seed and the sample's number. It depends on the numbers of processes and samples only through
rounding.
"""

import isogpt.launch.torch_import  # noqa: F401  (first: sets what must be set before torch is imported)

import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
import torch.distributed as dist

from configurator import configure, fail
from isogpt.check.facts import Trial
from isogpt.check.layout import prove_layout
from isogpt.checkpoint import download, manifest, run_vocabulary, search, state
from isogpt.checkpoint.source import check_finite, check_weights, open_checkpoint
from isogpt.common import console
from isogpt.data.text_files import read_text
from isogpt.data.tokenizer import load as load_tokenizer
from isogpt.launch import launchers, process_group, start_checks
from isogpt.launch.together import broadcast, do_together, exit_together, gather_objects
from isogpt.nn import generation
from isogpt.nn.architecture import GPT2
from isogpt.options.values import is_url
from isogpt.parallel import compilation, parallelize
from isogpt.parallel.mesh import make_mesh
from isogpt.parallel.plan import Plan
from isogpt.training import precision, settings
from model import GPT, GPTConfig

# -- model ---------------------------------------------------------------------------------------------------
init_from = "resume"  # resume (a run in out_dir), gpt2[-medium|-large|-xl], a folder of transformers, a URL
out_dir = "out"  # the run's folder
best = True  # use the checkpoint with the best val loss; False: the newest
dataset = ""  # the data set whose vocabulary is used (empty: the vocabulary that the checkpoint records)
# -- text ----------------------------------------------------------------------------------------------------
start = "\n"  # the prompt, or FILE:name of a file that contains it (with torchrun, type -- before sample.py)
num_samples = 10  # number of samples; each process generates a share of them as one batch [>= 1]
max_new_tokens = 500  # tokens to generate per sample [>= 1]
temperature = 0.8  # below 1: less random, above 1: more random; 0: always the most likely token [>= 0]
top_k = 200  # sample from the k most likely tokens (0: from all) [>= 0]
top_p = 1.0  # sample from the most likely tokens that have this probability together [> 0, <= 1]
stop = ""  # end a sample before the first occurrence of this text after the prompt (empty: at max_new_tokens)
special_tokens = True  # the text of a special token in the prompt, such as <|endoftext|>, becomes this token
# -- run -----------------------------------------------------------------------------------------------------
seed = 1337  # the same seed gives the same text [>= 0]
device = "auto"  # auto (cuda, else mps, else cpu), cpu, cuda, cuda:N or mps
dtype = "auto"  # auto: the fastest that the device computes in [auto | float32 | tf32 | bfloat16 | float16]
tp = 1  # processes that divide each matrix of the model [>= 1]
pp = 1  # processes that divide the layers of the model [>= 1]
compile = False  # compile a token's step to one CUDA graph: takes a minute, then a GPU generates much faster
dist_timeout_s = 600.0  # how long processes wait for each other [> 0]
# ------------------------------------------------------------------------------------------------------------
try:
    launchers.adopt_launcher_variables()  # translates srun's and mpirun's variables to torchrun's
    config = configure(globals())
    if os.path.isfile(init_from):
        folder = os.path.dirname(init_from) or "."
        raise ValueError(
            f"init_from {init_from} is a file: set --out_dir={folder} for a run's ckpt.pt in this folder, or "
            f"--init_from={folder} for a model of transformers"
        )
    if init_from not in ("resume", *GPT2) and not is_url(init_from) and not os.path.isdir(init_from):
        raise ValueError(
            f"init_from is {init_from!r}; choose from resume (a run in out_dir), gpt2[-medium|-large|-xl], a "
            "folder of Hugging Face weights, or the URL of a run's mirror"
        )
    plan = Plan(world_size=launchers.rank_variables()[1], tp=tp, pp=pp)
    settings.check_plan(plan)
    backend = "auto" if tp * pp > 1 else "gloo"
    ranks = process_group.connect_ranks(device, backend, dist_timeout_s)
    mesh = make_mesh(ranks.rank, plan, dist_timeout_s)
    if ranks.has_launcher:
        dist.init_process_group(ranks.backend, **ranks.group_options(dist_timeout_s))
        mesh.connect(ranks.device.type)
except (ValueError, dist.DistError) as e:
    fail(str(e))
start_checks.check_start(ranks, config)
text = start
if start.startswith("FILE:"):
    path = Path(start.removeprefix("FILE:")).expanduser()
    # on rank 0: a pipe, such as FILE:/dev/stdin, can be read only once
    text = broadcast(do_together(read_text if ranks.is_main else str, path))

# the checkpoint, the tokenizer and the model (all ranks load them; an error on any rank ends all ranks)
stored, damaged, source, pretrained = None, [], None, None
if is_url(init_from):
    stored, damaged = download.fetch_weights(init_from, out_dir, best)
elif init_from == "resume":
    stored, damaged = search.find_checkpoint(out_dir, best)
with exit_together():
    compute_dtype = precision.resolve_dtype(dtype, ranks.device)
    if stored:
        source = open_checkpoint(stored, GPTConfig)
    elif init_from == "resume":
        raise manifest.no_checkpoint(out_dir, damaged)
    else:
        pretrained = GPT.from_pretrained(init_from)
    run = source.run if source else {"model_args": pretrained.describe()}
    vocabulary = run_vocabulary.vocabulary_of_run(run, stored.folder if stored else init_from, dataset)
    tokenizer = load_tokenizer(vocabulary, special_tokens)
    if text.encode(errors="replace").decode() != text:  # half of a surrogate pair stands for a byte
        raise ValueError("--start is not text in UTF-8: type --start=FILE:name of a file in UTF-8")
    prompt = tokenizer.encode(text)
    if not prompt:
        raise ValueError("--start is empty: give at least one character")
    with torch.device("meta"):
        model = GPT(GPTConfig(**run["model_args"]))
    plan = replace(plan, model_args=asdict(model.config))  # with defaults, and heads of keys and values
    settings.check_plan(plan, splits_sequence=False)
    if source:
        check_weights(source, model)
if stored and ranks.is_main:
    for report in damaged:
        console.print_to_stderr(f"warning: {report}")
    loss = "unknown" if stored.val_loss is None else f"{stored.val_loss:.4f}"
    console.print_to_stderr(f"{stored.path}: step {stored.step}, val loss {loss}")
plan = replace(plan, dtype=precision.common_dtype(gather_objects(compute_dtype)))
if mesh.splits_model:  # an edited model may not be divided as model.py was
    try:
        prove_layout(GPT, plan, mesh, ranks.device, config)
    except ValueError as e:  # not with exit_together: with pp, perhaps on this rank only
        fail(f"{e}, or set --tp=1 --pp=1")
precision.set_numerics(ranks.device, plan.dtype, deterministic=False)
splits = parallelize.divide_model(model, plan, mesh, ranks.device, splits_sequence=False)
parallelize.materialize(model, torch.device("cpu"), splits)
if source:
    do_together(state.restore_checkpoint, source, model)
    model.set_step(stored.step)
else:
    do_together(state.load_weights, model, pretrained.state_dict())
do_together(check_finite, model, stored.path if stored else init_from)
source = pretrained = None  # frees the memory of the loaded tensors
if is_url(init_from):  # all ranks have read what was downloaded
    do_together(download.discard_weights, stored)
model.eval().to(ranks.device)
uses_autocast = plan.torch_dtype.itemsize == 2
if mesh.splits_model:
    pipeline = parallelize.make_pipeline(model, mesh, ranks.device, plan, splits_sequence=False)
    model = pipeline or model
notes = [compilation.compile_generation(model, ranks.device, mesh.splits_model)] if compile else []
block_size = plan.model_args["block_size"]
if len(prompt) > block_size:
    notes.append(f"the model reads only the last {block_size:,} of the prompt's {len(prompt):,} tokens")
idx = torch.tensor([prompt], device=ranks.device)  # (1, T)
# an edited model may not fit the cache: all ranks then generate without it; checked while weights are float32
problem = generation.problem_of_cache(model, idx, max_new_tokens, splits_layers=pp > 1)
problem = next(filter(None, gather_objects(problem)), "")
notes.append(problem)
if not mesh.splits_model:  # an edited model may not survive this either
    small = Trial(GPT, plan, mesh, ranks.device, {}).new_model().eval()
    notes.append(generation.problem_of_prepare(small, plan.torch_dtype))
    if not notes[-1]:  # the weights are in the dtype to compute in
        generation.prepare(model, plan.torch_dtype)
        uses_autocast = False
for note in filter(None, notes if ranks.is_main else []):
    console.print_to_stderr(f"note: {note}")

# this rank's samples, of which there may be none
first, end = (num_samples * n // mesh.data_size for n in (mesh.data_rank, mesh.data_rank + 1))
texts, began = [], time.perf_counter()
if first < end:
    idx = idx.repeat(end - first, 1)  # (samples, T)
    # ids that only pad the vocabulary cannot be decoded: do not sample them
    choice = generation.Choice(temperature, top_k, top_p, tokenizer.n_ids)
    options = {"use_cache": not problem, "seed": seed, "first_sample": first}
    with torch.autocast(ranks.device.type, plan.torch_dtype, enabled=uses_autocast):
        samples = generation.generate(model, idx, max_new_tokens, choice, **options).tolist()
    prompt_length = len(tokenizer.decode(prompt))
    for sample in map(tokenizer.decode, samples):
        cut = sample.find(stop, prompt_length) if stop else -1
        texts.append(sample if cut < 0 else sample[:cut])
# from the first of the ranks that generate the same samples
gathered = gather_objects(texts if mesh.same_tokens.index == 0 else [])
seconds, n_tokens = time.perf_counter() - began, num_samples * max_new_tokens
if ranks.is_main:
    for sample in sum(gathered, []):
        console.print_result(f"{sample}\n---------------")
    speed = f"{n_tokens / seconds:,.0f} tokens/s ({console.count_text(num_samples, 'sample')})"
    console.print_to_stderr(f"{n_tokens:,} tokens in {seconds:.1f} s, {speed}")
del model, mesh  # a model that still refers to the process group can abort the process at its end
process_group.leave_process_group()
