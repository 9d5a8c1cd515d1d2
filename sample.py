"""
Generate text with a trained model.

    python sample.py --out_dir=out-stdlib-char --start="def main("
    python sample.py --init_from=gpt2-xl --start="What is the answer?" --num_samples=5
    python sample.py --out_dir=out --start=FILE:prompt.txt
"""

import isogpt.threads  # noqa: F401  (before torch, which reads the variable that this may set)

import sys
from pathlib import Path

import torch

from configurator import configure, fail
from isogpt import checkpoint, launch, parallel, precision, run_folder, settings, tokenizer
from model import GPT, GPTConfig

# -- model ------------------------------------------------------------------------------------------------------------
init_from = "resume"  # resume (a run in out_dir), gpt2[-medium|-large|-xl], or a folder of Hugging Face GPT-2 weights
out_dir = "out"  # the run's folder
best = True  # use the checkpoint with the best val loss; False: the newest
# -- text -------------------------------------------------------------------------------------------------------------
start = "\n"  # the prompt, or FILE:name of a file that contains it
num_samples = 10  # number of samples, generated as one batch
max_new_tokens = 500  # tokens to generate per sample
temperature = 0.8  # below 1: less random, above 1: more random; 0: always the most likely token
top_k = 200  # sample among the k most likely tokens (0: all)
top_p = 1.0  # sample among the most likely tokens whose probabilities sum to this (1: all)
# -- run --------------------------------------------------------------------------------------------------------------
seed = 1337  # the same seed gives the same text
device = "auto"  # auto (cuda, else mps, else cpu), cpu, cuda, cuda:N or mps
dtype = "auto"  # auto (the fastest that the device supports in hardware), float32, tf32, bfloat16 or float16
compile = False  # torch.compile: worth its minute only for very long or very many samples on a GPU
# ---------------------------------------------------------------------------------------------------------------------
config = configure(globals())


def load_model() -> tuple[GPT, str]:
    """The model, and the name of the data set whose tokens it uses ('': GPT-2's)."""
    if init_from != "resume":
        return GPT.from_pretrained(init_from), ""
    found, damaged = run_folder.best(out_dir) if best else run_folder.newest(out_dir)
    for report in damaged:
        print(f"warning: {report}", file=sys.stderr)
    if not found:
        raise ValueError(f"no checkpoint in {out_dir}: set --out_dir= to the run's folder")
    source = checkpoint.open_checkpoint(found)
    print(f"{found.path}: step {found.step}, best val loss {source.run['best_val_loss']:.4f}", file=sys.stderr)
    with torch.device("meta"):
        model = GPT(GPTConfig(**source.run["model_args"]))
    parallel.materialize(model, torch.device("cpu"))
    checkpoint.restore(source, model)
    return model, source.run["config"].get("dataset", "")


try:
    settings.check_sampling(config)
    where = launch.pick_device(device, local_rank=0, world_size=1)
    compute_dtype = precision.resolve_dtype(dtype, where)
    precision.set_numerics(where, compute_dtype, deterministic=False)
    model, dataset = load_model()
    meta = tokenizer.find_meta(dataset, model.config.vocab_size)
    encode, decode, n_ids = tokenizer.load_tokenizer(meta, dataset)
    try:
        text = Path(start[5:]).read_text(encoding="utf-8") if start.startswith("FILE:") else start
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"--start={start} cannot be read as text: {e}") from e
    prompt = encode(text)
    if not prompt:
        raise ValueError("--start is empty: give at least one character")
except (ValueError, OSError) as e:
    fail(str(e))

model.eval().to(where)
if compile:
    model.compile()
torch.manual_seed(seed)
idx = torch.tensor([prompt] * num_samples, device=where)  # (num_samples, T)
n_ids = min(n_ids, model.config.vocab_size)  # ids that only pad the vocabulary cannot be decoded: do not sample them
torch_dtype = precision.DTYPES[compute_dtype]
with torch.autocast(where.type, torch_dtype, enabled=torch_dtype.itemsize == 2):
    samples = model.generate(idx, max_new_tokens, temperature, top_k, top_p=top_p, vocab_size=n_ids)
for sample in samples.tolist():
    print(decode(sample), "---------------", sep="\n")
