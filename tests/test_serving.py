"""`transformers serve` with a folder that export.py wrote: its clients get the text of sample.py."""

import importlib.util
import os
import signal
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from runs import free_port, wait_for
from test_model import roughen

from isogpt.checkpoint import huggingface
from isogpt.data.tokenizer import save_tokenizer
from isogpt.data.vocabulary import of_characters
from model import GPT, GPTConfig

MISSING = [
    name for name in ("fastapi", "uvicorn", "openai", "accelerate") if not importlib.util.find_spec(name)
]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}: see docs/serving.md"),
]
CHARACTERS = {chr(c): c - 32 for c in range(32, 127)} | {"\n": 95}
BLOCK_SIZE, TOKENS = 256, 40
PROMPTS = ["x", "def main(", " two  spaces ", "a line\n\n    and another", "{[(", "0123456789" * 9, "\n"]
BATCHING = ["--continuous-batching", "--cb-num-blocks=32", "--cb-max-batch-tokens=256"]
# the model, options of the server; test_exported.py has the other models
SERVERS = {"gpt2": ({}, BATCHING), "nanochat": (dict(arch="nanochat", n_kv_head=2), [])}


def make_folder(zygote, shape, folder):
    """
    Export a model with random weights and a tokenizer of characters; returns what sample.py writes after
    PROMPTS.
    """
    model = roughen(GPT(GPTConfig(BLOCK_SIZE, len(CHARACTERS), 2, 4, 64, **shape), seed=0))
    token_ids = save_tokenizer(folder, of_characters(CHARACTERS), len(CHARACTERS), BLOCK_SIZE)
    huggingface.save(folder, model, token_ids)
    character, texts = {i: c for c, i in CHARACTERS.items()}, []
    for prompt in PROMPTS:
        ids = torch.tensor([[CHARACTERS[c] for c in prompt]])  # (1, T)
        new = model.generate(ids, TOKENS, temperature=0)[0, ids.shape[1] :]
        texts.append("".join(character[i] for i in new.tolist()))
    command = [f"--init_from={folder}", f"--start={PROMPTS[1]}", "--device=cpu", "--dtype=float32"]
    command += ["--temperature=0", "--num_samples=1", f"--max_new_tokens={TOKENS}"]
    run = zygote.start(command, folder.parent, script="sample.py").wait()
    assert f"{PROMPTS[1]}{texts[1]}\n" in run.samples()
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
    folder = tmp_path / "hf"
    texts = make_folder(zygote, shape, folder)
    assert len(set(texts)) == len(PROMPTS)
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
