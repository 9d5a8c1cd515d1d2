"""What other tools do with a folder that export.py wrote: padded batches, training, lm_eval, llama.cpp."""

import importlib.util
import json
import os
import resource
import shutil
import subprocess
import sys

import pytest
import torch

import export
from isogpt.checkpoint.search import find_checkpoint
from isogpt.data.vocabulary import of_characters
from model import GPT, GPTConfig

ARCHITECTURES = {
    "gpt2": {},
    "nanochat": {"arch": "nanochat"},
    "llama": {"arch": "llama", "n_kv_head": 1, "rope_theta": 5e5},
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


def export_model(out_dir, vocab_size=6, characters="abcdef", **shape):
    """Write OUT_DIR/hf: a model of characters with random weights that are not small; returns the model."""
    config = GPTConfig(block_size=32, vocab_size=vocab_size, n_layer=2, n_head=2, n_embd=16, **shape)
    model = GPT(config, seed=1).eval()
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    vocabulary = of_characters({c: i for i, c in enumerate(characters)})
    export.write_hf(str(out_dir), model, vocabulary, "the model card")
    return model


@pytest.mark.parametrize("name, vocab_size", [*((name, 6) for name in ARCHITECTURES), ("gpt2", 16)])
def test_a_padded_batch(tmp_path, name, vocab_size):
    """Each row gets the logits and the text that it gets alone, and no id that sample.py does not sample."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

    model = export_model(tmp_path, vocab_size, **ARCHITECTURES[name])
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokens = AutoTokenizer.from_pretrained(tmp_path / "hf", padding_side="left")
    batch = tokens(["ab", "fedcba"], padding=True, return_tensors="pt")
    texts = hf.generate(**batch, max_new_tokens=16, do_sample=False)
    for row, prompt in zip(texts, ("ab", "fedcba"), strict=True):
        ids = torch.tensor([["abcdef".index(c) for c in prompt]])
        alone = model.generate(ids, 16, temperature=0, vocab_size=6)[0]
        assert tokens.decode(row, skip_special_tokens=True) == "".join("abcdef"[i] for i in alone)
    torch.manual_seed(0)
    many = hf.generate(torch.zeros(64, 1).long(), max_new_tokens=20, do_sample=True, temperature=9.0)
    assert set(many.flatten().tolist()) == set(range(6))

    # as in transformers' Trainer; a character that the vocabulary lacks is not trained on either
    collate = DataCollatorForLanguageModeling(tokens, mlm=False)
    batch = collate([tokens(text) for text in ("ab?", "fedcba")])
    assert batch["labels"][0].tolist() == [-100, -100, -100, 0, 1, -100]
    hf(**batch).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in hf.parameters())

    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert all(isinstance(config[key], int | float) for key in READ_BY_LLAMA_CPP.get(name, ())), config
    # transformers 4, which vLLM and others still use, has other defaults and class names than 5
    assert name == "gpt2" or config["rope_theta"] == model.config.rope_theta
    of_tokenizer = json.loads((tmp_path / "hf/tokenizer_config.json").read_text())
    assert of_tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert of_tokenizer["model_input_names"] == ["input_ids", "attention_mask"]

    # what was added for other tools is not imported
    back = GPT.from_pretrained(str(tmp_path / "hf"))
    torch.testing.assert_close(back.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_export_has_the_dropout_of_the_run_and_can_be_read_by_others(tmp_path, name):
    """Otherwise the Trainer and peft would train with the defaults of GPT2Config."""
    umask = os.umask(0o027)
    try:
        export_model(tmp_path, dropout=0.25, **ARCHITECTURES[name])
    finally:
        os.umask(umask)
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert {value for field, value in config.items() if "drop" in field} == {0.25}
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "hf").iterdir()} == {0o640}


def test_an_export_that_cannot_be_written_says_the_systems_reason(trained, tmp_path, at, capsys):
    """Safetensors raises an error of its own, here for a limit of `ulimit -f`."""
    out = shutil.copytree(trained(["--max_iters=1"]), tmp_path / "out", symlinks=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    at.set(sys, "argv", ["export.py", str(out), "--to=hf"])
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(SystemExit, match=r"^error: .*hf cannot be written: .*File too large"):
            export.main()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (out / "hf").exists()


def test_an_export_keeps_what_a_user_has_put_into_the_folder(tmp_path, capsys):
    """For example the .gguf file that llama.cpp's converter writes next to the model."""
    for kept in ("", "hf_1", "hf_2"):
        export_model(tmp_path)
        assert {"README.md", "config.json"} < {path.name for path in (tmp_path / "hf").iterdir()}
        assert not (tmp_path / "hf/model.gguf").exists()
        said = capsys.readouterr().err
        assert (f"is now {tmp_path / kept}\n" in said) == bool(kept)
        (tmp_path / "hf/model.gguf").touch()
    assert (tmp_path / "hf_1/model.gguf").exists() and (tmp_path / "hf_2/model.gguf").exists()


def test_an_exported_ckpt_pt_is_a_file_and_not_a_link(trained, tmp_path):
    """
    Through a link, nanoGPT's train.py would overwrite the checkpoint. Without step folders it is read, and
    not exported again.
    """
    out = shutil.copytree(trained(["--max_iters=1"]), tmp_path / "out", symlinks=True)
    path, newest = export.convert(str(out), "ckpt.pt"), out / "step_00000002/ckpt.pt"
    assert path == out / "ckpt.pt" and not path.is_symlink()
    a, b = torch.load(path), torch.load(newest)
    assert a.keys() == b.keys() and a["iter_num"] == 2 and a["config"] == b["config"]
    assert find_checkpoint(out)[0].path == newest
    (tmp_path / "bare").mkdir()
    bare = path.rename(tmp_path / "bare/ckpt.pt")
    written = bare.stat().st_mtime_ns
    for out_dir in (bare.parent, bare):
        assert export.convert(str(out_dir), "ckpt.pt") == bare and bare.stat().st_mtime_ns == written
        assert find_checkpoint(out_dir)[0].path == bare
    assert find_checkpoint(bare)[0].val_loss == a["best_val_loss"]
    a["isogpt"]["best_step"] = 1  # the best loss was not that of these weights
    torch.save(a, bare)
    assert find_checkpoint(bare)[0].val_loss is None


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
    export_model(tmp_path)
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
