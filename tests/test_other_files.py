"""Checkpoints, weights and folders of other programs: read as they mean, or refused in one line."""

import argparse
import json
import math
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from runs import REPO, script_that_fails, tiny_data, train_defaults
from test_hostile import ALONE

from isogpt.checkpoint import huggingface
from isogpt.checkpoint.run_vocabulary import vocabulary_of_run
from isogpt.checkpoint.source import check_weights
from isogpt.checkpoint.start import find_start
from isogpt.checkpoint.state import restore_checkpoint
from isogpt.data.dataset import open_dataset
from model import GPT, GPTConfig

ARGS = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 16, "bias": False, "vocab_size": 65}


def weights(**changes):
    return dict(GPT(GPTConfig(**ARGS | changes), seed=1).state_dict())


def of_nanogpt(**changes):
    state = {"model": weights(), "model_args": ARGS, "iter_num": 7, "best_val_loss": 4.1, "config": {}}
    return state | changes


def write(path, content):
    """Write what torch.save, json or neither of them writes."""
    path.parent.mkdir(exist_ok=True)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif path.suffix == ".json":
        path.write_text(json.dumps(content))
    else:
        torch.save(content, path)


def start(init_from, out_dir="none", model_class=GPT):
    """What train.py starts from."""
    return find_start(train_defaults(init_from=init_from, out_dir=out_dir), ALONE, model_class)


def refusal(capsys, init_from, out_dir="none"):
    """The one line with which a start ends."""
    with pytest.raises(SystemExit):
        start(init_from, out_dir)
    (line,) = capsys.readouterr().err.splitlines()
    return line


# ------------------------------------------------------------------------------------------------------------
# what is read


def test_a_folder_with_the_name_of_a_start(at):
    """`--init_from=scratch`, the default, does not read a folder `scratch`."""
    for name in ("scratch", "auto", "gpt2"):
        write(Path(name, "ckpt.pt"), of_nanogpt())
        assert start(name, "out", Mock()).checkpoint is None


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_names_of_compiled_and_distributed_models(at, prefix):
    model = GPT(GPTConfig(**ARGS), seed=1)
    named = {prefix + name: w for name, w in model.state_dict().items()}
    named[f"{prefix}transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16)  # without flash attention
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
    model(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64))[1].backward()
    optimizer.step()
    write(Path("ckpt.pt"), of_nanogpt(model=named, optimizer=optimizer.state_dict()))
    checkpoint, again = start("ckpt.pt").checkpoint, GPT(GPTConfig(**ARGS), seed=2)
    check_weights(checkpoint, again)
    optimizers = [again.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")]
    restore_checkpoint(checkpoint, again, optimizers)
    saved, read = optimizer.state_dict()["state"], optimizers[0].state_dict()["state"]
    assert len(read) > 5 and all(torch.equal(saved[i][key], read[i][key]) for i in saved for key in saved[i])


def test_what_nanogpts_earlier_checkpoints_lack(at):
    """Before bias was a setting, there were biases; a file without iter_num is at step 0."""
    state = of_nanogpt(model=weights(bias=True), model_args={k: n for k, n in ARGS.items() if k != "bias"})
    del state["iter_num"], state["best_val_loss"], state["config"]
    write(Path("out/ckpt.pt"), state)
    checkpoint = start("resume", "out").checkpoint
    assert checkpoint.run["model_args"]["bias"] is True and checkpoint.run["iter_num"] == 0
    assert checkpoint.run["best_val_loss"] == math.inf
    model = GPT(GPTConfig(**checkpoint.run["model_args"]), seed=2)
    restore_checkpoint(checkpoint, model)
    name = "transformer.h.0.attn.c_attn.bias"
    assert torch.equal(model.get_parameter(name), state["model"][name])


def test_a_file_that_the_run_did_not_write_is_kept(zygote, at):
    """Its loss is that of a different evaluation; the run's own evaluations count."""
    tiny_data(at.path)
    write(Path("out/ckpt.pt"), of_nanogpt(best_val_loss=torch.tensor(4.1), config={"seed": 3}))
    write(Path("out/ckpt_best.pt"), of_nanogpt(iter_num=5))
    before = {name: Path("out", name).read_bytes() for name in ("ckpt.pt", "ckpt_best.pt")}
    args = ["--init_from=resume", "--max_iters=13", "--block_size=16", "--eval_interval=5", "--keep_last=1"]
    zygote.train([*args, "--learning_rate=1e-2", "--warmup_iters=0"], at.path)
    assert not Path("out/step_00000007").exists(), "this test needs a checkpoint that is not kept"
    assert Path("out/ckpt_best.pt").is_symlink(), "no evaluation was the best"
    kept = [Path("out", name).read_bytes() for name in ("original_ckpt.pt", "original_ckpt_best.pt")]
    assert kept == [before["ckpt.pt"], before["ckpt_best.pt"]]


def test_weights_without_a_shape(at, capsys):
    """The block in the documentation makes a checkpoint of minGPT's weights."""
    text = (REPO / "docs/migrating.md").read_text()
    block = text.partition("### Weights without a shape")[2].split("```")[1]
    shape = {"n_layer": 6, "n_head": 6, "n_embd": 192, "block_size": 128, "vocab_size": 65}
    model = GPT(GPTConfig(**shape, bias=True, gelu="tanh", tied=False), seed=1)
    write(Path("model.pt"), model.state_dict() | {"transformer.h.0.attn.bias": torch.ones(1, 1, 128, 128)})
    assert "block_size" in refusal(capsys, "model.pt")
    exec(block.removeprefix("python"), {})
    checkpoint = start("ckpt.pt").checkpoint
    loaded = GPT(GPTConfig(**checkpoint.run["model_args"]), seed=2)
    restore_checkpoint(checkpoint, loaded)
    tokens = torch.arange(60)[None]
    assert torch.equal(loaded(tokens, tokens)[0], model(tokens, tokens)[0])


def test_added_tokens_of_a_chat(at, capsys):
    """The message names them, and what it says to type adds them; so does the block in the documentation."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = Path("my-folder")
    huggingface.save(folder, GPT(GPTConfig(**ARGS), seed=1), {})
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(65)}, "w0"))
    words.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    data = tiny_data(at.path)
    shutil.copy(folder / "tokenizer.json", data)
    write(data / "meta.json", {"vocab_size": 67, "tokenizer": "tokenizer.json"})
    data, config = open_dataset("tiny", 8), train_defaults(init_from="my-folder")
    with pytest.raises(SystemExit):
        start("my-folder").vocabulary(config, data, 65)
    (advice,) = re.findall(
        "65: set --(.*)=(.*), which adds '<.im_start.>', '<.im_end.>'", capsys.readouterr().err
    )
    config |= {advice[0]: int(advice[1])}
    begin = find_start(config, ALONE, GPT)
    assert begin.vocabulary(config, data, 67)[0].size == 67 == begin.model_args(config, 65)["vocab_size"]
    for name in ("transformer.wte.weight", "lm_head.weight"):
        rows = begin.pretrained.state_dict()[name]
        assert torch.equal(rows[:65], weights()[name])
        torch.testing.assert_close(rows[65:], rows[:65].mean(0).expand(2, -1))

    with pytest.raises(ValueError, match="set --dataset=NAME, or add '<.im_start.>', '<.im_end.>' to the "):
        vocabulary_of_run({"model_args": ARGS}, folder)
    text = (REPO / "docs/recipes.md").read_text()
    exec(text.partition("### Added tokens")[2].split("```")[1].removeprefix("python"), {})
    args = GPT.from_pretrained("my-folder").describe()
    assert vocabulary_of_run({"model_args": args}, folder).size == args["vocab_size"] == 67


# ------------------------------------------------------------------------------------------------------------
# what is named

LLAMA = {"model_type": "llama", "vocab_size": 65, "hidden_size": 8, "num_attention_heads": 2}
SAFETENSORS = (2).to_bytes(8, "little") + b"{}"
OTHER = {"blocks.0.attn.key.weight": torch.zeros(8, 8)}
REFUSED = {  # files: why
    "a state_dict": (weights(), "model_args lacks"),
    "llama2.c's": (of_nanogpt(model=OTHER, model_args={"dim": 8, "n_layers": 1}), "contains block_size, dim"),
    "a fork's": (of_nanogpt(model_args=ARGS | {"use_rope": True}), "also contains use_rope)"),
    "no numbers": (of_nanogpt(model_args=ARGS | {"n_embd": None}), "NoneType"),
    "heads": (of_nanogpt(model_args=ARGS | {"n_head": 3}), "n_head"),
    "no weights": (of_nanogpt(model={"x": "y"}), ""),
    "no settings": (of_nanogpt(config=[1]), ""),
    "no record": (of_nanogpt(isogpt=5), "int"),
    "code": (of_nanogpt(config=argparse.Namespace()), "it contains argparse.Namespace"),
    "a list": ([1], "list"),
    "Git LFS's": (b"version https://git-lfs.github.com/spec/v1", ""),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_file_that_is_not_read_is_refused_in_one_line(at, capsys, kind):
    content, reason = REFUSED[kind]
    write(Path("out/ckpt.pt"), content)
    for text in (refusal(capsys, "out/ckpt.pt"), refusal(capsys, "resume", "out")):
        assert re.search(r"out/ckpt.pt is not a checkpoint that isoGPT reads \(.+\): see docs/", text), text
        assert reason in text


def test_weights_that_do_not_fit(at):
    """Also of a model whose head is not wte."""
    for model in (OTHER, weights(n_layer=2), weights() | {"lm_head.weight": torch.ones(65, 8)}):
        write(Path("ckpt.pt"), of_nanogpt(model=model))
        with pytest.raises(ValueError, match="does not fit the model: it (lacks|also contains) "):
            check_weights(start("ckpt.pt").checkpoint, GPT(GPTConfig(**ARGS)))


def test_what_to_type_for_a_folder_or_a_file(at, capsys):
    write(Path("out/ckpt.pt"), weights())
    for argument, message in {
        "--out_dir=out": "no checkpoint in out: out/ckpt.pt is not a checkpoint",
        "--init_from=out/ckpt.pt": "out/ckpt.pt is a file: set --out_dir=out for a run",
    }.items():
        assert message in script_that_fails(at, capsys, "sample.py", ["--device=cpu", argument]).err


def test_folders_of_transformers_that_are_no_whole_models(at, capsys):
    for number, (name, content, message) in enumerate(
        (
            ("adapter_config", {}, "an adapter .LoRA.: type: python -c .*save_pretrained.'hf0-me"),
            ("config", LLAMA | {"quantization_config": {"quant_method": "gptq"}}, "quantized by gptq"),
            ("config", LLAMA | {"num_hidden_layers": 5_000_000}, "n_layer is 5000000: it must be from 1 to "),
        )
    ):
        write(Path(f"hf{number}/{name}.json"), content)
        write(Path(f"hf{number}/model.safetensors"), SAFETENSORS)
        text = refusal(capsys, f"hf{number}")
        assert re.search(f"^error: cannot load 'hf.' with transformers: .*{message}", text)
        assert "pip install" not in text
