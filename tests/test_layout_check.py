"""Layouts compared with one process: a fault in any is seen, and so are edits of model.py."""

import json
import re
from dataclasses import asdict
from itertools import combinations

import pytest
import torch
from breaks import BREAKS, SHOWN_BY
from edits import EDITS, EXPECTED, REFUSED, SETTINGS, TRIED, apply, blocks, documented, edited_gpt
from runs import REPO, assert_same_curve

from isogpt.common.torch_versions import SENDS_TO_ITSELF
from isogpt.nn.architecture import GPTConfig
from isogpt.nn.counts import count_on_meta, make_model
from isogpt.parallel.parallelize import materialize
from model import GPT

MODELS = {
    "gpt2": {"bias": True},
    "nanochat": {"arch": "nanochat", "n_kv_head": 2, "optimizer": "muon"},
    "llama": {"arch": "llama", "n_kv_head": 2, "optimizer": "muon"},
    "experts": {"n_expert": 4, "bias": True},
    "llama-experts": {"arch": "llama", "n_expert": 4, "n_expert_active": 3, "optimizer": "muon"},
}


def compare(zygote, work, items, nproc=2, folder=REPO):
    """
    What is found of {case: [model settings, layout settings, break or None, name of an edit or ""]} with the
    isoGPT in a folder, of those that are not equal to one process.
    """
    path = work / "items.json"
    path.write_text(json.dumps([*items.values()]))
    zygote.start([path, folder], work, nproc, script="tests/layout_worker.py").wait(600)
    results = json.loads(path.with_suffix(".out").read_text())
    return {case: text for case, text in zip(items, results, strict=True) if text}


# the layouts of bench.py --check: {its name: settings}
LAYOUTS = {
    "ddp": {},
    **{f"zero {stage}": {"zero": stage} for stage in (1, 2, 3)},
    **{f"{name} 2": {name: 2} for name in ("tp", "cp", "ep", "islands")},
    **{
        f"pp 2, {schedule}": {"pp": 2, "pp_schedule": schedule}
        for schedule in ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
    },
    "exact": {"exact": True},
    "exact, zero 3": {"exact": True, "zero": 3},
    **{f"recompute {what}": {"activation_checkpointing": what} for what in ("full", "selective")},
}
# besides these, by number of processes; more ways are in test_layouts.py
MORE = {
    2: {
        "zero 2, last": {"zero": 2, "grad_sync": "last"},
        "zero 3, offload": {"zero": 3, "cpu_offload": True, "activation_checkpointing": "every:2"},
        "ep 2, every": {"ep": 2, "grad_sync": "every", "activation_checkpointing": "full"},
    },
    4: {
        **{
            f"{one}, {other}": LAYOUTS[one] | LAYOUTS[other]
            for one, other in combinations(("zero 3", "tp 2", "cp 2", "ep 2", "pp 2, 1f1b"), 2)
        },
        "zero 3, dp_replicate 2": {"zero": 3, "dp_replicate": 2},
        "pp 4": {"pp": 4},
        "zero 3, pp 2, zbv": {"zero": 3, "pp": 2, "pp_schedule": "zbv"},
        "zero 2, pp 2": {"zero": 2, "pp": 2},
        "islands of 2": {"islands": 2},
    },
}


@pytest.mark.parametrize(
    ("models", "nproc"),
    [
        (["gpt2", "llama-experts"], 2),
        pytest.param(["nanochat", "llama", "experts"], 2, marks=pytest.mark.slow),
        pytest.param(["gpt2", "nanochat", "llama-experts"], 4, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_layouts_compute_what_one_process_computes(zygote, work, models, nproc):
    ways = (LAYOUTS if nproc == 2 else {}) | MORE[nproc]
    items = {
        (model, name): [MODELS[model], way, None, ""]
        for model in models
        for name, way in ways.items()
        if ("n_expert" in MODELS[model] or "ep" not in way)
        and (SENDS_TO_ITSELF or way.get("pp_schedule") != "zbv")
    }
    # float32 adds up the squares of this embedding's gradient, whole and in parts, with different errors
    items |= {
        way: [{"vocab_size": 50304, "n_embd": 256}, LAYOUTS[way], None, ""] for way in ("zero 3", "tp 2")
    }
    assert compare(zygote, work, items, nproc) == {}


@pytest.mark.parametrize("which", [slice(1), pytest.param(slice(1, None), marks=pytest.mark.slow)], ids=str)
def test_faults_in_each_way_are_seen(zygote, work, which):
    """The first fault of each way; the others."""
    items = {
        (way, name): [
            MODELS["experts" if way == "ep 2" else "gpt2"] | SHOWN_BY.get(name, {}),
            LAYOUTS[way],
            fault,
            "",
        ]
        for way, faults in BREAKS.items()
        for name, fault in [*faults.items()][which]
    }
    found = compare(zygote, work, items)
    assert [case for case in items if not found.get(case, "").startswith("differs")] == []


QUICK = ["token shift", "shared MLP of distant blocks", "branch on a rare token"]
OTHERS = [name for name in EDITS if name not in QUICK]


@pytest.mark.parametrize("names", [QUICK, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=len)
def test_an_edit_holds_on_a_layout_or_the_check_says_that_it_does_not(zygote, work, names):
    items = {
        (name, way): [SETTINGS.get(name, {}), LAYOUTS[way], None, name] for name in names for way in TRIED
    }
    # FSDP leaves them no gradient, of which exact sums the squares
    items["exact"] = [{}, LAYOUTS["exact, zero 3"], None, "frozen embeddings"]
    states = {case: text.partition(":")[0] for case, text in compare(zygote, work, items).items()}
    expected = {(name, way): state for name in names for way, state in EXPECTED.get(name, {}).items()}
    assert states == expected


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_be_lost_is_refused_on_one_process(message):
    model_class = edited_gpt(message)
    config = GPTConfig(n_layer=1, n_head=2, n_embd=8, block_size=8, vocab_size=9)
    with pytest.raises(ValueError, match=re.escape(message)):
        model_class(config, 0)
        materialize(make_model(model_class, asdict(config)), torch.device("cpu"))


def test_rows_that_mix_are_seen_where_ranks_read_parts_of_a_micro_batch(zygote, work):
    items = {
        n: [{}, {"batch_size": 4, "gradient_accumulation_steps": n}, None, "rows that mix"] for n in (2, 1)
    }
    found = compare(zygote, work, items)
    assert [*found] == [1] and found[1].startswith("differs")


def test_a_run_whose_layout_differs_stops_with_one_line(zygote, work):
    repo = apply("token shift", work / "edited")
    run = zygote.train(["--check_layout=True", "--tp=2", "--max_iters=1"], work, 2, repo=repo, ok=False)
    (message,) = re.findall(r"^error: .*", run.text(), flags=re.M)
    assert "Traceback" not in run.text() and run.codes == [1, 1]
    assert message.startswith(
        "error: tp=2 does not compute what one process computes with this model.py: the"
    )


@pytest.mark.parametrize("nproc", [1, 2])
def test_an_error_of_an_edit_is_one_line(zygote, work, nproc):
    repo = apply("crash", work / "edited")
    run = zygote.train(["--check_layout=True", "--max_iters=1"], work, nproc, repo=repo, ok=False)
    (message,) = re.findall(r"^error: .*", run.text(), flags=re.M)
    assert "Traceback" not in run.text()
    assert re.search(r"RuntimeError: a bug \(model.py, line \d+\)\. --check_layout=False trains", message)


class Unreadable(GPT):
    """A model whose constructor reads a tensor's value."""

    def __init__(self, config, seed=None):
        super().__init__(config, seed)
        self.rate = torch.linspace(0, 0.2, 2)[1].item()


def test_what_fails_on_the_meta_device_is_said_with_its_place():
    shape = dict(n_layer=1, n_head=2, n_embd=8, block_size=8, vocab_size=9)
    place = r"Tensor.item.* \(tests/test_layout_check.py, line \d+\)"
    with pytest.raises(ValueError, match=f"^GPT.config. fails on the meta device: .*{place}.*device='cpu'$"):
        count_on_meta(Unreadable, shape)


@pytest.mark.parametrize(("name", "nproc"), [("mixture of depths", 1), ("frozen embeddings", 2)])
def test_an_edited_run_has_the_curve_of_one_process(zygote, work, name, nproc):
    """With a module that has the name of the experts' router, and without a gradient of the embeddings."""
    repo = apply(name, work / "edited")
    checked = ["--check_layout=True", "--out_dir=out"]
    run = zygote.train([*checked, "--max_iters=1"], work, nproc, repo=repo)
    assert run.text().count("layout:  dp on 2 processes computes the same as one process") == nproc - 1
    zygote.train([*checked, "--max_iters=2", "--init_from=resume"], work, nproc, repo=repo)
    zygote.train(["--max_iters=2", "--out_dir=one"], work, repo=repo)
    assert_same_curve(work / "out", work / "one")


STILL = """
import torch
class Still(torch.optim.SGD):
    def step(self):
        pass
"""


@pytest.mark.slow
def test_the_check_of_one_process_says_what_crashes_and_what_is_not_updated(zygote, work):
    (work / "still.py").write_text(STILL)
    crash = r"refused .*RuntimeError: a bug \(model.py, line \d+\)"
    for repo, args, said in (
        (apply("crash", work / "edited"), [], crash),
        (REPO, ["--optimizer=still.py:Still"], "differs .*does not change transformer"),
    ):
        run = zygote.start(["--check=True", *args], work, script="bench.py", repo=repo)
        run.until(lambda text: "\ninitial values " in text)
        run.kill()
        assert re.search(f"^one process +{said}", run.text(), re.M), run.text()


WHOLE = "Sliding windows in alternate layers"  # with a check of generation, which fails


def change(heading, work):
    """Make a change of the page: (the edited repository, the page's section, the optimizer)."""
    section, optimizer = documented()[heading], "adamw"
    if file := blocks(section, "python"):
        (work / re.match(r"# (\S+)", file)[1]).write_text(file)
        optimizer = re.search(r"--check --optimizer=(\S+)", section)[1]
    return apply(heading, work / "edited"), section, optimizer


@pytest.mark.slow
@pytest.mark.parametrize("heading", [heading for heading in documented() if heading != WHOLE])
def test_a_documented_change_holds_on_the_layouts_of_its_page(zygote, work, heading):
    repo, section, optimizer = change(heading, work)
    items = {way: [{"optimizer": optimizer}, LAYOUTS[way], None, ""] for way in TRIED}
    named = {line[:24].strip() for line in blocks(section, "text").splitlines()}
    assert compare(zygote, work, items, folder=repo).keys() == named & items.keys()


@pytest.mark.slow
def test_a_documented_change_has_the_check_of_its_page(zygote, work):
    """What does not hold is what the page says, up to numbers."""
    repo, section, optimizer = change(WHOLE, work)
    command = ["--check=True", "--dtype=float32", f"--optimizer={optimizer}"]
    run = zygote.start(command, work, script="bench.py", repo=repo).wait(900, ok=False)
    rows = re.findall(r"^.{24} (?:holds|refused|differs).*", run.text(), re.M)
    failed = [row for row in rows if row[25:30] != "holds"]
    number = r"[\d.e-]*\d"  # may depend on the machine
    wanted = blocks(section, "text").splitlines()
    assert [re.sub(number, "N", row) for row in failed] == [re.sub(number, "N", row) for row in wanted]
    assert run.codes == [1] and f"{len(rows)} comparisons" in section
