"""
Write text with a trained model.

    python sample.py --out_dir=out-stdlib-char --start="def main("
    python sample.py --init_from=gpt2-xl --start="What is the answer?" --num_samples=5
    python sample.py --out_dir=out --start=FILE:prompt.txt
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch

import checkpoint
import launch
import loader
from configurator import configure, fail
from model import GPT

# -- model ------------------------------------------------------------------------------------------------------------
init_from = "resume"  # resume (a run in out_dir), gpt2[-medium|-large|-xl], or a folder of Hugging Face GPT-2 weights
out_dir = "out"  # the run's folder
best = True  # of that run, the save with the best val loss; False: the newest
# -- text -------------------------------------------------------------------------------------------------------------
start = "\n"  # the text to continue, or FILE:name of a file that holds it
num_samples = 10  # how many continuations, written all at once
max_new_tokens = 500  # tokens in each
temperature = 0.8  # below 1 safer, above 1 wilder; 0 always takes the likeliest token
top_k = 200  # sample among this many likeliest tokens; 0: among all
# -- run --------------------------------------------------------------------------------------------------------------
seed = 1337  # the same seed, the same text
device = "auto"  # auto (cuda, else mps, else cpu), cpu, cuda, cuda:N or mps
dtype = "auto"  # auto (the best that the device runs fast), float32, tf32, bfloat16 or float16
compile = False  # torch.compile: worth its minute for very long or very many samples on a GPU only
# ---------------------------------------------------------------------------------------------------------------------
config = configure(globals())

problems = [f"{k} is {config[k]}: it must be at least 1" for k in ("num_samples", "max_new_tokens") if config[k] < 1]
problems += [f"{k} is {config[k]}: it must not be negative" for k in ("temperature", "top_k", "seed") if config[k] < 0]
known = ("resume", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
if init_from not in known and not (init_from and Path(init_from).is_dir()):
    problems += [f"init_from is {init_from!r}; possible: resume, gpt2[-medium|-large|-xl], a folder"]
if seed >= 2**63:
    problems += [f"seed is {seed}: it must be below 2**63"]
if problems:
    fail("\n".join(problems))


def load_model() -> tuple[GPT, str]:
    """The model, and the data set whose tokens it knows ('' : GPT-2's)."""
    if init_from != "resume":
        return GPT.from_pretrained(init_from), ""
    found, reports = checkpoint.best(out_dir) if best else checkpoint.newest(out_dir)
    for report in reports:
        print(f"warning: {report}", file=sys.stderr)
    if not found:
        raise ValueError(f"no checkpoint in {out_dir}: name the run's folder with --out_dir=")
    source = checkpoint.open_save(found)
    print(f"{found.path}: step {found.step}, best val loss {source.run['best_val_loss']:.4f}", file=sys.stderr)
    return checkpoint.read_model(source), source.run.get("config", {}).get("dataset", "")


def tokenizer(name: str, vocab_size: int) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str], int]:
    """(encode, decode, number of ids) of data set `name`, GPT-2's where it says nothing."""
    try:
        meta = loader.read_meta(loader.find_dataset(name)) if name else {}
    except ValueError as e:  # the run's data is not on this machine
        if vocab_size < 50257:
            raise ValueError(f"the run's data set {name} is needed for its characters: {e}") from e
        meta = {}  # most likely GPT-2's tokens
    if "stoi" in meta:
        stoi, itos = meta["stoi"], meta["itos"]

        def encode(text: str) -> list[int]:
            unknown = sorted(set(text) - set(stoi))
            if unknown:
                raise ValueError(f"--start has characters that data set {name} has not: {' '.join(map(repr, unknown))}")
            return [stoi[c] for c in text]

        return encode, lambda ids: "".join(itos[i] for i in ids), len(itos)
    import tiktoken

    try:
        gpt2 = tiktoken.get_encoding(meta.get("tokenizer", "gpt2"))
    except (OSError, ValueError) as e:
        raise ValueError(
            f"tiktoken cannot get its tokenizer ({str(e)[:80]}): go online, or set TIKTOKEN_CACHE_DIR"
        ) from e
    return lambda text: gpt2.encode(text, allowed_special="all"), gpt2.decode, gpt2.n_vocab


try:
    where = launch.pick_device(device, local_rank=0, world_size=1)
    dtype_used = launch.dtype_for(dtype, where)
    launch.set_numerics(where, dtype_used, deterministic=False)
    model, dataset = load_model()
    encode, decode, n_tokens = tokenizer(dataset, model.config.vocab_size)
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
n_tokens = min(n_tokens, model.config.vocab_size)  # ids that pad the vocabulary mean nothing: they are not sampled
with torch.autocast(where.type, launch.DTYPES[dtype_used], enabled=dtype_used in ("bfloat16", "float16")):
    samples = model.generate(idx, max_new_tokens, temperature, top_k, n_tokens)
for sample in samples.tolist():
    print(decode(sample))
    print("---------------")
