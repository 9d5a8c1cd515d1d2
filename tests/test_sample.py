"""
sample.py: the same text on any number of processes, the tokenizers of folders, its figures and mistakes.
"""

import io
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from edits import apply, edited_gpt
from runs import script, script_that_fails
from test_data import write_tokenizer

from isogpt.checkpoint import huggingface
from isogpt.checkpoint.run_vocabulary import vocabulary_of_run
from isogpt.data import tokenizer
from isogpt.data.vocabulary import of_characters
from isogpt.nn import generation
from model import GPT, GPTConfig

ARGS = ["--out_dir=out", "--device=cpu", "--dtype=float32", "--start=A", "--max_new_tokens=40", "--seed=3"]
SMALL = dict(n_layer=1, n_head=2, n_embd=16, block_size=16, vocab_size=8)


@pytest.fixture(scope="module")
def trained(zygote, shared_work):
    """A folder with a run of a model with rotary positions and a context of 32 tokens."""
    zygote.train(["--arch=llama", "--out_dir=out", "--max_iters=9"], shared_work)
    return shared_work


def test_a_sample_is_the_same_on_any_number_of_ranks_in_any_batch_and_when_it_goes_on(zygote, trained):
    """On three ranks: an uneven number of samples, and fewer samples than ranks."""
    texts = []
    for nproc, more in ((1, "5"), (2, "5"), (3, "5"), (3, "2"), (1, "1 --max_new_tokens=60")):
        args = [*ARGS, *f"--num_samples={more}".split()]
        run = zygote.start(args, trained, nproc, script="sample.py").wait()
        assert [Path(out).read_text() for out in run.outs[1:]] == [""] * (nproc - 1), "only rank 0 prints"
        texts.append(run.samples().partition("\n")[2].split("\n---------------\n")[:-1])
    five, *others, two, (longer,) = texts
    assert others == [five, five] and two == five[:2] and longer.startswith(five[0])
    assert len(set(five)) == 5 and all(len(text) == 41 and text[0] == "A" for text in five)


def test_a_prompt_from_a_pipe(zygote, trained):
    """
    A pipe can be read only once: all ranks get what rank 0 reads. The text is not changed, but for its byte
    order mark.
    """
    prompt, name = "hello there " * 3, trained / "pipe"
    os.mkfifo(name)
    args = [*ARGS, "--num_samples=2", f"--start=FILE:{name}"]
    run = zygote.start(args, trained, 2, script="sample.py")
    name.write_bytes(b"\xef\xbb\xbf" + prompt.encode())  # a second reader would wait for a second writer
    assert run.wait().samples().count(prompt) == 2


def test_a_note_of_a_prompt_that_is_cut(zygote, trained):
    """block_size is 32 tokens, each of which is a character."""
    args = ["--device=cpu", "--num_samples=1", "--max_new_tokens=2"]
    for length, is_cut in ((32, False), (1033, True)):
        run = zygote.start([*args, f"--start={'a' * length}"], trained, script="sample.py").wait()
        note = "note: the model reads only the last 32 of the prompt's 1,033 tokens"
        assert (note in run.text()) == is_cut


def test_an_edited_model_is_sampled_without_the_cache(zygote, trained):
    """Also if it is divided, and rank 0 alone says so; the text is the one without the cache."""
    state = torch.load(trained / "out/ckpt.pt", weights_only=True)
    args = state["model_args"] | state["isogpt"]["model_args"]
    model = edited_gpt("token shift").from_state(GPTConfig(**args), state["model"]).eval()
    known = tokenizer.load(vocabulary_of_run(state, trained / "out"))
    idx, likeliest = torch.tensor([known.encode("A")]), generation.Choice(0.0, None, None, None)
    without, cached = (
        known.decode(generation.generate(model, idx, 20, likeliest, is_cached, 3, 0)[0].tolist())
        for is_cached in (False, True)
    )
    assert cached != without, "the test needs a model whose text depends on the cache"
    repo = apply("token shift", trained / "edited")
    args = [*ARGS, "--max_new_tokens=20", "--temperature=0", "--num_samples=2"]
    for nproc, flags in ((1, []), (2, ["--tp=2"]), (2, ["--pp=2"])):
        run = zygote.start([*args, *flags], trained, nproc, "sample.py", repo).wait()
        assert run.samples().endswith(f"{without}\n---------------\n" * 2)
        assert run.text().count("note: generating without the cache") == run.text().count("note:") == 1


def test_weights_that_are_not_finite_generate_nothing(at, capsys, trained):
    state = torch.load(trained / "out/ckpt.pt", weights_only=True)
    state["model"]["transformer.wte.weight"][0] = torch.nan
    (at.path / "out").mkdir()
    torch.save(state, at.path / "out/ckpt.pt")
    said = script_that_fails(at, capsys, "sample.py", ["--device=cpu", "--start=A"]).err
    assert "weights in out/ckpt.pt are not finite (transformer.wte.weight): use an earlier" in said


@pytest.mark.parametrize("wrong", ["--start=\u00e9", "--out_dir=nowhere", "--dtype=tf32"])
def test_two_ranks_report_a_mistake_once(zygote, trained, wrong):
    run = zygote.start([*ARGS, wrong], trained, 2, script="sample.py").wait(ok=False)
    lines = [line for line in run.text().splitlines() if ", val loss " not in line]
    assert run.codes == [1, 1] and len(lines) == 1 and lines[0].startswith("error: "), run.text()


# ------------------------------------------------------------------------------------------------------------
# folders of transformers


def folder_of(path, arch):
    """A folder with random weights that transformers can load, and a tokenizer of the characters a to f."""
    folder = path / arch
    model = GPT(GPTConfig(**SMALL | dict(arch=arch, gelu="tanh")), seed=1)
    characters = of_characters({c: i for i, c in enumerate("abcdef")})
    token_ids = tokenizer.save_tokenizer(folder, characters, model.config.vocab_size, 16)
    huggingface.save(folder, model, token_ids)
    return folder


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_a_folder_is_sampled_with_its_own_tokenizer(at, capsys, arch):
    folder = folder_of(at.path, arch)
    args = ["--device=cpu", "--dtype=float32", f"--init_from={folder}", "--num_samples=2", "--temperature=5"]
    script(at, "sample.py", [*args, "--start=cab", "--max_new_tokens=300"])
    output = capsys.readouterr().out  # may begin with a warning of deepspeed
    first, second, end = output[output.index("cab") :].split("\n---------------\n")
    assert end == "" and all(text.startswith("cab") and len(text) == 303 for text in (first, second))
    assert set(first) == set(second) == set("abcdef")  # not 6 and 7, which pad the vocabulary
    script(at, "sample.py", [*args, "--start=cab", "--max_new_tokens=300", "--stop=c"])
    stopped = capsys.readouterr().out.split("\n---------------\n")[:2]
    assert stopped == [text[: text.index("c", 3)] for text in (first, second)]


def test_folders_whose_ids_are_not_known(at, capsys):
    """A tokenizer is missing, is none, or its ids are beyond the model's."""
    folder = folder_of(at.path, "llama")
    kept = (folder / "tokenizer.json").rename(at.path / "kept")
    args = ["--device=cpu", f"--init_from={folder}", "--start=abf"]
    said = script_that_fails(at, capsys, "sample.py", args).err.splitlines()[-1]
    assert said.startswith(f"error: the ids cannot be decoded: {folder} does not say")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=f"cannot load the tokenizer of {folder}: "):
        vocabulary_of_run({"model_args": {"vocab_size": 8}}, folder)
    huggingface.save(folder, GPT(GPTConfig(**SMALL | dict(vocab_size=4, arch="llama")), seed=1), {})
    kept.rename(folder / "tokenizer.json")
    said = script_that_fails(at, capsys, "sample.py", args).err.splitlines()[-1]
    assert said.startswith("error: the tokenizer uses 6 ids, but the model 4: set --dataset=")
    write_tokenizer(folder, {"?": 0})
    said = script_that_fails(at, capsys, "sample.py", [*args, "--start=caf\udce9"]).err.splitlines()[-1]
    assert said.startswith("error: --start is not text in UTF-8")  # but in the bytes of a terminal in Latin-1


def change_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_no_code_in_a_folder_runs(at, capsys):
    """Not even if the answer at the terminal would be yes: for the model's types, its tokenizer, weights."""
    ran, folder = at.path / "ran", folder_of(at.path, "llama")
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w')")

    class Touch:
        def __reduce__(self):
            return Path.touch, (ran,)

    at.set(sys, "stdin", io.StringIO("y\n" * 9))
    args = ["--device=cpu", "--dtype=float32", f"--init_from={folder}", "--num_samples=1", "--start=ab"]
    model_code = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    change_json(folder / "config.json", auto_map=model_code, attn_implementation="someone/kernel")
    own = {"AutoTokenizer": [None, "own.Words"]}
    change_json(folder / "tokenizer_config.json", auto_map=own, tokenizer_class="Words")
    script(at, "sample.py", args)
    assert "\nab" in f"\n{capsys.readouterr().out}" and not ran.exists()
    change_json(folder / "config.json", model_type="own")
    said = script_that_fails(at, capsys, "sample.py", args).err
    assert "its model_type is 'own': use a model of type gpt2" in said
    change_json(folder / "config.json", model_type="llama")
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Touch()}, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=f"cannot load '{folder}' with transformers: "):
        GPT.from_pretrained(str(folder))
    assert not ran.exists()
