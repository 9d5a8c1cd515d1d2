"""Fixtures of all tests."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported: several runs share the cores

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

from runs import Zygote, tiny_data

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


@pytest.fixture
def at(monkeypatch, tmp_path):
    """An empty working folder, no launcher, and monkeypatch's methods."""
    for name in [*os.environ]:
        if name.startswith(LAUNCHED):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    return SimpleNamespace(path=tmp_path, set=monkeypatch.setattr, env=monkeypatch.setenv, item=monkeypatch.setitem,
                           context=monkeypatch.context)  # fmt: skip
