"""
Measurements for the documentation that depend too much on the machine for a test. They need an idle machine.

    python measure/costs.py stall        how long a checkpoint delays a step, in the background and blocking
    python measure/costs.py saves        what a checkpoint every 100 steps costs
    python measure/costs.py grad_sync    memory with grad_sync last and every, for each stage of ZeRO
    python measure/costs.py activations  memory of activations with and without recomputation, 12 layers
    python measure/costs.py tax          train.py's step, and a bare loop of forward, backward and optimizer
    python measure/costs.py two          the speed of two processes with a thread each, and of one with two
    python measure/costs.py bare         that bare loop, for the 10.65M config (batch 8 x 256)
    python measure/costs.py serve        8 clients of transformers serve, with and without batching
    python measure/costs.py prepare      prepare.py's speed with all cores, against tiktoken's own
    python measure/costs.py sampling     tokens per second of CPU time, GPT-2 124M, 10 samples of 256 tokens
"""

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from runs import REPO, SHAKESPEARE, column, records, tiny_data

CONFIG = ["--dataset=tiny", "--n_layer=6", "--n_head=6", "--n_embd=384", "--block_size=256", "--batch_size=8"]
CONFIG += ["--gradient_accumulation_steps=1", "--eval_interval=1000000", "--eval_iters=1", "--log_interval=1"]
CONFIG += ["--learning_rate=1e-3", "--warmup_iters=10", "--dropout=0.0"]


def train(work, args, nproc=1):
    """Run train.py as a user would; returns its output."""
    launcher = [sys.executable]
    if nproc > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    run = subprocess.run(
        [*launcher, str(REPO / "train.py"), *CONFIG, *args], cwd=work, capture_output=True, text=True
    )
    if run.returncode:
        sys.exit(run.stdout[-2000:] + run.stderr[-2000:])
    return run.stdout


def saves_of(work):
    """The events of completed checkpoints."""
    return [r for r in records(work / "out") if r.get("event") == "save"]


def stall(work):
    for nproc, zero in ((1, 0), (2, 3)):
        train(work, ["--out_dir=out", "--save_interval=4", "--max_iters=41", f"--zero={zero}"], nproc)
        found = saves_of(work)
        waited = statistics.median(r["stall"] for r in found[1:])
        alone = found[-1]["seconds"]  # the run waits for the last checkpoint, which uses the machine alone
        print(
            f"zero {zero}, {nproc} processes: a step waits {waited * 1e3:.0f} ms, a blocking checkpoint "
            "takes "
            f"{alone * 1e3:.0f} ms: {waited / alone:.1%}"
        )


def saves(work):
    train(work, ["--out_dir=out", "--save_interval=100", "--max_iters=399"])
    steps, found = column(work / "out", "step_ms"), saves_of(work)[:-1]
    usual = statistics.median(steps.values())
    extra = 0.0
    for r in found:  # the steps that writing in the background may have slowed, and the wait before them
        span = range(r["iter"], r["iter"] + 2 + int(r["seconds"] * 1e3 / usual))
        extra += sum(steps[s] - usual for s in span if s in steps) + r["stall"] * 1e3
    print(
        f"{len(found)} checkpoints, steps of {usual:.0f} ms: {extra / len(found):.0f} ms each, "
        f"{extra / len(found) / (100 * usual):.2%} of 100 steps"
    )


def grad_sync(work):
    shape = [
        "--n_embd=768",
        "--n_head=12",
        "--block_size=64",
        "--batch_size=1",
        "--gradient_accumulation_steps=8",
    ]
    for zero in range(4):
        for value in ("last", "every"):
            args = [*shape, f"--zero={zero}", f"--grad_sync={value}", "--max_iters=6", "--out_dir=out"]
            train(work, [*args, "--save_checkpoint=False", "--dtype=float32"], 2)
            memory = column(work / "out", "memory_gb_max")[6]
            print(
                f"zero {zero}, grad_sync {value}: {memory:.3f} GB on the largest rank (42.5M parameters)",
                flush=True,
            )


def activations(work):
    shape = ["--n_layer=12", "--batch_size=4", "--max_iters=4", "--dtype=float32", "--out_dir=out"]
    shape += ["--save_checkpoint=False"]

    def peak(*args):
        train(work, [*shape, *args])
        return column(work / "out", "memory_gb_max")[4]

    base = peak("--block_size=1024", "--batch_size=1", "--activation_checkpointing=full", "--n_layer=12")
    kinds = {
        mode: peak("--block_size=1024", f"--activation_checkpointing={mode}")
        for mode in ("none", "selective", "every:2", "full")
    }
    for mode, memory in kinds.items():
        print(
            f"12 layers x 1024 tokens x 4 rows, {mode}: {memory:.2f} GB in all, {memory - base:.2f} above "
            "one row "
            f"with full recomputation: {1 - (memory - base) / (kinds['none'] - base):.0%} less"
        )


def bare(steps=60):
    import torch
    from torch.nn.utils import clip_grads_with_norm_, get_total_norm

    from isogpt.launch import device
    from model import GPT, GPTConfig

    device.keep_freed_memory()
    model = GPT(GPTConfig(block_size=256, vocab_size=65, n_layer=6, n_head=6, n_embd=384, bias=False), 1337)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
    x, y = torch.randint(0, 65, (8, 256)), torch.randint(0, 65, (8, 256))
    for _ in range(steps):
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16):
            _, loss = model(x, y, 2048.0)
        loss.backward()
        norm = get_total_norm([p.grad for p in model.parameters()])
        clip_grads_with_norm_(model.parameters(), 1.0, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"time {(time.perf_counter() - start) * 1e3:.3f}ms")


def tax(work):
    ratios = []
    for _ in range(5):
        out = subprocess.run(
            [sys.executable, __file__, "bare"], capture_output=True, text=True, check=True
        ).stdout
        alone = statistics.median(float(t) for t in re.findall(r"time ([0-9.]+)ms", out)[5:])
        train(work, ["--out_dir=out", "--max_iters=60", "--save_checkpoint=False", "--dtype=bfloat16"])
        ours = statistics.median(list(column(work / "out", "step_ms").values())[5:])
        spans = records(work / "out")[-1]["spans_ms"]
        four = sum(spans[s]["mean"] for s in ("forward", "backward", "norm", "optimizer"))
        ratios.append(ours / alone)
        print(
            f"bare {alone:.1f} ms, train.py {ours:.1f} ms: {ours / alone - 1:+.1%}; in train.py, parts "
            "other than "
            f"forward, backward, clip and optimizer take {ours - four:.2f} ms: {(ours - four) / four:.2%}",
            flush=True,
        )
    print(f"median {statistics.median(ratios) - 1:+.1%}")


def two(work):
    works = {
        "64 sequences": ["--batch_size=64", "--max_iters=13"],
        "8 sequences": ["--max_iters=33"],
        "8 sequences, without communication": ["--max_iters=33", "--grad_sync=never"],
    }

    def step_ms(args, nproc):
        train(work, [*args, "--out_dir=out", "--save_checkpoint=False"], nproc)
        return statistics.median([ms for step, ms in column(work / "out", "step_ms").items() if step > 3])

    for name, args in works.items():
        ratios = [step_ms(args, 1) / step_ms(args, 2) for _ in range(3)]
        print(
            f"{name} per step: speed of two processes / speed of one "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )


def serve(work):
    import transformers
    from test_serving import BATCHING, CHARACTERS, PROMPTS, Server, serving

    from isogpt.data import tokenizer
    from isogpt.data.vocabulary import of_characters

    folder, seconds = work / "hf", {}
    ids = tokenizer.save_tokenizer(folder, of_characters(CHARACTERS), 50304, 1024)
    config = transformers.GPT2Config(vocab_size=50304, **ids)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    for name, options in 3 * [("one by one", []), ("continuous batching", BATCHING)]:
        with serving(folder, options, work / "log.txt") as url, ThreadPoolExecutor(8) as clients:
            complete = partial(Server(url, str(folder), []).complete, max_tokens=64)
            complete("x")
            start = time.perf_counter()
            list(clients.map(complete, PROMPTS))
            seconds.setdefault(name, []).append(time.perf_counter() - start)
        print(f"{name}: 8 clients, 64 tokens each, 124M parameters: {seconds[name][-1]:.1f} s", flush=True)
    ratios = [alone / batched for alone, batched in zip(*seconds.values(), strict=True)]
    print(f"{statistics.median(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f})")


def prepare(work, rounds=3, megabytes=200):
    import json
    import os
    import sysconfig

    import tiktoken

    cores, encoding = len(os.sched_getaffinity(0)), tiktoken.get_encoding("gpt2")
    library = [path.read_text() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    shakespeare = SHAKESPEARE.read_text()
    pieces = [shakespeare[begin : begin + 4000] for begin in range(0, len(shakespeare), 4000)]
    documents = [*library, *pieces]
    n_bytes = sum(len(document.encode()) for document in documents)
    documents *= megabytes * 1_000_000 // n_bytes
    n_bytes *= megabytes * 1_000_000 // n_bytes
    command = [sys.executable, str(REPO / "data/openwebtext/prepare.py"), "--shard_tokens=10_000_000"]

    def seconds(texts):
        """The seconds in which prepare.py tokenizes the texts."""
        (work / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
        begin = time.perf_counter()
        files = [f"--data_files={work / 'texts.jsonl'}", f"--out={work / 'out'}"]
        subprocess.run([*command, *files], capture_output=True, check=True)
        return time.perf_counter() - begin

    ratios = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for first in range(0, len(documents), 1000):  # all ids at once would take 2 GB
            encoding.encode_ordinary_batch(documents[first : first + 1000], num_threads=cores)
        alone = time.perf_counter() - begin
        start, whole = seconds(["x " * 2**19] * 2), seconds(documents)
        ratios.append((alone / whole, alone / (whole - start)))
        print(
            f"{n_bytes / 1e6:.0f} MB, {cores} cores: tiktoken {n_bytes / alone / 1e6:.1f} MB/s, prepare.py "
            f"{n_bytes / whole / 1e6:.1f} MB/s, of which the start takes {start:.1f} s: {alone / whole:.0%}, "
            f"without the start {alone / (whole - start):.0%}",
            flush=True,
        )
    whole, rest = map(statistics.median, zip(*ratios, strict=True))
    print(f"{whole:.0%} of tiktoken's speed, {rest:.0%} without the start")


def sampling(work):
    import torch

    from isogpt.launch import device
    from isogpt.nn import generation
    from model import GPT, GPTConfig

    device.keep_freed_memory()
    torch.set_num_threads(1)
    prompt = torch.full((10, 1), 198)
    for dtype in (torch.bfloat16, torch.float32):
        model = GPT(GPTConfig(), 1337).eval()
        generation.prepare(model, dtype)
        for _ in range(3):
            start = time.process_time()
            model.generate(prompt, 256, 0.8, 200, vocab_size=50257)
            print(f"{dtype}: {2560 / (time.process_time() - start):.0f} tokens/s", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = {
        f.__name__: f for f in (stall, saves, grad_sync, activations, tax, two, serve, prepare, sampling)
    }
    parser.add_argument("what", choices=[*kinds, "bare"])
    what = parser.parse_args().what
    if what == "bare":
        bare()
        return
    with tempfile.TemporaryDirectory() as folder:
        tiny_data(folder)
        kinds[what](Path(folder))


if __name__ == "__main__":
    main()
