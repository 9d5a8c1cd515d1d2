"""gpu_check.py: with small sizes on a CPU, slowed and killed; on GPUs where there are some."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import gpu_check
import pytest
import torch
from runs import REPO, accepted, children, wait_for

# a run that never ends, with a process of its own
HANGS = """
import signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("began", subprocess.Popen(["sleep", "1000"]).pid, flush=True)
time.sleep(1000)
"""


def start(tmp_path, *args):
    """Start gpu_check.py, with its temporary folder in tmp_path."""
    command = [sys.executable, str(REPO / "measure/gpu_check.py"), f"--out={tmp_path}/out", *args]
    env = os.environ | {"TMPDIR": str(tmp_path)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=tmp_path, env=env, stdout=pipe, stderr=pipe, text=True)


def table(tmp_path):
    """The lines of the table so far."""
    path = tmp_path / "out/table.json"
    return json.loads(path.read_text()) if path.exists() else []


def check(tmp_path, *args):
    """Run gpu_check.py to its end; returns the lines of its table."""
    process = start(tmp_path, *args)
    output, errors = process.communicate()
    assert process.returncode == 0, output[-4000:] + errors[-2000:]
    return table(tmp_path)


def test_a_curve_that_is_not_finite_is_not_close():
    assert gpu_check.close("losses", {0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0}, 0).passed
    assert not gpu_check.close("losses", {0: 1.0, 1: 2.0}, {0: 1.0, 1: float("nan")}, 1e-4).passed


def tree(pid):
    """A process and those that it has started."""
    pids = [pid]
    for pid in pids:
        with suppress(OSError):  # it has just exited
            pids += children(pid)
    return pids


def is_running(pid):
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_program_ends_in_time_if_every_check_hangs(tmp_path, zygote, monkeypatch):
    hangs, started, real_start = tmp_path / "hangs.py", [], gpu_check.start
    hangs.write_text(HANGS)

    def start_hanging(place, script, args, nproc=1):
        started.append(real_start(place, hangs, args, nproc))
        assert started[-1].until(lambda text: text.endswith("\n"))
        return started[-1]

    def results(place, part, *folders):
        yield from [{"name": "CPU", "torch": "2", "count": 1}] if part == "facts" else hanging(place, part)

    hanging = gpu_check.results

    def pause(place, *runs):
        clock[0] += 3
        real_pause(place, *runs)

    clock, real_pause = [0.0], gpu_check.pause  # each pause takes three seconds
    monkeypatch.setattr(gpu_check, "now", lambda: clock[0])
    monkeypatch.setattr(gpu_check, "POLL_S", 0.001)
    monkeypatch.setattr(gpu_check, "pause", pause)
    monkeypatch.setattr(gpu_check, "start", start_hanging)
    monkeypatch.setattr(gpu_check, "results", results)
    checks = [c for c in gpu_check.CHECKS if c.group == "first"]
    raises = gpu_check.Check("raises", "first", 10, partial(getattr, name="no such attribute"))
    (tmp_path / "out").mkdir()
    place = gpu_check.Place(tmp_path, "cpu", zygote, nanogpt=tmp_path, out=tmp_path / "out")
    lines = gpu_check.measure(place, [raises, *checks], 540)
    assert gpu_check.now() < 540
    assert all(line.passed is False for line in lines)
    said = {line.check: (line.found, line.at_s) for line in lines}  # the last line of each
    assert [*said] == ["raises", *(c.name for c in checks)]
    texts = [text.partition(":")[0] for text, _ in said.values()]
    assert texts[0] == "TypeError" and {*texts[1:]} <= {"TimeoutError", "not done in its time", "not tried"}
    assert table(tmp_path) == [vars(line) for line in lines]
    # each had its share of the time, and what one leaves is for those after it
    ends = [at_s for _, at_s in said.values()]
    for c, began, end in zip(checks, ends, ends[1:], strict=False):
        assert abs(end - began - c.seconds) < 0.1 * c.seconds + 5, c.name
    pids = [int(run.text().split()[-1]) for run in started] + [pid for run in started for pid in run.pids]
    wait_for(lambda: not any(map(is_running, pids)))


def test_a_forked_run_may_use_a_gpu(zygote, tmp_path):
    """Red with a wheel of torch for CUDA if an import of the zygote asks the driver."""
    (tmp_path / "asks.py").write_text(
        "import torch\nprint(torch.cuda._is_in_bad_fork(), torch.cuda.is_available)"
    )
    text = zygote.start([], tmp_path, script=tmp_path / "asks.py").wait().text()
    assert text.startswith("False <function is_available")


def test_settings_of_the_checks_exist():
    for c in gpu_check.CHECKS:
        flags = getattr(c.lines, "keywords", {}).get("flags", "")
        if gpu_check.exists(c.needs):
            accepted("train.py", *flags.split())
    assert gpu_check.exists("zero") and not gpu_check.exists("no_such_setting")
    assert sum(c.seconds for c in gpu_check.CHECKS if c.group == "first") <= 540


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["wrong"], "no such check: wrong; choose from first, "),
        (["--seconds=-5"], "--seconds=-5: set it to a number above 0"),
        (["--seconds=nan"], "--seconds=nan: set it to a number above 0"),
        (["--out=file"], "--out=file: File exists"),
        (["--nanogpt=none"], "none is not a clone of nanoGPT"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, capsys, args, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--device=cpu", *args])
    with pytest.raises(SystemExit) as exit:
        gpu_check.main()
    assert exit.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGALRM"])
def test_a_kill_leaves_the_table_and_no_process(tmp_path, signal_name):
    (tmp_path / "train.py").write_text(HANGS)
    process = start(tmp_path, "--device=cpu", "cold", "nanogpt", f"--nanogpt={tmp_path}")
    # gpu_check.py, the zygote, nanoGPT and what it has started; train.py, before it, has started git
    wait_for(
        lambda: (len(table(tmp_path)) == 3 and len(tree(process.pid)) == 4) or process.poll() is not None, 300
    )
    pids = tree(process.pid)
    process.send_signal(signal.Signals[signal_name])
    output, errors = process.communicate(timeout=60)
    lines = table(tmp_path)
    assert len(lines) == 3 and process.returncode != 0, output + errors
    assert (tmp_path / "out/table.md").read_text().count("\n") == len(lines) + 4
    wait_for(lambda: not any(map(is_running, pids)))
    if signal_name == "SIGALRM":
        assert "ended by SIGALRM" in errors and not [*tmp_path.glob("isogpt-gpu-check-*")]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(2 * sum(check.seconds for check in gpu_check.CHECKS))  # more than that of slow tests
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_check_passes_on_a_gpu(tmp_path):
    check(tmp_path)
