"""Shards: what they hold, their damage, conversions, and runs that start from them."""

import random
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from runs import assert_same_curve, start_changed, steps_in, tensors_in
from test_layouts import args_of
from torch.distributed.checkpoint import format_utils

from isogpt.checkpoint.search import find_checkpoint
from isogpt.checkpoint.source import open_checkpoint

ONE, ZERO3 = args_of("gpt2"), args_of("gpt2", "zero3")


@pytest.fixture(scope="module")
def sharded(trained):
    """The folder of a run with zero 3, which has saved steps 5 and 10."""
    return trained(ZERO3, 2)


@pytest.mark.slow
def test_a_new_run_from_the_weights_of_a_sharded_run(zygote, sharded, session_work, tmp_path):
    """Step 0 and a new optimizer, on any layout; the folder of the other run does not change."""
    before = {path: path.stat().st_mtime_ns for path in sharded.rglob("*")}
    for nproc, zero in ((1, 0), (2, 3)):
        args = [f"--zero={zero}", f"--init_from={sharded}", f"--out_dir={tmp_path / str(nproc)}"]
        run = zygote.train([*ONE, "--max_iters=4", "--block_size=16", *args], session_work, nproc)
        assert f"from {sharded}/step_00000010, step 10" in run.text()
    assert_same_curve(tmp_path / "2", tmp_path / "1")
    assert {path: path.stat().st_mtime_ns for path in sharded.rglob("*")} == before


@pytest.mark.parametrize("form", ["ckpt.pt", "shards"])
def test_damage_to_any_file_is_noticed(trained, sharded, tmp_path, form):
    """A flipped byte, at many places; a truncated file; a missing one. The previous checkpoint is found."""
    out, step = tmp_path / "out", tmp_path / "out" / "step_00000010"
    shutil.copytree(sharded if form == "shards" else trained(ONE), out, symlinks=True)
    rng = random.Random(0)
    for path in sorted(step.iterdir()):
        good = path.read_bytes()
        damaged = [None, *(good[:size] for size in (0, 1, len(good) // 2, len(good) - 1))]
        for place in (0, len(good) - 1, *(rng.randrange(len(good)) for _ in range(20))):
            damaged.append(good[:place] + bytes([good[place] ^ (1 << rng.randrange(8))]) + good[place + 1 :])
        for bad in damaged:
            path.unlink() if bad is None else path.write_bytes(bad)
            found, reports = find_checkpoint(str(out))
            assert found.step == 5 and len(reports) == 1 and "step_00000010" in reports[0], path
        path.write_bytes(good)
    assert find_checkpoint(str(out))[0].step == 10


@pytest.mark.parametrize("way", ["zero3", "tp2", "pp2"])
def test_torchs_own_tools_read_our_shards(zygote, trained, tmp_path, way):
    """Its converter and its loader, which know nothing of isogpt: the tensors that export.py writes."""
    (tmp_path / "out").mkdir()
    run = trained(args_of("gpt2", way), 2)
    step = shutil.copytree(run / "step_00000010", tmp_path / "out/step_00000010")
    zygote.start([tmp_path / "out", "--to=ckpt.pt"], tmp_path, script="export.py").wait()
    groups = torch.load(tmp_path / "out/ckpt.pt", weights_only=True)["optimizer"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]  # nanoGPT resumes with what is here
    (tmp_path / "bare").mkdir()
    shutil.move(tmp_path / "out/ckpt.pt", tmp_path / "bare/ckpt.pt")
    expected = tensors_in(tmp_path / "bare")
    assert expected.pop("model.lm_head.weight").equal(expected["model.transformer.wte.weight"])

    command = ["dcp_to_torch", step, tmp_path / "converted.pt"]
    zygote.start(command, tmp_path, script=format_utils.__file__).wait()
    loaded = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(step), no_dist=True)
    for found in (torch.load(tmp_path / "converted.pt"), loaded):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_index_of_an_earlier_version_is_not_read(sharded, tmp_path):
    shutil.copytree(sharded / "step_00000010", tmp_path / "step_00000010")
    (tmp_path / "step_00000010/tensors.json").touch()
    with pytest.raises(ValueError, match="an earlier version wrote it"):
        open_checkpoint(find_checkpoint(str(tmp_path))[0])


def test_smaller_block_size_on_a_sharded_resume(zygote, sharded, session_work, tmp_path):
    for name, args, nproc in (("one", ONE, 1), ("two", ZERO3, 2)):
        shutil.copytree(sharded, tmp_path / name, symlinks=True)
        more = ["--init_from=resume", "--block_size=16", "--max_iters=13", f"--out_dir={tmp_path / name}"]
        zygote.train([*args, *more], session_work, nproc)
    assert_same_curve(tmp_path / "two", tmp_path / "one")
    assert steps_in(tmp_path / "two") == 13


# train.py that says how long its groups wait
GROUPS = """
import torch
import torch.distributed as dist
init, leave, meshes = dist.init_device_mesh, dist.destroy_process_group, []
def keep(*args, **kwargs):
    meshes.append(init(*args, **kwargs))
    return meshes[-1]
def tell():
    for name in meshes[0].mesh_dim_names:
        options = meshes[0].get_group(name)._get_backend(torch.device("cpu")).options
        print(f"{name}: {options._timeout.total_seconds():g} s")
    leave()
dist.init_device_mesh, dist.destroy_process_group = keep, tell
"""


def test_the_groups_of_hsdp_have_our_timeout(zygote, work):
    """The default of new groups is gloo's half an hour."""
    args = ["--zero=3", "--dp_replicate=2", "--max_iters=0", "--dist_timeout_s=77"]
    run = start_changed(zygote, GROUPS, args, work, 4).wait()
    assert run.text().count("replicate: 77 s") == run.text().count("shard: 77 s") == 4
