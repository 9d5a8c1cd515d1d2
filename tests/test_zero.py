"""
Sharding and recomputation change memory, not the curve. A checkpoint of any layout resumes on any other.
"""

import os
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from runs import column, start_changed
from test_parity import same

from isogpt.checkpoint import sharded_files
from isogpt.checkpoint.manifest import hash_files, read_manifest, sealed
from isogpt.checkpoint.search import newest_checkpoint
from isogpt.checkpoint.source import open_checkpoint
from isogpt.checkpoint.state import restore_checkpoint
from isogpt.parallel.local_parts import LocalPart, local_part_of
from isogpt.parallel.parallelize import materialize
from isogpt.training import optim, optimizer_state
from model import GPT, GPTConfig

ONE = ["--gradient_accumulation_steps=4", "--batch_size=12", "--n_layer=3"]
# name: (processes, flags); all read 48 sequences per step and are compared with one process. A step of more
# layouts is compared in test_layout_check.py
WAYS = {
    "zero1": (2, ["--zero=1"]),
    "zero2": (2, ["--zero=2"]),
    "zero3": (2, ["--fsdp=True"]),
    "zero3-offload": (2, ["--zero=3", "--cpu_offload=True"]),
    "hsdp-4": (4, ["--zero=3", "--dp_replicate=2"]),
    "zero3-accum1": (2, ["--zero=3", "--gradient_accumulation_steps=1", "--batch_size=48"]),
    "zero3-4": (4, ["--zero=3", "--fsdp_prefetch=2"]),
    "zero1-7": (7, ["--zero=1"]),
    "zero3-7": (7, ["--zero=3"]),
    "zero3-alone": (1, ["--zero=3"]),
}
QUICK = ("zero1", "zero3", "hsdp-4")


@pytest.fixture(scope="module")
def one(zygote, shared_work):
    zygote.train([*ONE, "--out_dir=one", "--eval_interval=15"], shared_work)
    return shared_work / "one"


MARKED = [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in WAYS if n not in QUICK)]


@pytest.mark.parametrize("name", MARKED)
def test_every_layout_has_the_curve_of_one_process(zygote, shared_work, one, name):
    nproc, flags = WAYS[name]
    out = shared_work / name.replace(":", "-")
    zygote.train([*ONE, "--eval_interval=15", *flags, f"--out_dir={out}"], shared_work, nproc)
    same(column(one, "loss"), column(out, "loss"), absolute=1e-5)
    same(column(one, "grad_norm"), column(out, "grad_norm"), relative=1e-4)
    if "accum1" not in name:
        same(column(one, "val_loss"), column(out, "val_loss"), absolute=1e-5)
    assert len(column(out, "loss")) == 30


SHORT = ["--save_interval=10", "--max_iters=19"]
# layouts to save on and to resume on: (processes, flags)
LAYOUTS = {
    "one": (1, []),
    "ddp2": (2, []),
    "ddp3": (3, []),
    "zero1": (2, ["--zero=1"]),
    "zero1-3": (3, ["--zero=1"]),
    "zero2": (2, ["--zero=2"]),
    "zero3": (2, ["--zero=3"]),
    "zero3-4": (4, ["--zero=3"]),
    "hsdp": (4, ["--zero=3", "--dp_replicate=2"]),
    "offload": (2, ["--zero=3", "--cpu_offload=True"]),
}
PAIRS = [
    ("one", "zero3"),
    ("zero1-3", "zero3"),
    ("zero3", "zero1"),
    ("hsdp", "zero2"),
    ("one", "hsdp"),
    ("zero1", "one"),
    ("zero1", "zero1-3"),
    ("zero1-3", "ddp2"),
    ("zero2", "ddp3"),
    ("zero3", "zero3-4"),
    ("zero3-4", "ddp2"),
    ("offload", "zero3"),
    ("zero3", "offload"),
]


@pytest.fixture(scope="module")
def saves(zygote, shared_work):
    """An uninterrupted run, and runs of ten steps."""
    zygote.train([*SHORT, "--out_dir=straight"], shared_work)
    for name in ("one", "zero3"):
        save_on(zygote, shared_work, name)
    return shared_work


def save_on(zygote, cwd, name):
    """The folder of a run of ten steps on a layout, made when it is first asked for."""
    (nproc, flags), out = LAYOUTS[name], cwd / f"from-{name}"
    if not out.exists():
        zygote.train([*SHORT, "--max_iters=9", *flags, f"--out_dir={out}"], cwd, nproc)
    return out


MARKED_PAIRS = [*PAIRS[:4], *(pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS[4:])]


@pytest.mark.parametrize(("before", "after"), MARKED_PAIRS)
def test_a_checkpoint_resumes_on_a_different_layout(zygote, saves, before, after):
    out = saves / f"{before}-to-{after}"
    shutil.copytree(save_on(zygote, saves, before), out, symlinks=True)
    nproc, flags = LAYOUTS[after]
    zygote.train([*SHORT, *flags, "--init_from=resume", f"--out_dir={out}"], saves, nproc)
    straight, resumed = column(saves / "straight", "loss"), column(out, "loss")
    assert set(resumed) == set(range(20))
    same({s: straight[s] for s in range(10, 20)}, {s: resumed[s] for s in range(10, 20)}, absolute=1e-5)


def empty_model(source):
    """A model of the checkpoint's shape, with undefined values."""
    with torch.device("meta"):
        model = GPT(GPTConfig(**source.run["model_args"]))
    materialize(model, torch.device("cpu"))
    return model


def tensors_of(out):
    """Full weights and moments of the newest checkpoint."""
    found, reports = newest_checkpoint(str(out))
    assert found and not reports
    source = open_checkpoint(found)
    model = empty_model(source)
    optimizers = optim.make_optimizers(model, source.run["config"])
    restore_checkpoint(source, model, optimizers)
    moments = {
        f"{n}.{k}": v
        for n, m in optimizer_state.state_by_name(model, optimizers).items()
        for k, v in m.items()
    }
    return {**{n: p.detach() for n, p in model.named_parameters()}, **moments}


@pytest.mark.parametrize(
    "name", ["zero3", *(pytest.param(n, marks=pytest.mark.slow) for n in ("zero1-3", "zero2", "hsdp"))]
)
def test_a_resume_on_the_same_layout_has_the_same_bits(zygote, saves, name):
    nproc, flags = LAYOUTS[name]
    args = [*SHORT, *flags, "--dropout=0.1", "--gradient_accumulation_steps=4"]
    zygote.train([*args, f"--out_dir=bits-straight-{name}"], saves, nproc)
    zygote.train([*args, "--max_iters=6", "--save_interval=5", f"--out_dir=bits-{name}"], saves, nproc)
    shutil.rmtree(saves / f"bits-{name}" / "step_00000007")
    zygote.train([*args, "--init_from=resume", f"--out_dir=bits-{name}"], saves, nproc)
    a, b = (tensors_of(saves / f"bits-{which}") for which in (f"straight-{name}", name))
    assert a.keys() == b.keys() and len(a) > 40
    assert all(torch.equal(a[k], b[k]) for k in a), [k for k in a if not torch.equal(a[k], b[k])]
    assert column(saves / f"bits-straight-{name}", "loss") == column(saves / f"bits-{name}", "loss")


def test_no_rank_saves_more_than_its_part(saves):
    """The shards of two ranks hold half of the weights and moments each."""
    sizes = [p.stat().st_size for p in (saves / "from-zero3" / "step_00000010").glob("*.distcp")]
    assert len(sizes) == 2 and max(sizes) < 0.6 * sum(sizes)


def test_convert_and_list(zygote, saves, tmp_path):
    """export.py: shards to nanoGPT's single file and back, and the list."""
    shutil.copytree(saves / "from-zero3", tmp_path / "out", symlinks=True)
    run = zygote.start(["out", "--list"], tmp_path, script="export.py").wait()
    assert "shards" in run.text() and "valid" in run.text() and " 10 " in run.text()
    zygote.start(["out", "--to=ckpt.pt"], tmp_path, script="export.py").wait()
    theirs = torch.load(tmp_path / "out" / "ckpt.pt", weights_only=True)
    assert theirs["iter_num"] == 10 and "lm_head.weight" in theirs["model"]
    assert len(theirs["optimizer"]["param_groups"]) == 2
    ours = tensors_of(saves / "from-zero3")
    assert all(torch.equal(theirs["model"][k], v) for k, v in ours.items() if k in theirs["model"])
    (tmp_path / "bare").mkdir()
    shutil.copy(tmp_path / "out" / "ckpt.pt", tmp_path / "bare" / "ckpt.pt")
    again = zygote.start(["bare", "--to=shards"], tmp_path, script="export.py").wait()
    assert "step_00000010" in again.text()
    back = tensors_of(tmp_path / "bare")
    assert back.keys() == ours.keys() and all(torch.equal(back[k], ours[k]) for k in ours)
    assert not list((tmp_path / "bare").glob("unfinished*"))


@pytest.mark.slow
def test_a_new_run_from_the_weights_of_a_sharded_run(zygote, saves, tmp_path):
    """Step 0 and a new optimizer, on any layout; the folder of the other run does not change."""
    shutil.copytree(saves / "from-zero3", tmp_path / "source", symlinks=True)
    shutil.copytree(saves / "data", tmp_path / "data")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "source").rglob("*")}
    # the reference: the same weights at step 0 without optimizer state
    shutil.copytree(saves / "from-zero3", tmp_path / "converted", symlinks=True)
    zygote.start(["converted", "--to=ckpt.pt"], tmp_path, script="export.py").wait()
    state = torch.load(tmp_path / "converted" / "ckpt.pt", weights_only=True)
    state = {k: v for k, v in state.items() if k not in ("optimizer", "isogpt", "best_val_loss")}
    (tmp_path / "reference").mkdir()
    torch.save({**state, "iter_num": 0}, tmp_path / "reference" / "ckpt.pt")
    args = ["--max_iters=9", "--block_size=16"]
    zygote.train([*args, "--init_from=resume", "--out_dir=reference"], tmp_path)
    reference = column(tmp_path / "reference", "loss")
    assert set(reference) == set(range(10))
    for name, tolerance in (("one", 0.0), ("ddp2", 1e-5), ("zero1", 1e-5), ("zero3", 1e-5)):
        nproc, flags = LAYOUTS[name]
        zygote.train([*args, *flags, "--init_from=source", f"--out_dir={name}"], tmp_path, nproc)
        same(reference, column(tmp_path / name, "loss"), absolute=tolerance)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "source").rglob("*")} == before


def test_damage_to_any_file_of_a_sharded_checkpoint(zygote, saves, tmp_path):
    """
    For each file: a byte flipped, truncated, missing. The damage is reported, and the previous checkpoint is
    used.
    """
    shutil.copytree(saves / "from-zero3", tmp_path / "out", symlinks=True)
    shutil.copytree(saves / "data", tmp_path / "data")
    args = [*SHORT, "--zero=3", "--init_from=resume", "--out_dir=out"]
    zygote.train([*args, "--max_iters=12"], tmp_path, 2)
    step = tmp_path / "out" / "step_00000013"
    for path in sorted(step.iterdir()):
        good = path.read_bytes()
        for bad in (good[:100] + bytes([good[100] ^ 4]) + good[101:], good[:-1], b"", None):
            path.unlink() if bad is None else path.write_bytes(bad)
            found, reports = newest_checkpoint(str(tmp_path / "out"))
            assert found.step == 10 and len(reports) == 1 and "step_00000013" in reports[0], path
        path.write_bytes(good)
    assert newest_checkpoint(str(tmp_path / "out"))[0].step == 13
    content = bytearray((step / "__1_0.distcp").read_bytes())  # which rank 1 verifies
    content[len(content) // 2] ^= 1
    (step / "__1_0.distcp").write_bytes(content)
    run = zygote.train([*args, "--max_iters=14"], tmp_path, 2)
    said = "warning: out/step_00000013 is damaged: the checksum of __1_0.distcp does not match\n"
    assert run.text().count(said) == 1 and set(column(tmp_path / "out", "loss")) == set(range(15))
    assert newest_checkpoint(str(tmp_path / "out"))[0].step == 15


def test_shards_that_dcp_describes_are_read(tmp_path):
    """Checkpoints before tensors.json have DCP's own .metadata, which describes all pieces."""
    w, step = torch.randn(5, 3), torch.tensor(7.0)
    dcp.save({"w": w, "step": step}, checkpoint_id=tmp_path, no_dist=True)
    assert sharded_files.shapes(tmp_path, {}) == {"w": w.shape, "step": step.shape}
    rows, number = torch.zeros(2, 3), torch.tensor(0.0)
    parts = {"w": LocalPart(w.shape, (((2, 0), rows),)), "step": local_part_of(number)}
    sharded_files.read(tmp_path, parts, {})
    assert torch.equal(rows, w[2:4]) and number == 7.0


def test_metadata_that_would_run_code_does_not(saves, tmp_path):
    """Even if its checksums match, as a forger would make them."""

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    for target in (".metadata", "ckpt.pt"):
        source = saves / ("from-zero3" if target == ".metadata" else "from-one") / "step_00000010"
        out = tmp_path / target.strip(".") / "step_00000010"
        shutil.copytree(source, out)
        (out / "tensors.json").unlink(missing_ok=True)  # as before there were indices
        (out / target).write_bytes(pickle.dumps(Evil()))
        manifest = read_manifest(out)
        manifest["files"] = hash_files(out)
        del manifest["files"]["manifest.json"]
        (out / "manifest.json").write_text(sealed(manifest))
        found, reports = newest_checkpoint(str(out.parent))
        assert found and not reports
        with pytest.raises(ValueError, match="run|load"):
            source = open_checkpoint(found)
            restore_checkpoint(source, empty_model(source))
        assert not (tmp_path / "ran").exists()


def test_metadata_that_is_left_over_is_not_read(saves, tmp_path):
    shutil.copytree(saves / "from-zero3" / "step_00000010", tmp_path / "step_00000010")
    (tmp_path / "step_00000010/.metadata").write_bytes(b"of a different checkpoint")
    source = open_checkpoint(newest_checkpoint(str(tmp_path))[0])
    restore_checkpoint(source, empty_model(source))


def test_smaller_block_size_on_a_sharded_resume(zygote, saves, tmp_path):
    shutil.copytree(saves / "from-zero3", tmp_path / "out", symlinks=True)
    shutil.copytree(saves / "from-zero3", tmp_path / "out1", symlinks=True)
    shutil.copytree(saves / "data", tmp_path / "data")
    args = [*SHORT, "--init_from=resume", "--block_size=16", "--max_iters=13"]
    zygote.train([*args, "--zero=3", "--out_dir=out"], tmp_path, 2)
    zygote.train([*args, "--out_dir=out1"], tmp_path)
    a, b = column(tmp_path / "out", "loss"), column(tmp_path / "out1", "loss")
    same({s: a[s] for s in range(10, 14)}, {s: b[s] for s in range(10, 14)}, absolute=1e-5)


@pytest.mark.slow
def test_scaler_agrees_under_sharding(zygote, saves):
    """
    float16: an overflow in one rank's shard skips the step on all ranks; the curve is that of one process.
    """
    args = ["--dtype=float16", "--max_iters=12"]
    for name in ("one", "zero1", "zero2", "zero3"):
        zygote.train([*args, *LAYOUTS[name][1], f"--out_dir=fp16-{name}"], saves, LAYOUTS[name][0])
        a, b = column(saves / "fp16-one", "loss"), column(saves / f"fp16-{name}", "loss")
        same(a, b, absolute=0.02)
    for name in ("zero2", "zero3"):
        tensors = tensors_of(saves / f"fp16-{name}")
        steps = {v.item() for k, v in tensors.items() if k.endswith(".step")}
        assert len(steps) == 1 and all(v.isfinite().all() for v in tensors.values())


GROUPS = """
import torch
from isogpt.launch import process_group
from isogpt.parallel import mesh
init, leave, meshes = mesh.init_device_mesh, process_group.leave_process_group, []
def keep(*args, **kwargs):
    meshes.append(init(*args, **kwargs))
    return meshes[-1]
def tell():
    for name in meshes[0].mesh_dim_names:
        options = meshes[0].get_group(name)._get_backend(torch.device("cpu")).options
        print(f"{name}: {options._timeout.total_seconds():g} s")
    leave()
mesh.init_device_mesh, process_group.leave_process_group = keep, tell
"""


def test_the_groups_of_hsdp_have_our_timeout(zygote, work):
    """The default of new groups is gloo's half an hour."""
    args = ["--zero=3", "--dp_replicate=2", "--max_iters=0", "--dist_timeout_s=77"]
    run = start_changed(zygote, GROUPS, args, work, 4).wait()
    assert run.text().count("replicate: 77 s") == run.text().count("shard: 77 s") == 4
