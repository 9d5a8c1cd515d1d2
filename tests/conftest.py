"""Fixtures of all tests."""

import os
import re

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported: several runs share the cores

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "measure")]

from runs import Zygote, tiny_data, write_mixture

# Of the slow tests in these files, CI runs those that match; the others are extra. Together they took two
# thirds of CI's time, which must stay below 40 minutes on a slow machine. A new slow test of these files is
# added here.
IN_CI = {
    "test_arch.py": r"nanochat-muon-zero3-2|zero1-2-hsdp-4|experts_from_a_dense",
    "test_bench.py": r"collectives",
    "test_compile.py": r"inductor\[full|one of each|eager_mode\[changes",
    "test_exact.py": r"one_process\[(gpt2|nanochat-muon|experts|bfloat16|dropout)\]"
    r"|killed_on|is_skipped|whole_micro",
    "test_gpu_check.py": r"on_a_gpu|a_kill",
    "test_hosts.py": r"three_hosts|survivor|without_ipv4",
    "test_layout_check.py": r"models|on_a_layout|Sliding|skip from|average",
    "test_memory.py": r"torchrun_restarts|collectives|divided",
    "test_recipe.py": r"fast_recipe",
    "test_resume.py": r"bits\[3\]|scaler|kills_do_not",
    "test_serving.py": r"continuous-batching-gpt2",
    "test_shares.py": r"3-1-1-zero3|2-1-tp2|slow_rank",
    "test_signals.py": r"(torchrun|nproc`)-USR1|mpirun-QUIT|a pod-TERM",
    "test_slurm.py": r"\[grace|time_limit|to_a_job\[1",
    "test_slow_networks.py": r"bits\[(int8-3|islands)\]|number_of_islands",
    "test_sweep.py": r"signals|two_sweeps|killed",
    "test_zero.py": r"curve_of_one_process\[(zero3-offload|zero3-7)\]"
    r"|bits\[hsdp|scaler"
    r"|layout\[(one-hsdp|zero3-zero3-4|offload-zero3)\]",
}
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI")


@pytest.fixture(scope="session")
def zygote():
    """Starts runs (see runs.py)."""
    z = Zygote()
    yield z
    z.close()


@pytest.fixture
def work(tmp_path):
    """A folder to run in, with a data set named tiny."""
    tiny_data(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def shared_work(tmp_path_factory):
    """The same for all tests of a file, which only read from it."""
    path = tmp_path_factory.mktemp("work")
    tiny_data(path)
    return path


@pytest.fixture(scope="session")
def session_work(tmp_path_factory):
    """The folder in which `trained` runs, with the data sets tiny, and file and shards of a mixture."""
    path = tmp_path_factory.mktemp("work")
    write_mixture(path)
    return path


@pytest.fixture(scope="session")
def trained(zygote, session_work):
    """
    The folder of a run with these settings, which is trained once in a session. Tests only read from it.
    """
    folders = {}

    def folder(args, nproc=1):
        settings = nproc, *sorted(dict(arg.split("=", 1) for arg in args).items())
        if settings not in folders:
            out = session_work / f"trained{len(folders)}"
            text = zygote.train([*args, f"--out_dir={out}"], session_work, nproc).text()
            (out / "output.txt").write_text(text)
            folders[settings] = out
        return folders[settings]

    return folder


@pytest.fixture
def at(monkeypatch, tmp_path):
    """An empty working folder, no launcher, and monkeypatch's methods."""
    for name in [*os.environ]:
        if name.startswith(LAUNCHED):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return SimpleNamespace(
        path=tmp_path,
        set=monkeypatch.setattr,
        env=monkeypatch.setenv,
        item=monkeypatch.setitem,
        context=monkeypatch.context,
        chdir=monkeypatch.chdir,
    )


def pytest_addoption(parser, pluginmanager):
    """Say why pytest does not know the options of pyproject.toml."""
    if not pluginmanager.hasplugin("xdist"):
        raise pytest.UsageError("pytest-xdist is missing: pip install -r requirements-dev.txt")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """
    Two workers for the whole suite, since tests wait for processes. None for chosen files or tests, for tests
    that share a GPU, and for output that is shown immediately.
    """
    is_part = any("::" in arg or arg.endswith(".py") for arg in config.args)
    one_process = is_part or config.option.markexpr == "gpu" or config.option.capture == "no"
    return 0 if one_process else 2


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the slow tests that CI does not run as extra."""
    for item in items:
        kept = IN_CI.get(item.path.name, "")
        if item.get_closest_marker("slow") and not re.search(kept, item.name):
            item.add_marker(pytest.mark.extra)
