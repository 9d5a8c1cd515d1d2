"""Layouts compared with one process: a fault in any is seen, and so are edits of model.py."""

import json

import pytest
from breaks import BREAKS
from runs import REPO

from isogpt.speed.model_check import COMBINED, LAYOUTS

MODELS = {
    "gpt2": {"bias": True},
    "nanochat": {"arch": "nanochat", "n_kv_head": 2, "optimizer": "muon"},
    "llama": {"arch": "llama", "n_kv_head": 2, "optimizer": "muon"},
    "experts": {"n_expert": 4, "bias": True},
    "llama-experts": {"arch": "llama", "n_expert": 4, "n_expert_active": 3, "optimizer": "muon"},
}


def compare(zygote, work, items, nproc):
    """What each of [model settings, layout settings, break or None] differs in; "" for nothing."""
    path = work / "items.json"
    path.write_text(json.dumps(items))
    zygote.start([path], work, nproc, script="tests/layout_worker.py", repo=REPO, group=nproc > 1).wait(240)
    return json.loads(path.with_suffix(".out").read_text())


@pytest.mark.parametrize("nproc", [2, 4])
def test_layouts_compute_what_one_process_computes(zygote, work, nproc):
    ways = {name: way for name, way in (LAYOUTS | (COMBINED if nproc == 4 else {})).items()}
    cases = [
        (model, name)
        for model, settings in MODELS.items()
        for name, way in ways.items()
        if "n_expert" in settings or "ep" not in way
    ]
    found = compare(zygote, work, [[MODELS[model], ways[name], None] for model, name in cases], nproc)
    assert {case: text for case, text in zip(cases, found, strict=True) if text} == {}


def test_faults_in_each_way_are_seen(zygote, work):
    cases = [(way, fault) for way, faults in BREAKS.items() for fault in faults]
    items = [
        [MODELS["experts" if way == "ep 2" else "gpt2"], LAYOUTS[way], BREAKS[way][fault]]
        for way, fault in cases
    ]
    found = compare(zygote, work, items, 2)
    for case, text in zip(cases, found, strict=True):
        print(case, text)
    assert [case for case, text in zip(cases, found, strict=True) if not text] == []
