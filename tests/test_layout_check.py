"""Layouts compared with one process: a fault in any is seen, and so are edits of model.py."""

import json
import re

import pytest
import torch
from breaks import BREAKS
from edits import (
    EDITS,
    EXPECTED,
    MIXED_ROWS,
    REFUSED,
    SETTINGS,
    TRIED,
    apply,
    blocks,
    documented,
    edited,
    edited_gpt,
)
from runs import REPO, column

from isogpt.common.torch_versions import SENDS_TO_ITSELF
from isogpt.nn.architecture import GPTConfig
from isogpt.parallel.parallelize import materialize
from isogpt.speed.model_check import COMBINED, LAYOUTS

MODELS = {
    "gpt2": {"bias": True},
    "nanochat": {"arch": "nanochat", "n_kv_head": 2, "optimizer": "muon"},
    "llama": {"arch": "llama", "n_kv_head": 2, "optimizer": "muon"},
    "experts": {"n_expert": 4, "bias": True},
    "llama-experts": {"arch": "llama", "n_expert": 4, "n_expert_active": 3, "optimizer": "muon"},
}


def compare(zygote, work, items, nproc=2, folder=REPO):
    """
    What is found of each of [model settings, layout settings, break or None], with the model.py in a folder:
    "" if a layout is equal to one process.
    """
    path, results = work / "items.json", []
    while len(results) < len(items):  # once more after each crash
        path.write_text(json.dumps(items[len(results) :]))
        path.with_suffix(".out").unlink(missing_ok=True)
        zygote.start([path, folder], work, nproc, script="tests/layout_worker.py").wait(240)
        results += json.loads(path.with_suffix(".out").read_text())
    return results


# besides those of bench.py --check
MORE = {
    2: {
        "every": {"grad_sync": "every"},
        "zero 2, last": {"zero": 2, "grad_sync": "last"},
        "zero 2, offload": {"zero": 2, "cpu_offload": True, "activation_checkpointing": "every:2"},
        "zero 3, offload": {"zero": 3, "cpu_offload": True},
        "zero 3, two replicas": {"zero": 3, "dp_replicate": 2, "activation_checkpointing": "full"},
        "ep 2, every": {"ep": 2, "grad_sync": "every", "activation_checkpointing": "full"},
    },
    4: {
        "pp 4": {"pp": 4},
        "zero 1, tp 2": {"zero": 1, "tp": 2},
        "zero 2, two replicas": {"zero": 2, "dp_replicate": 2},
        "zero 3, prefetch": {"zero": 3, "fsdp_prefetch": 2},
        "zero 3, pp 2, zbv": {"zero": 3, "pp": 2, "pp_schedule": "zbv"},
        "tp 2, pp 2, full": {"tp": 2, "pp": 2, "activation_checkpointing": "full"},
        "ep 2, zero 1": {"ep": 2, "zero": 1},
        "ep 2, cp 2": {"ep": 2, "cp": 2},
        "islands of 2": {"islands": 2},
    }
    | COMBINED,
}


@pytest.mark.parametrize("nproc", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "models",
    [("gpt2", "llama-experts"), pytest.param(("nanochat", "llama", "experts"), marks=pytest.mark.slow)],
)
def test_layouts_compute_what_one_process_computes(zygote, work, models, nproc):
    ways = (LAYOUTS if nproc == 2 else {}) | MORE[nproc]
    cases = [
        (model, name)
        for model in models
        for name, way in ways.items()
        if "n_expert" in MODELS[model] or "ep" not in way
        if SENDS_TO_ITSELF or way.get("pp_schedule") != "zbv"
    ]
    found = compare(zygote, work, [[MODELS[model], ways[name], None] for model, name in cases], nproc)
    assert {case: text for case, text in zip(cases, found, strict=True) if text} == {}


def test_faults_in_each_way_are_seen(zygote, work):
    cases = [(way, fault) for way, faults in BREAKS.items() for fault in faults]
    items = [
        [MODELS["experts" if way == "ep 2" else "gpt2"], LAYOUTS[way], BREAKS[way][fault]]
        for way, fault in cases
    ]
    found = compare(zygote, work, items)
    assert [case for case, text in zip(cases, found, strict=True) if not text.startswith("differs")] == []


QUICK = (
    "token shift",
    "factorized embedding",
    "attention in the seam",
    "shared MLP of distant blocks",
    "frozen positions",
    "buffer",
)
MARKED = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in EDITS]


@pytest.mark.parametrize("name", MARKED)
def test_an_edit_holds_on_a_layout_or_the_check_says_that_it_does_not(zygote, work, name):
    (work / "model.py").write_text(edited(EDITS[name], (REPO / "model.py").read_text()))
    items = [[SETTINGS.get(name, {}), LAYOUTS[way], None] for way in TRIED]
    found = compare(zygote, work, items, folder=work)
    states = {way: text.partition(":")[0] for way, text in zip(TRIED, found, strict=True) if text}
    assert states == EXPECTED.get(name, {}), "\n".join(found)


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_be_lost_is_refused_on_one_process(message):
    model_class = edited_gpt(message)
    config = GPTConfig(n_layer=1, n_head=2, n_embd=8, block_size=8, vocab_size=9)
    with pytest.raises(ValueError, match=re.escape(message)):
        model_class(config, 0)
        with torch.device("meta"):
            model = model_class(config)
        materialize(model, torch.device("cpu"))


def test_rows_that_mix_are_seen_where_ranks_read_parts_of_a_micro_batch(zygote, work):
    (work / "model.py").write_text(edited(MIXED_ROWS, (REPO / "model.py").read_text()))
    steps = [{"batch_size": 4, "gradient_accumulation_steps": n} for n in (2, 1)]
    whole, parts = compare(zygote, work, [[{}, step, None] for step in steps], folder=work)
    assert whole == "" and parts.startswith("differs")


def test_a_run_says_that_its_layout_was_compared_or_stops_with_one_line(zygote, work):
    run = zygote.train(["--check_layout=True", "--tp=2", "--max_iters=1"], work, 2)
    assert run.text().count("layout:  tp=2 computes the same as one process") == 1
    repo = apply("token shift", work / "edited")
    run = zygote.train(["--check_layout=True", "--tp=2", "--max_iters=1"], work, 2, repo=repo, ok=False)
    (message,) = re.findall(r"^error: .*", run.text(), flags=re.M)
    assert "Traceback" not in run.text() and run.codes == [1, 1]
    said = "tp=2 does not compute what one process computes with this model.py: the loss"
    assert message.startswith(f"error: {said}") and "; dp and zero=3 compute the same." in message


@pytest.mark.parametrize(("name", "nproc"), [("mixture of depths", 1), ("frozen embeddings", 2)])
def test_an_edited_run_is_resumed_and_sampled(zygote, work, name, nproc):
    """With a module that has the name of the experts' router, and without a gradient of the embeddings."""
    repo = apply(name, work / "edited")
    zygote.train(["--check_layout=True", "--max_iters=1"], work, nproc, repo=repo)
    run = zygote.train(["--check_layout=True", "--max_iters=2", "--init_from=resume"], work, nproc, repo=repo)
    assert "iter 2: loss" in run.text()
    sample = ["--num_samples=1", "--max_new_tokens=5", "--device=cpu"]
    run = zygote.start(sample, work, script="sample.py", repo=repo).wait(60)
    assert "---------------" in run.text()


@pytest.mark.extra
@pytest.mark.slow
@pytest.mark.parametrize("name", [*EDITS, *documented()])
def test_an_edit_has_the_curve_of_one_process_or_stops_with_one_line(zygote, work, name):
    """Ten steps of train.py on each way: nothing is silent."""
    repo = apply(name, work / "edited")
    flags = ["--n_layer=4", "--n_head=4", "--max_iters=9", "--check_ranks_interval=3", "--check_layout=True"]
    flags += [f"--{key}={value}" for key, value in SETTINGS.get(name, {}).items()]
    one = zygote.train([*flags, "--out_dir=one"], work, repo=repo, ok=False)
    if one.codes != [0]:
        assert re.fullmatch(r"error: .*\n", one.text()), one.text()
        return
    for way in TRIED:
        out = work / way.replace(" ", "-")
        more = [*flags, *(f"--{key}={value}" for key, value in LAYOUTS[way].items()), f"--out_dir={out}"]
        run = zygote.train(more, work, 2, repo=repo, ok=False)
        if run.codes == [0, 0]:
            assert way not in EXPECTED.get(name, {})
            assert column(out, "loss") == pytest.approx(column(work / "one", "loss"), abs=1e-5), way
        else:
            messages = [line for line in run.text().splitlines() if line.startswith("error: ")]
            assert "Traceback" not in run.text() and len(messages) >= 1, run.text()


@pytest.mark.slow
@pytest.mark.parametrize("heading", documented())
def test_a_documented_change_has_the_check_of_its_page(zygote, work, heading):
    """The diff or the file of the page: what does not hold is what the page says, up to numbers."""
    section = documented()[heading]
    repo = apply(heading, work / "edited")
    command = ["--check=True", "--dtype=float32"]
    if file := blocks(section, "python"):
        name = re.match(r"# (\S+)", file)[1]
        (work / name).write_text(file)
        command.append(re.search(r"--check (--optimizer=\S+)", section)[1])
    run = zygote.start(command, work, script="bench.py", repo=repo).wait(300, ok=False)
    rows = [line for line in run.text().splitlines() if re.match(r".{24} (holds|refused|differs)", line)]
    failed = [line for line in rows if line[25:30] != "holds"]
    assert without_numbers(failed) == without_numbers(blocks(section, "text").splitlines())
    assert run.codes == [int(any(line[25:32] == "differs" for line in rows))]
    assert f"{len(rows)} comparisons" in section


def without_numbers(lines):
    """The lines, in which the digits may depend on the machine."""
    return [re.sub(r"[\d.e-]*\d", "N", line) for line in lines]
