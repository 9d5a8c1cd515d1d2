"""Shards: what they hold, their damage, conversions, and runs that start from them."""

import os
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from runs import column, same, start_changed, tensors_in
from test_layouts import args_of

from isogpt.checkpoint import sharded_files
from isogpt.checkpoint.manifest import hash_files, read_manifest, sealed
from isogpt.checkpoint.search import newest_checkpoint
from isogpt.checkpoint.source import open_checkpoint
from isogpt.checkpoint.state import restore_checkpoint
from isogpt.parallel.local_parts import LocalPart, local_part_of
from isogpt.parallel.parallelize import materialize
from model import GPT, GPTConfig

ONE, ZERO3 = args_of("gpt2"), args_of("gpt2", "zero3")


@pytest.fixture(scope="module")
def sharded(trained):
    """The folder of a run with zero 3, which has saved steps 5 and 10."""
    return trained(ZERO3, 2)


def empty_model(source):
    """A model of the checkpoint's shape, with undefined values."""
    with torch.device("meta"):
        model = GPT(GPTConfig(**source.run["model_args"]))
    materialize(model, torch.device("cpu"))
    return model


def test_no_rank_saves_more_than_its_part(sharded):
    """The shards of two ranks hold half of the weights and moments each."""
    sizes = [p.stat().st_size for p in (sharded / "step_00000010").glob("*.distcp")]
    assert len(sizes) == 2 and max(sizes) < 0.6 * sum(sizes)


def test_convert_and_list(zygote, sharded, tmp_path):
    """export.py: shards to nanoGPT's single file, and the list."""
    shutil.copytree(sharded, tmp_path / "out", symlinks=True)
    ours = tensors_in(tmp_path / "out")
    run = zygote.start(["out", "--list"], tmp_path, script="export.py").wait()
    assert "shards" in run.text() and "valid" in run.text() and " 10 " in run.text()
    zygote.start(["out", "--to=ckpt.pt"], tmp_path, script="export.py").wait()
    theirs = torch.load(tmp_path / "out" / "ckpt.pt", weights_only=True)
    assert theirs["iter_num"] == 10 and "lm_head.weight" in theirs["model"]
    assert [group["weight_decay"] for group in theirs["optimizer"]["param_groups"]] == [0.1, 0.0]
    weights = {name.removeprefix("model."): w for name, w in ours.items() if name.startswith("model.")}
    assert weights and all(torch.equal(theirs["model"][name], w) for name, w in weights.items())
    assert not list((tmp_path / "out").glob("unfinished*"))


@pytest.mark.slow
def test_a_new_run_from_the_weights_of_a_sharded_run(zygote, sharded, session_work, tmp_path):
    """Step 0 and a new optimizer, on any layout; the folder of the other run does not change."""
    before = {path: path.stat().st_mtime_ns for path in sharded.rglob("*")}
    # the reference: the same weights at step 0 without optimizer state
    shutil.copytree(sharded, tmp_path / "converted", symlinks=True)
    zygote.start(["converted", "--to=ckpt.pt"], tmp_path, script="export.py").wait()
    state = torch.load(tmp_path / "converted" / "ckpt.pt", weights_only=True)
    state = {k: v for k, v in state.items() if k not in ("optimizer", "isogpt", "best_val_loss")}
    (tmp_path / "reference").mkdir()
    torch.save({**state, "iter_num": 0}, tmp_path / "reference" / "ckpt.pt")
    args = [*ONE, "--max_iters=4", "--block_size=16"]
    zygote.train([*args, "--init_from=resume", f"--out_dir={tmp_path}/reference"], session_work)
    reference = column(tmp_path / "reference", "loss")
    assert set(reference) == set(range(5))
    ways = (1, "--zero=0", 0.0), (2, "--zero=0", 1e-5), (2, "--zero=1", 1e-5), (2, "--zero=3", 1e-5)
    for nproc, zero, tolerance in ways:
        out = tmp_path / f"{nproc}{zero}"
        zygote.train([*args, zero, f"--init_from={sharded}", f"--out_dir={out}"], session_work, nproc)
        same(reference, column(out, "loss"), absolute=tolerance)
    assert {path: path.stat().st_mtime_ns for path in sharded.rglob("*")} == before


def test_damage_to_any_file_of_a_sharded_checkpoint(zygote, sharded, session_work, tmp_path):
    """
    For each file: a byte flipped, truncated, missing. The damage is reported, and the previous checkpoint is
    used.
    """
    out, step = tmp_path / "out", tmp_path / "out" / "step_00000010"
    shutil.copytree(sharded, out, symlinks=True)
    for path in sorted(step.iterdir()):
        good = path.read_bytes()
        for bad in (good[:100] + bytes([good[100] ^ 4]) + good[101:], good[:-1], b"", None):
            path.unlink() if bad is None else path.write_bytes(bad)
            found, reports = newest_checkpoint(str(out))
            assert found.step == 5 and len(reports) == 1 and "step_00000010" in reports[0], path
        path.write_bytes(good)
    assert newest_checkpoint(str(out))[0].step == 10
    content = bytearray((step / "__1_0.distcp").read_bytes())  # which rank 1 verifies
    content[len(content) // 2] ^= 1
    (step / "__1_0.distcp").write_bytes(content)
    run = zygote.train([*ZERO3, "--init_from=resume", "--max_iters=10", f"--out_dir={out}"], session_work, 2)
    said = f"warning: {step} is damaged: the checksum of __1_0.distcp does not match\n"
    assert run.text().count(said) == 1 and set(column(out, "loss")) == set(range(11))
    assert newest_checkpoint(str(out))[0].step == 11


def test_shards_that_dcp_describes_are_read(tmp_path):
    """Checkpoints before tensors.json have DCP's own .metadata, which describes all pieces."""
    w, step = torch.randn(5, 3), torch.tensor(7.0)
    dcp.save({"w": w, "step": step}, checkpoint_id=tmp_path, no_dist=True)
    assert sharded_files.shapes(tmp_path, {}) == {"w": w.shape, "step": step.shape}
    rows, number = torch.zeros(2, 3), torch.tensor(0.0)
    parts = {"w": LocalPart(w.shape, (((2, 0), rows),)), "step": local_part_of(number)}
    sharded_files.read(tmp_path, parts, {})
    assert torch.equal(rows, w[2:4]) and number == 7.0


def test_metadata_that_would_run_code_does_not(trained, sharded, tmp_path):
    """Even if its checksums match, as a forger would make them."""

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'ran'}",)

    for target, run in ((".metadata", sharded), ("ckpt.pt", trained(ONE))):
        out = tmp_path / target.strip(".") / "step_00000010"
        shutil.copytree(run / out.name, out)
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


def test_metadata_that_is_left_over_is_not_read(sharded, tmp_path):
    shutil.copytree(sharded / "step_00000010", tmp_path / "step_00000010")
    (tmp_path / "step_00000010/.metadata").write_bytes(b"of a different checkpoint")
    source = open_checkpoint(newest_checkpoint(str(tmp_path))[0])
    restore_checkpoint(source, empty_model(source))


def test_smaller_block_size_on_a_sharded_resume(zygote, sharded, session_work, tmp_path):
    for name, args, nproc in (("one", ONE, 1), ("two", ZERO3, 2)):
        shutil.copytree(sharded, tmp_path / name, symlinks=True)
        more = ["--init_from=resume", "--block_size=16", "--max_iters=13", f"--out_dir={tmp_path / name}"]
        zygote.train([*args, *more], session_work, nproc)
    a, b = (
        {s: loss for s, loss in column(tmp_path / name, "loss").items() if s >= 10} for name in ("one", "two")
    )
    assert len(a) == 4
    same(a, b, absolute=1e-5)


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
