"""`transformers serve` with a folder that export.py wrote: its clients get the text of sample.py."""

import importlib.util
import os
import pickle
import signal
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from runs import free_port, train_defaults, wait_for

from isogpt.checkpoint.ckpt_file import nanogpt_state
from isogpt.training import optim
from model import GPT, GPTConfig

MISSING = [
    name for name in ("fastapi", "uvicorn", "openai", "accelerate") if not importlib.util.find_spec(name)
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(MISSING), reason=f"no {', '.join(MISSING)}: pip install -r requirements-serve.txt"
    ),
]
CHARACTERS = {chr(c): c - 32 for c in range(32, 127)} | {"\n": 95}
BLOCK_SIZE, TOKENS = 256, 40
PROMPTS = ["x", "def main(", " two  spaces ", "a line\n\n    and another", "{[(", "0123456789" * 9, "\n"]
BATCHING = ["--continuous-batching", "--cb-num-blocks=32", "--cb-max-batch-tokens=256"]
# the model, options of the server; test_exported.py has the other models
SERVERS = {"gpt2": ({}, BATCHING), "nanochat": (dict(arch="nanochat", n_kv_head=2), [])}


def make_folder(zygote, shape, out):
    """
    Export a run with random weights and a data set of characters; returns what sample.py writes after
    PROMPTS.
    """
    config = GPTConfig(BLOCK_SIZE, len(CHARACTERS), 2, 4, 64, **shape)
    model = GPT(config, seed=0).eval()
    for name, p in model.named_parameters():  # so that the text depends on all of the prompt
        if p.dim() > 1:
            p.data = 0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)))
    data = out / "data"
    data.mkdir(parents=True)
    meta = {"vocab_size": len(CHARACTERS), "stoi": CHARACTERS, "itos": {i: c for c, i in CHARACTERS.items()}}
    (data / "meta.pkl").write_bytes(pickle.dumps(meta))
    (data / "train.bin").write_bytes(bytes(2 * BLOCK_SIZE + 2))
    run = {"model_args": model.describe(), "iter_num": 1, "best_val_loss": 9.0, "isogpt": {}}
    run["config"] = {"dataset": str(data)}
    optimizers = optim.make_optimizers(model, train_defaults())
    torch.save(nanogpt_state(run, model, optimizers), out / "ckpt.pt")
    zygote.start([out, "--to=hf"], out, script="export.py").wait()
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([[CHARACTERS[c] for c in prompt]])  # (1, T)
        new = model.generate(ids, TOKENS, temperature=0)[0, ids.shape[1] :]
        texts.append("".join(meta["itos"][i] for i in new.tolist()))
    options = ["--device=cpu", "--dtype=float32", "--temperature=0", "--num_samples=1"]
    options += [f"--max_new_tokens={TOKENS}"]
    command = [f"--out_dir={out}", f"--start={PROMPTS[1]}", *options]
    run = zygote.start(command, out, script="sample.py").wait()
    assert f"\n{PROMPTS[1]}{texts[1]}\n" in run.samples()
    return texts


def answers(url):
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=1).status == 200
    except OSError:
        return False


@contextmanager
def serving(folder, options, log):
    """Run `transformers serve` until the end of the block; gives its address."""
    port = free_port()
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder), "--device=cpu"]
    with open(log, "w") as out:
        process = subprocess.Popen(
            [*command, *options, "--host=127.0.0.1", f"--port={port}"],
            stdout=out,
            stderr=out,
            start_new_session=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: answers(url) or process.poll() is not None, seconds=120)
        assert process.poll() is None, Path(log).read_text()
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("name", SERVERS)
def test_clients_get_the_text_of_sample_py(zygote, tmp_path, name):
    """One after the other, at once, and as a chat, which continues the text of its messages."""
    import openai

    shape, options = SERVERS[name]
    texts = make_folder(zygote, shape, tmp_path / "out")
    assert len(set(texts)) == len(PROMPTS)
    folder = tmp_path / "out" / "hf"
    likeliest = dict(model=str(folder), max_tokens=TOKENS, temperature=0)
    with serving(folder, options, tmp_path / "log.txt") as url:

        def client():
            return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)

        def complete(prompt):
            return client().completions.create(prompt=prompt, **likeliest).choices[0].text

        assert [complete(prompt) for prompt in PROMPTS] == texts
        with ThreadPoolExecutor(len(PROMPTS)) as clients:
            assert list(clients.map(complete, PROMPTS)) == texts
        for prompt, text in zip(PROMPTS, texts, strict=True):
            messages = [{"role": "system", "content": prompt[:2]}, {"role": "user", "content": prompt[2:]}]
            answer = client().chat.completions.create(messages=messages, **likeliest)
            assert answer.choices[0].message.content == text
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), TOKENS)
