"""The edits of docs/changing-train.md: on several processes, they compute what they compute on one."""

import re
import shutil
import subprocess

import pytest
import torch
from edits import REPO, blocks, copy_of_repository
from edits import edited as replaced
from runs import assert_same_run, column, records, same, tensors_in
from torch._dynamo.utils import counters

from isogpt.checkpoint.ckpt_file import nanogpt_state
from isogpt.checkpoint.search import StoredCheckpoint
from isogpt.checkpoint.source import open_checkpoint
from isogpt.checkpoint.state import TrainState, read_extra
from isogpt.parallel.compilation import compile_parts
from model import GPT, GPTConfig

PAGE = (REPO / "docs/changing-train.md").read_text()
SECTIONS = {section.splitlines()[0]: section for section in re.split(r"^## ", PAGE, flags=re.M)}
NAMES = [name for name, section in SECTIONS.items() if "\nFiles: " in section]
LAYOUTS = {"ddp": (2, []), "zero 3": (2, ["--zero=3"])}
COMPARED = r"loss$|grad_norm|val_loss|train_loss|accuracy|gradient/"  # of the numbers in records
KEEP_STATE = ["An average of the weights", "Freezing by step", "Noise on the gradients"]
# a step more than the edits that depend on it need
RUN = ["--warmup_iters=4", "--max_iters=7", "--eval_interval=4", "--gradient_accumulation_steps=4"]


def edited(name, folder):
    """A copy of the repository with an edit of the page, which must fit to the line."""
    repo = copy_of_repository(folder)
    diff = blocks(SECTIONS[name], "diff")
    subprocess.run(["patch", "-p1", "--fuzz=0"], input=diff, text=True, cwd=repo, check=True)
    return repo


def train(zygote, work, repo, out, nproc=1, *args):
    """Train with an edited repository in work/out, on all layouts with the same steps; returns the folder."""
    zygote.train([*RUN, f"--out_dir={out}", *args], work, nproc, repo=repo)
    return work / out


def assert_same_numbers(folder, reference):
    """All numbers of the records that do not measure this machine are equal up to rounding."""
    names = {name for record in records(reference) for name in record if "event" not in record}
    names = {name for name in names if re.match(COMPARED, name)}
    for name in names:
        same(column(folder, name), column(reference, name), absolute=2e-5, relative=1e-4)
    return names


def compare(zygote, work, name, layouts):
    """Compare an edit on layouts with one process; returns the repository, and names of what was compared."""
    repo = edited(name, work / "edited")
    one = train(zygote, work, repo, "one")
    for number, (nproc, args) in enumerate(layouts):
        compared = assert_same_numbers(train(zygote, work, repo, f"out{number}", nproc, *args), one)
    return repo, compared


def test_an_edit_that_keeps_state_computes_the_same_with_ddp(zygote, work):
    repo, compared = compare(zygote, work, "An average of the weights", [LAYOUTS["ddp"]])
    assert compared == {"loss", "grad_norm", "train_loss", "val_loss"}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in KEEP_STATE])
@pytest.mark.slow
def test_an_edit_computes_the_same_on_all_layouts(zygote, work, name):
    _, compared = compare(zygote, work, name, LAYOUTS.values())
    added = {"A number in the log": "gradient/lm_head.weight", "Accuracy in an evaluation": "accuracy/val"}
    if name in added:
        assert {added[name].replace("lm_head", "transformer.wte")} <= compared


@pytest.mark.parametrize("name", KEEP_STATE)
@pytest.mark.slow
def test_an_edit_that_keeps_state_resumes_to_the_bit(zygote, work, name):
    repo, _ = compare(zygote, work, name, LAYOUTS.values())
    for whole, (nproc, args) in (("one", (1, [])), ("out1", LAYOUTS["zero 3"])):
        part = train(zygote, work, repo, f"part_{whole}", nproc, "--max_iters=3", *args)
        train(zygote, work, repo, part.name, nproc, "--init_from=resume", *args)
        assert_same_run(part, work / whole)


@pytest.mark.slow
def test_an_edit_changes_gradients_without_the_loss_scale_of_float16(zygote, work):
    repo = edited("A penalty of the weights", work / "edited")
    path = repo / "train.py"
    path.write_text(path.read_text().replace("alpha=2e-3", "alpha=2.0"))
    norms = [
        column(train(zygote, work, repo, dtype, 1, f"--dtype={dtype}"), "grad_norm")
        for dtype in ("float32", "float16")
    ]
    same(*norms, absolute=0.0, relative=0.02)


@pytest.mark.slow
def test_extra_tensors_resume_on_any_layout(zygote, work):
    """An average, saved and continued by different layouts, has all its numbers."""
    repo = edited("An average of the weights", work / "edited")
    path = repo / "train.py"
    count = 'state.extra.setdefault("count", torch.zeros((), dtype=torch.int64)).add_(1)'
    launched = "    policy.launched(gathered, lr)\n"
    path.write_text(path.read_text().replace(launched, f"{launched}    {count}\n"))
    train(zygote, work, repo, "first", 1, "--max_iters=2")
    layouts = {"one": (1, []), "zero1": (2, ["--zero=1"]), "zero3": (2, ["--zero=3"])}
    layouts |= {"tp": (2, ["--tp=2"]), "pp": (2, ["--pp=2"])}
    for name, (nproc, args) in layouts.items():
        shutil.copytree(work / "first", work / name, symlinks=True)
        train(zygote, work, repo, name, nproc, "--init_from=resume", "--max_iters=4", *args)
        train(zygote, work, repo, name, 1, "--init_from=resume")  # from shards
        found, expected = (tensors_in(work / other) for other in (name, "one"))
        assert found.keys() == expected.keys() and found["extra.count"] == 8
        for key in found:
            if key.startswith("extra.ema."):
                assert (found[key] - expected[key]).abs().max() < 2e-4, key


MADE = "    optimizers = optim.make_optimizers(raw_model, run.config, plan.zero, plan.torch_dtype, mesh)\n"
INLINE = blocks(SECTIONS["An optimizer of your own"], "python").splitlines(keepends=True)


def with_optimizer(folder, made):
    """A copy of the repository whose train.py makes its optimizer inline."""
    repo = copy_of_repository(folder)
    text = (repo / "train.py").read_text()
    assert MADE in text
    (repo / "train.py").write_text(text.replace(MADE, made))
    return repo


@pytest.mark.parametrize("made", INLINE)
@pytest.mark.slow
def test_an_optimizer_that_is_made_inline(zygote, work, made):
    repo = with_optimizer(work / "edited", made)
    one = train(zygote, work, repo, "one")
    for name, args in (("ddp", []), ("zero1", ["--zero=1"]), ("zero3", ["--zero=3"])):
        assert_same_numbers(train(zygote, work, repo, name, 2, *args), one)
    train(zygote, work, repo, "part", 1, "--max_iters=3")
    assert_same_run(train(zygote, work, repo, "part", 1, "--init_from=resume"), one)


def test_an_inline_optimizer_that_cannot_be_used_ends_the_run_with_a_line(zygote, work):
    groups = "[{'params': [p], 'lr': 1e-3 * i} for i, p in enumerate(raw_model.parameters(), 1)]"
    repo = with_optimizer(work / "edited", f"    optimizers = [torch.optim.SGD({groups})]\n")
    run = zygote.train(RUN, work, repo=repo, ok=False)
    assert "Traceback" not in run.text() and "use --optimizer=FILE.py:CLASS" in run.text()


STEPPED = [
    (
        "        self.resid_dropout = Dropout(config.dropout)\n",
        "        self.resid_dropout = Dropout(config.dropout)\n        self.step = 0\n",
    ),
    (
        "        y = self.seams.attention(",
        "        q = q * (1 + self.step / 10)\n        y = self.seams.attention(",
    ),
]


def stepped_model():
    """The text of a model.py whose attention depends on the step."""
    return replaced(STEPPED, (REPO / "model.py").read_text())


@pytest.mark.slow
def test_a_module_that_reads_the_step_computes_the_same_on_all_layouts(zygote, work):
    repo = copy_of_repository(work / "edited")
    (repo / "model.py").write_text(stepped_model())
    one = train(zygote, work, repo, "one")
    layouts = [*LAYOUTS.values()] + [(2, [arg]) for arg in ("--tp=2", "--pp=2", "--cp=2", "--exact=True")]
    for number, (nproc, args) in enumerate(layouts):
        assert_same_numbers(train(zygote, work, repo, f"out{number}", nproc, *args), one)
    plain = train(zygote, work, REPO, "plain")
    assert column(plain, "loss")[0] == column(one, "loss")[0] and column(plain, "loss") != column(one, "loss")
    train(zygote, work, repo, "part", 1, "--max_iters=3")
    assert_same_run(train(zygote, work, repo, "part", 1, "--init_from=resume"), one)


@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.slow
def test_a_compiled_model_is_not_compiled_again_at_each_step(by_block):
    space = {"__name__": "model"}
    exec(stepped_model(), space)
    config = space["GPTConfig"](block_size=8, vocab_size=9, n_layer=2, n_head=2, n_embd=8)
    model, compiled = (space["GPT"](config, 1) for _ in range(2))
    compile_parts(compiled, by_block, backend="aot_eager")
    x, before = torch.arange(8)[None], counters["stats"]["unique_graphs"]
    for step in range(12):
        losses = []
        for each in (model, compiled):
            each.set_step(step)
            losses.append(each(x, x, 8.0)[1])
            losses[-1].backward()
        assert losses[0] == losses[1]
    assert counters["stats"]["unique_graphs"] - before <= 1 + by_block  # a block, and the loss


def test_logits_are_returned_with_the_loss_that_trains():
    model = GPT(GPTConfig(block_size=8, vocab_size=9, n_layer=1, n_head=2, n_embd=8), 1)
    x, y = torch.arange(8)[None], torch.tensor([[1, 2, 3, -1, 5, 6, 7, -1]])
    expected, mean = model(x, y)
    logits, loss = model(x, y, 3.0, with_logits=True)
    assert model(x, y, 3.0)[0] is None and model(x, y, 3.0)[1] == loss
    assert logits.equal(expected) and loss.item() * 3 == pytest.approx(mean.item() * 6, rel=1e-6)
    wanted = torch.nn.functional.cross_entropy(logits[0], y[0], ignore_index=-1)
    assert mean.item() == pytest.approx(wanted.item(), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tp", "pp"])
def test_layouts_without_all_logits_say_so(zygote, work, name):
    repo = edited("Accuracy in an evaluation", work / "edited")
    run = zygote.train([*RUN, f"--{name}=2"], work, 2, repo=repo, ok=False)
    assert "logits" in run.text() and f"set --{name}=1" in run.text() and "Traceback" not in run.text()


def test_extra_tensors_in_a_file(tmp_path):
    """A state dict, where a tied head has two names; a key named like a parameter; and the key of a fork."""
    model = GPT(GPTConfig(block_size=8, vocab_size=9, n_layer=1, n_head=2, n_embd=8), 1)
    model.skip = torch.nn.Parameter(torch.ones(2))
    extra = {"ema": {name: w + 1 for name, w in model.state_dict().items()}, "skip": torch.tensor([3])}
    extra["learned"] = torch.nn.Parameter(torch.ones(4))
    run = {"model_args": model.describe(), "iter_num": 1, "config": {}, "isogpt": {}}
    state = nanogpt_state(run, model, [], extra, copy=True)
    path = tmp_path / "ckpt.pt"
    torch.save(state, path)
    read = read_extra(open_checkpoint(StoredCheckpoint(path, 1, {}), GPTConfig), model)
    assert read.keys() == extra.keys() and read["skip"].equal(extra["skip"])
    assert all(read["ema"][name].equal(w) for name, w in extra["ema"].items())
    del state["isogpt"]
    torch.save(state | {"extra": "a fork's"}, path)
    assert open_checkpoint(StoredCheckpoint(path, 1, {}), GPTConfig).run["extra"] == "a fork's"


MORE_FIELDS = [
    (
        "# of a block: (B, T, C), and",
        "@dataclass\nclass GPTConfig(GPTConfig):\n    scale: float = 0.5\n\n\n# of a block: (B, T, C), and",
    ),
    (
        "        self.mlp = make_mlp(config)\n",
        "        self.mlp, self.scale = make_mlp(config), config.scale\n",
    ),
    (
        "            return x + self.mlp(self.ln_2(x))\n",
        "            return x + self.scale * self.mlp(self.ln_2(x))\n",
    ),
]


@pytest.mark.slow
def test_a_config_with_more_fields_is_trained_resumed_and_sampled(zygote, work):
    repo = copy_of_repository(work / "edited")
    (repo / "model.py").write_text(replaced(MORE_FIELDS, (REPO / "model.py").read_text()))
    one = train(zygote, work, repo, "one")
    train(zygote, work, repo, "part", 2, "--max_iters=3", "--zero=3")
    part = train(zygote, work, repo, "part", 1, "--init_from=resume")
    assert_same_numbers(part, one)
    args = [f"--out_dir={part}", "--num_samples=1", "--max_new_tokens=5", "--device=cpu"]
    zygote.start(args, work, script="sample.py", repo=repo).wait()
    refused = zygote.start(args, work, script="sample.py").wait(ok=False)
    assert "isoGPT reads" in refused.text() and "'scale'" in refused.text()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            {"ema": {"transformer.wte.weight": torch.ones(2)}},
            r"wte\.weight has the shape \(2,\), not \(9, 8\)",
        ),
        ({"count": 1}, r"state\.extra\.count is not a tensor"),
        ({"a.b": torch.ones(2)}, "choose a key without a dot"),
    ],
)
def test_extra_tensors_that_cannot_be_saved_are_refused(extra, message):
    model = GPT(GPTConfig(block_size=8, vocab_size=9, n_layer=1, n_head=2, n_embd=8), 1)
    state = TrainState(model, [], None, None, None, None, extra)
    with pytest.raises(ValueError, match=message):
        state.parts_of_extra()
