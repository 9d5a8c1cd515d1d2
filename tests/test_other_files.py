"""Checkpoints, weights and folders of other programs: read as they mean, or named with what to type."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from runs import REPO, script_that_fails, tiny_data

import export
from isogpt.checkpoint.folder import continue_from, enter_folder, look_for_start
from isogpt.checkpoint.manifest import read_manifest
from isogpt.checkpoint.search import newest_checkpoint
from isogpt.checkpoint.source import open_checkpoint
from isogpt.checkpoint.state import restore_checkpoint
from isogpt.launch.launchers import Launch
from model import GPT, GPTConfig

ARGS = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 16, "bias": False, "vocab_size": 65}
TRAIN = ["--dataset=tiny", "--device=cpu", "--dtype=float32", "--init_from=resume", "--check_layout=False"]
TRAIN += ["--block_size=16", "--batch_size=2", "--gradient_accumulation_steps=1", "--eval_iters=2"]
TRAIN += ["--warmup_iters=0", "--learning_rate=1e-2", "--eval_interval=5", "--keep_last=1"]


def weights(**changes):
    return dict(GPT(GPTConfig(**ARGS | changes), seed=1).state_dict())


def of_nanogpt(**changes):
    state = {"model": weights(), "model_args": ARGS, "iter_num": 7, "best_val_loss": 4.1, "config": {}}
    return state | changes


def write(path, content):
    """Write what torch.save, json or neither of them writes."""
    path.parent.mkdir(exist_ok=True, parents=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif path.suffix == ".json":
        path.write_text(json.dumps(content))
    else:
        torch.save(content, path)


def start(init_from, out_dir="none"):
    """What train.py starts from, or the message."""
    try:
        stored, *_ = look_for_start(init_from, out_dir, -1, Launch())
        return open_checkpoint(stored) if stored else GPT.from_pretrained(init_from)
    except ValueError as e:
        return str(e)


# ------------------------------------------------------------------------------------------------------------
# what is read


@pytest.mark.parametrize("name", ["scratch", "auto", "gpt2"])
def test_a_folder_with_the_name_of_a_start(tmp_path, monkeypatch, name):
    """`--init_from=scratch`, the default, does not read a folder `scratch`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    torch.save({"weight": torch.zeros(2)}, tmp_path / name / "model.pt")
    assert look_for_start(name, "out", -1, Launch())[:2] == (None, False)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_args": {name: np.int64(n) for name, n in ARGS.items()}, "iter_num": np.int64(7)},
        {"model_args": ARGS | {"n_embd": 8.0, "bias": np.bool_(False)}, "iter_num": 7.0},
        {"model_args": ARGS | {"n_embd": torch.tensor(8)}, "iter_num": torch.tensor(7)},
        {"config": {"block_size": np.int64(16), "seed": np.int32(3), "learning_rate": np.float32(1)}},
    ],
)
def test_numbers_of_numpy_and_pytorch(at, changes):
    """A resume writes them to a manifest, which is JSON."""
    write(Path("out/ckpt.pt"), of_nanogpt(**changes))
    stored, _ = newest_checkpoint("out")
    assert open_checkpoint(stored).run["model_args"] == ARGS | {"dropout": 0.0}
    continue_from("out", stored)
    assert read_manifest(Path("out/step_00000007"))["block_size"] == 16


def test_what_nanogpts_earlier_checkpoints_lack(at):
    """Before bias was a setting, there were biases; a file without iter_num is at step 0."""
    state = of_nanogpt(model=weights(bias=True), model_args={k: n for k, n in ARGS.items() if k != "bias"})
    del state["iter_num"], state["best_val_loss"], state["config"]
    write(Path("out/ckpt.pt"), state)
    checkpoint = start("resume", "out")
    assert checkpoint.run["model_args"]["bias"] is True and checkpoint.run["iter_num"] == 0
    assert checkpoint.run["best_val_loss"] == math.inf
    model = GPT(GPTConfig(**checkpoint.run["model_args"]), seed=2)
    restore_checkpoint(checkpoint, model)
    assert torch.equal(
        model.transformer.h[0].attn.c_attn.bias, state["model"]["transformer.h.0.attn.c_attn.bias"]
    )


@pytest.mark.parametrize("best", [torch.tensor(float("nan")), 4.1])
def test_a_file_that_the_run_did_not_write_is_kept(zygote, at, best):
    """Its loss is not known (NaN), or that of a different evaluation; the run's own evaluations count."""
    tiny_data(at.path)
    write(Path("out/ckpt.pt"), of_nanogpt(best_val_loss=best, config={"seed": 3}))
    write(Path("out/ckpt_best.pt"), of_nanogpt(iter_num=5))
    before = {name: Path("out", name).read_bytes() for name in ("ckpt.pt", "ckpt_best.pt")}
    zygote.start([*TRAIN, "--max_iters=13"], at.path).wait()
    assert not Path("out/step_00000007").exists(), "this test needs a checkpoint that is not kept"
    assert Path("out/ckpt_best.pt").is_symlink(), "no evaluation was the best"
    kept = [Path("out", name).read_bytes() for name in ("original_ckpt.pt", "abandoned_ckpt_best.pt")]
    assert kept == [before["ckpt.pt"], before["ckpt_best.pt"]]


def test_files_of_others_where_a_run_starts_or_resumes(at):
    """Also what cannot be read, and a ckpt_best.pt alone."""
    write(Path("out/ckpt_best.pt"), weights())
    enter_folder("out", None, Launch())
    assert Path("out/previous_1/ckpt_best.pt").exists()
    write(Path("out/ckpt.pt"), of_nanogpt())
    continue_from("out", newest_checkpoint("out")[0])
    Path("out/ckpt.pt").unlink()
    write(Path("out/ckpt.pt"), weights())
    continue_from("out", newest_checkpoint("out")[0])
    assert Path("out/abandoned_ckpt.pt").exists() and Path("out/original_ckpt.pt").exists()


def test_weights_without_a_shape(at):
    """The block in the documentation makes a checkpoint of minGPT's weights."""
    block = (
        (REPO / "docs/migrating.md").read_text().partition("### Weights without a shape")[2].split("```")[1]
    )
    shape = {"n_layer": 6, "n_head": 6, "n_embd": 192, "block_size": 128, "vocab_size": 65}
    model = GPT(GPTConfig(**shape, bias=True, gelu="tanh", tied=False), seed=1)
    write(Path("model.pt"), model.state_dict() | {"transformer.h.0.attn.bias": torch.ones(1, 1, 128, 128)})
    assert "without the model's shape" in start("model.pt")
    exec(block.removeprefix("python"), {})
    checkpoint = start("ckpt.pt")
    loaded = GPT(GPTConfig(**checkpoint.run["model_args"]), seed=2)
    restore_checkpoint(checkpoint, loaded)
    tokens = torch.arange(60)[None]
    assert torch.equal(loaded(tokens, tokens)[0], model(tokens, tokens)[0])


# ------------------------------------------------------------------------------------------------------------
# what is named

OF_LLAMA2_C = {"dim": 8, "n_layers": 1, "n_heads": 2, "n_kv_heads": 2, "vocab_size": 65, "max_seq_len": 16}
OTHER = {"blocks.0.attn.key.weight": torch.zeros(8, 8)}
SAFETENSORS = (2).to_bytes(8, "little") + b"{}"
NO_SHAPE = "it contains weights without the model's shape: add .* docs/migrating.md"
FOLDERS = {  # files: message of train.py and sample.py if the folder is their out_dir, and of export.py
    (
        "ckpt_1000.pt",
        "ckpt_5000.pt",
    ): "out/ckpt_5000.pt is not called ckpt.pt: type: cp out/ckpt_5000.pt out/ckpt.pt$",
    ("model.pt",): f"out/model.pt cannot be loaded: {NO_SHAPE}",
    ("last.ckpt",): f"out/last.ckpt cannot be loaded: {NO_SHAPE}",
    ("llama2c.pt",): "a checkpoint of llama2.c: type there: python export.py NEW --version=-1",
    ("optim_000500.pt", "other_000500.pt"): "weights of a different model, such as blocks.0.attn.key.weight",
    ("model.safetensors",): "set --init_from=out, to which its config.json must be copied$",
    ("model.safetensors", "config.json"): "out contains a model of transformers: set --init_from=out, or",
    ("checkpoint-90/config.json", "checkpoint-500/config.json"): "set --init_from=out/checkpoint-500, or see",
    ("model.bin",): "a model of llm.c: type there: python dev/eval/export_hf.py --input=out/model.bin",
    (
        "model.gguf",
    ): "out/model.gguf is a model for llama.cpp: set --init_from= to its folder with config.json",
    ("notes.txt",): ".",
}
CONTENTS = {
    "model.pt": weights(),
    "last.ckpt": {"state_dict": {f"model.{name}": w for name, w in weights().items()}, "epoch": 1},
    "llama2c.pt": of_nanogpt(model=OTHER, model_args=OF_LLAMA2_C),
    "other_000500.pt": OTHER,
    "optim_000500.pt": {},
    "model.safetensors": SAFETENSORS,
    "model.bin": np.array([20240326, 3, 1024], np.int32).tobytes(),
    "model.gguf": b"GGUF",
    "notes.txt": b"none",
}


@pytest.mark.parametrize(("names", "message"), FOLDERS.items(), ids=map(str, range(len(FOLDERS))))
def test_a_folder_without_a_run_is_named_by_its_files(at, capsys, names, message):
    for name in names:
        write(Path("out", name), CONTENTS.get(name, of_nanogpt() if name.startswith("ckpt") else {}))
    said = [start("resume", "out"), script_that_fails(at, capsys, "sample.py", ["--device=cpu"]).err.strip()]
    assert all("no checkpoint" in text and ("train first" in text) == (message == ".") for text in said)
    with pytest.raises(ValueError, match=message):
        export.convert("out", "hf")
    for text in (*said, export.list_checkpoints("out")):
        assert re.search(message, text)
    if len(names) == 1:  # the file itself
        assert re.search(message, start(f"out/{names[0]}"))


def test_a_ckpt_pt_that_is_none_is_named(at, capsys):
    """Not with the advice to train first: the file is there."""
    write(Path("out/ckpt.pt"), weights())
    expected = (
        f"^(error: )?no checkpoint (to resume from )?in out(:|;) out/ckpt.pt cannot be loaded: {NO_SHAPE}"
    )
    assert re.match(expected, start("resume", "out"))
    assert re.match(expected, script_that_fails(at, capsys, "sample.py", ["--device=cpu"]).err)
    for args, message in (
        (["--out_dir=out/ckpt.pt"], "no checkpoint in out/ckpt.pt: it is a file: set --out_dir=out\n"),
        (["--init_from=out/ckpt.pt"], "out/ckpt.pt is a file: set --out_dir=out for a run"),
        (["--init_from=out"], "out contains a run: set --out_dir=out, without --init_from"),
    ):
        assert message in script_that_fails(at, capsys, "sample.py", ["--device=cpu", *args]).err


def test_sizes_that_are_not_whole(at):
    write(Path("out/ckpt.pt"), of_nanogpt(model_args=ARGS | {"n_embd": 8.5}))
    assert start("resume", "out") == "out/ckpt.pt: n_embd in model_args is 8.5, not a whole number"


LLAMA = {"model_type": "llama", "vocab_size": 65, "hidden_size": 8, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"adapter_config": {"peft_type": "LORA"}},
            "an adapter .LoRA.: type: python -c .*save_pretrained.'hf-me",
        ),
        ({"config": LLAMA, "adapter_config": {}}, "it is an adapter"),
        (
            {"config": LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4}}},
            "quantized by gptq: use",
        ),
        ({"config": LLAMA | {"quantization_config": {"quant_method": "awq", "bits": 4}}}, "quantized by awq"),
        ({"config": LLAMA | {"quantization_config": {"bits": 4}}}, "quantized by an unknown method"),
        ({"config": LLAMA | {"num_hidden_layers": 5_000_000}}, "5,000,000 layers: at most 10,000"),
    ],
)
def test_folders_of_transformers_that_are_no_whole_models(at, files, message):
    for name, content in files.items():
        write(Path(f"hf/{name}.json"), content)
    write(Path("hf/model.safetensors"), SAFETENSORS)
    text = start("hf")
    assert re.search(f"^cannot load 'hf' with transformers: .*{message}", text) and "pip install" not in text
