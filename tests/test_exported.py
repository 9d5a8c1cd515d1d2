"""What other tools do with a folder that export.py wrote: padded batches, training, lm_eval, llama.cpp."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from isogpt.checkpoint import huggingface
from isogpt.data import tokenizer
from isogpt.data.vocabulary import of_characters
from model import GPT, GPTConfig

ARCHITECTURES = {
    "gpt2": {},
    "nanochat": {"arch": "nanochat"},
    "llama": {"arch": "llama", "n_kv_head": 1},
    "mixtral": {"arch": "llama", "n_expert": 2},
}
# of a config.json, beside values with a default (conversion/gpt2.py and llama.py of llama-cpp-python 0.3.36)
OF_LLAMA = ("num_hidden_layers", "max_position_embeddings", "hidden_size", "intermediate_size")
OF_LLAMA += ("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "vocab_size")
READ_BY_LLAMA_CPP = {
    "gpt2": ("n_layer", "n_ctx", "n_embd", "n_head", "layer_norm_epsilon", "vocab_size"),
    "llama": OF_LLAMA,
    "mixtral": (*OF_LLAMA, "num_local_experts", "num_experts_per_tok"),
}


def export(folder, vocab_size=6, characters="abcdef", **shape):
    """Export a model of characters with random weights that are not small; returns the model."""
    config = GPTConfig(block_size=32, vocab_size=vocab_size, n_layer=2, n_head=2, n_embd=16, **shape)
    model = GPT(config, seed=1).eval()
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    vocabulary = of_characters({c: i for i, c in enumerate(characters)})
    huggingface.save(folder, model, tokenizer.save_tokenizer(folder, vocabulary, vocab_size, 32))
    return model


@pytest.mark.parametrize("name, vocab_size", [*((name, 6) for name in ARCHITECTURES), ("gpt2", 16)])
def test_a_padded_batch(tmp_path, name, vocab_size):
    """Each row gets the logits and the text that it gets alone, and no id that sample.py does not sample."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

    model = export(tmp_path, vocab_size, **ARCHITECTURES[name])
    hf = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    tokens = AutoTokenizer.from_pretrained(tmp_path, padding_side="left")
    batch = tokens(["ab", "fedcba"], padding=True, return_tensors="pt")
    texts = hf.generate(**batch, max_new_tokens=16, do_sample=False)
    for row, prompt in zip(texts, ("ab", "fedcba"), strict=True):
        ids = torch.tensor([["abcdef".index(c) for c in prompt]])
        alone = model.generate(ids, 16, temperature=0, vocab_size=6)[0]
        assert tokens.decode(row, skip_special_tokens=True) == "".join("abcdef"[i] for i in alone)
    torch.manual_seed(0)
    many = hf.generate(
        torch.zeros(64, 1, dtype=torch.long), max_new_tokens=20, do_sample=True, temperature=9.0
    )
    assert set(many.flatten().tolist()) == set(range(6))

    # as in transformers' Trainer; a character that the vocabulary lacks is not trained on either
    collate = DataCollatorForLanguageModeling(tokens, mlm=False)
    batch = collate([tokens(text) for text in ("ab?", "fedcba")])
    assert batch["labels"][0].tolist() == [-100, -100, -100, 0, 1, -100]
    hf(**batch).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in hf.parameters())

    config = json.loads((tmp_path / "config.json").read_text())
    assert all(isinstance(config[key], int | float) for key in READ_BY_LLAMA_CPP.get(name, ())), config

    # what was added for other tools is not imported
    back = GPT.from_pretrained(str(tmp_path)).state_dict()
    assert back.keys() == model.state_dict().keys()
    assert all(torch.equal(back[name], w) for name, w in model.state_dict().items())


TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {data_files: {test: tiny.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
metric_list: [{metric: acc}]
"""


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("lm_eval"), reason="no lm_eval: pip install lm_eval")
def test_lm_eval(tmp_path):
    """The documented command, with rows of several lengths in a batch, and a character that nobody knows."""
    export(tmp_path / "hf")
    (tmp_path / "tiny.yaml").write_text(TASK)
    rows = [
        {"q": "abc", "choices": ["d", "fedcab"], "gold": 0},
        {"q": "a?", "choices": ["b", "c"], "gold": 1},
    ]
    (tmp_path / "tiny.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "-m", "lm_eval", "--model=hf", "--model_args=pretrained=hf", "--device=cpu"]
    command += ["--tasks=tiny", "--include_path=.", "--batch_size=4"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "|tiny" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
