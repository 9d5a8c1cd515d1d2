"""Shards, mixtures and windows that begin with a document: one curve, on any layout and through kills."""

import json
import shutil

import numpy as np
import pytest
from runs import TINY, column, tiny_data
from test_exact import same_numbers
from test_parity import same
from test_resume import assert_same_bits, final, start_until_step

# tokens of each shard: windows of 33 tokens cross several of the small ones
SHARDS = [7000, 20, 5, 6000, 33]
# two sources, of which the larger one is in shards
MIXTURE = ["--dataset=shards:0.7,file:0.3", "--data_order=documents"]
# 48 sequences a step: 23 steps go beyond the first 1,000 sequences, over which the sources are spread
STEP = ["--gradient_accumulation_steps=4", "--batch_size=12", "--max_iters=22", "--eval_interval=12"]
RUN = [*MIXTURE, *STEP]
SHORT = [*STEP, "--max_iters=9", "--eval_interval=5"]
LAYOUTS = {
    "3": (3, ""),
    "zero3": (2, "--zero=3"),
    "tp": (2, "--tp=2"),
    "pp": (2, "--pp=2"),
    "cp": (2, "--cp=2"),
}
KEYS = ("loss", "train_loss", "val_loss", "val_loss/shards", "val_loss/file")


def write_shard(path, ids):
    """A shard in the form of llm.c, also written by modded-nanogpt."""
    header = np.zeros(256, np.int32)
    header[:3] = 20240520, 1, len(ids)
    path.write_bytes(header.tobytes() + ids.tobytes())


def in_shards(folder, name):
    """Copy a data set, with its training tokens in shards that are named as those of llm.c."""
    copy = folder.with_name(name)
    shutil.copytree(folder, copy)
    ids = np.fromfile(copy / "train.bin", np.uint16)
    (copy / "train.bin").unlink()
    (copy / "val.bin").rename(copy / "text_val_000000.bin")
    for number, part in enumerate(np.split(ids, np.cumsum(SHARDS)), 1):
        write_shard(copy / f"text_train_{number:06d}.bin", part)


def write_mixture(path):
    """Data sets in path/data: tiny, file, and shards, which contains the same tokens as tiny."""
    tiny = tiny_data(path)
    tiny_data(path, tokens=9000, name="file")
    for name in ("tiny", "file"):
        add_documents(path / "data" / name)
    in_shards(tiny, "shards")


def add_documents(folder):
    """Write documents.bin: a document begins at each line break before a speaker's name."""
    ids = np.fromfile(folder / "train.bin", np.uint16)
    is_break = ids == 0  # the first of the characters
    begins = np.flatnonzero(is_break[:-1] & is_break[1:])
    begins = np.unique([0, *begins + 1])
    begins.astype(np.int64).tofile(folder / "documents.bin")
    (folder / "meta.json").write_text(json.dumps({"train_documents": len(begins)}))


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with the data sets of a mixture."""
    path = tmp_path_factory.mktemp("work")
    write_mixture(path)
    return path


@pytest.fixture(scope="module")
def one(zygote, work):
    """The run of one process on a mixture of shards and a file, in the order of documents."""
    zygote.train([*RUN, "--out_dir=one"], work)
    return work / "one"


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_mixture_of_shards_has_one_curve_on_every_layout(zygote, work, one, name):
    processes, flags = LAYOUTS[name]
    zygote.train([*RUN, *flags.split(), f"--out_dir={name}"], work, processes)
    for key in KEYS:
        same(column(one, key), column(work / name, key), absolute=1e-5)
    same(column(one, "grad_norm"), column(work / name, "grad_norm"), relative=1e-4)
    assert len(column(one, "loss")) == 23 and len(column(one, "val_loss")) == 3


@pytest.mark.slow
def test_shards_have_the_bits_of_one_file(zygote, work):
    """In every order; and their curve on 2 and 3 ranks is that of one process."""
    for order in ("random", "shuffle", "documents"):
        args = [*SHORT, f"--data_order={order}"]
        zygote.train([*args, "--dataset=tiny", f"--out_dir=file-{order}"], work)
        zygote.train([*args, "--dataset=shards", f"--out_dir=shards-{order}"], work)
        for key in ("loss", "grad_norm", "train_loss", "val_loss"):
            assert column(work / f"file-{order}", key) == column(work / f"shards-{order}", key), key
    for processes, order in ((3, "shuffle"), (2, "random")):
        args = [*SHORT, f"--data_order={order}", f"--out_dir=many-{order}"]
        zygote.train([*args, "--dataset=shards"], work, processes)
        same(column(work / f"file-{order}", "loss"), column(work / f"many-{order}", "loss"), absolute=1e-5)


@pytest.mark.slow
def test_a_mixture_that_was_killed_has_the_same_bits(zygote, work):
    """On the same layout, without exact."""
    args = [*RUN, "--save_interval=4", "--dropout=0.1"]
    zygote.train([*args, "--out_dir=straight"], work, 2)
    args = [*TINY, *args, "--out_dir=killed", "--init_from=auto"]
    for step in (6, 15):
        kill_after_a_save(zygote, work, args, 2, step)
    zygote.start(args, work, 2).wait()
    assert_same_bits(final(work / "straight"), final(work / "killed"))
    for key in (*KEYS, "grad_norm"):
        assert column(work / "straight", key) == column(work / "killed", key), key


@pytest.mark.slow
def test_a_mixture_that_was_killed_on_2_and_3_ranks_has_the_bits_of_one(zygote, work):
    args = [*RUN, "--exact=True", "--save_interval=4", "--dropout=0.1"]
    zygote.train([*args, "--out_dir=exact"], work)
    args = [*TINY, *args, "--out_dir=killed_exact", "--init_from=auto"]
    for processes, step in ((2, 6), (3, 15)):
        kill_after_a_save(zygote, work, args, processes, step)
    zygote.start([*args, "--zero=3"], work, 2).wait()
    same_numbers(work / "exact", work / "killed_exact")


def kill_after_a_save(zygote, work, args, processes, step):
    """Start a run, and kill it once it has logged this step and written a checkpoint."""
    out = work / next(arg for arg in args if arg.startswith("--out_dir=")).removeprefix("--out_dir=")
    run = start_until_step(zygote, work, args, processes, step)
    run.until(lambda text: any(out.glob("step_*")))
    run.kill()
    run.wait(ok=False)
