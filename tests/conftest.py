"""Fixtures of all tests."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported: several runs share the cores

import json
import math
import signal
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from runs import Zygote, tiny_data, write_mixture

# seconds by file, of fast and of slow tests; renewed by `pytest -m "slow or not slow" --record-durations`
DURATIONS = ROOT / "tests" / "durations.json"
SLOW_S = 600  # the time limit of a slow test; of the others, see pyproject.toml
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
    for name in ("xdist", "timeout"):
        if not pluginmanager.hasplugin(name):
            raise pytest.UsageError(f"pytest-{name} is missing: pip install -r requirements-dev.txt")
    parser.addoption("--record-durations", action="store_true", help=f"write {DURATIONS.name}")
    help = "append the result of each test to this file, with what it has measured, as a line of JSON"
    parser.addoption("--results", metavar="FILE", type=Path, help=help)
    help = "a clone of nanoGPT, whose speed test_gpu.py compares; .ng in the repository if it exists"
    parser.addoption("--nanogpt", metavar="FOLDER", type=Path, help=help)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """
    Two workers for the whole suite, since tests wait for processes. None for chosen files or tests, for tests
    that share a GPU, and for output that is shown immediately.
    """
    is_part = any("::" in arg or arg.endswith(".py") for arg in config.args)
    one_process = is_part or config.option.markexpr == "gpu" or config.option.capture == "no"
    return 0 if one_process else 2


def pytest_ignore_collect(collection_path, config):
    """`-m gpu` imports no other tests, whose packages a GPU machine may lack."""
    others = collection_path.suffix == ".py" and collection_path.name != "test_gpu.py"
    return True if others and config.option.markexpr == "gpu" else None


def duration_key(path, is_slow):
    """The name in durations.json of a file's fast or slow tests."""
    return f"{Path(path).name}{' (slow)' * is_slow}"


@pytest.hookimpl(trylast=True)  # after the tests were chosen
def pytest_collection_modifyitems(items):
    """
    The longest files are first, so that both workers end at about the same time; a new file is before them.
    """
    recorded, keys = json.loads(DURATIONS.read_text()), {}
    for item in items:
        is_slow = item.get_closest_marker("slow") is not None
        keys.setdefault(item.path, set()).add(duration_key(item.path, is_slow))
        if is_slow:
            item.add_marker(pytest.mark.timeout(SLOW_S))
    seconds = {path: sum(recorded.get(key, math.inf) for key in of) for path, of in keys.items()}
    items.sort(key=lambda item: -seconds[item.path])


def pytest_configure(config):
    """In the process that distributes the tests, or runs them: see Progress."""
    clone = config.option.nanogpt
    if clone and not (clone / "train.py").exists():
        url = "https://github.com/karpathy/nanoGPT"
        raise pytest.UsageError(f"--nanogpt={clone} contains no train.py: git clone {url} FOLDER")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config))


class Progress:
    """How long the files take, the file of --results, and after SIGTERM, which tests have not run."""

    def __init__(self, config):
        self.left, self.durations, self.is_stopped = {}, Counter(), False
        self.records, self.results = config.option.record_durations, config.option.results
        if config.option.dist != "no":  # tests do not run in this process
            signal.signal(signal.SIGTERM, self.stop)

    def stop(self, number, frame):
        """End as by Ctrl-C."""
        self.is_stopped = True
        raise KeyboardInterrupt

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):
        self.left |= dict.fromkeys(ids, "not run")

    @pytest.hookimpl(tryfirst=True)  # before its name is printed
    def pytest_runtest_logstart(self, nodeid):
        self.left[nodeid] = "still running"

    def pytest_runtest_logreport(self, report):
        self.durations[duration_key(report.location[0], "slow" in report.keywords)] += report.duration
        if report.when == "teardown":
            self.left.pop(report.nodeid, None)
        if self.results and (report.when == "call" or report.outcome != "passed"):
            found = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 1)}
            found |= dict(report.user_properties) | {"problem": report.longreprtext[-400:]}
            with self.results.open("a") as file:
                file.write(json.dumps(found) + "\n")

    def pytest_terminal_summary(self, terminalreporter):
        if self.is_stopped:
            terminalreporter.section("stopped by SIGTERM")
            for nodeid, state in sorted(self.left.items(), key=lambda entry: entry[::-1], reverse=True):
                terminalreporter.line(f"{state}: {nodeid}")

    def pytest_sessionfinish(self):
        if self.records:
            known = json.loads(DURATIONS.read_text()) | {key: round(s) for key, s in self.durations.items()}
            DURATIONS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
