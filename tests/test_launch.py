"""Devices, dtypes, torch.compile; how processes meet, what they know, and what they do together."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from runs import REPO, column, default_plan, free_port, listening, wait_for

from isogpt.launch import network
from isogpt.launch.device import pick_device
from isogpt.launch.process_group import Ranks, connect_ranks
from isogpt.launch.start_checks import check_start
from isogpt.launch.together import exit_together, wait_together
from isogpt.speed.devices import find_peak
from isogpt.training import precision

CPU = torch.device("cpu")

# a script for processes that a launcher has started, as the lines that follow it continue
RANK = f"""
import json, os, resource, socket, sys, time
from pathlib import Path
sys.path.insert(0, {str(REPO)!r})
import isogpt.launch.torch_import  # gloo connects on demand, as in train.py
import torch
import torch.distributed as dist
from isogpt.launch.process_group import connect_ranks, rank_names
from isogpt.launch.together import exit_together
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def leave_together(name):  # before rank 0 leaves, whose store the others read
    Path(f"{{name}}.{{rank}}").touch()
    while len([*Path().glob(f"{{name}}.*")]) < size:
        time.sleep(0.01)
"""


def start_ranks(zygote, folder, nproc, code, *args, **kw):
    """Start processes that run this code; see Zygote.start."""
    (folder / "rank.py").write_text(RANK + code)
    return zygote.start(args, folder, nproc, script="rank.py", repo=folder, **kw)


MEETS = """
import isogpt.launch.torch_import
from isogpt.launch.process_group import meet_ranks
try:
    meet_ranks(1, 3, "", 60)
except ValueError as error:
    print(error)
"""


def test_a_rank_that_starts_while_a_launcher_ends_rank_0_says_so_in_one_line():
    """In a new process, since torch reads the level of its log when it is imported."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    words, both = [sys.executable, "-c", MEETS], {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(words, cwd=REPO, env=os.environ | ranks, text=True, **both) as process:
        wait_for(lambda: store.check(["start None/process/1"]))
        store = None  # rank 0 has ended
        said = r"cannot reach the other ranks at 127.0.0.1:\d+ within 60 s: .*, type unset RANK\n"
        assert re.fullmatch(said, process.communicate()[0])


# ------------------------------------------------------------------------------------------------------------
# what grows with the ranks: what docs/scaling.md names


# what a process asks of the store until it knows the others, and the files that are then open
ASKS = """
answered = []
def counted(ask):
    def request(*arguments):
        answer = ask(*arguments)
        answered.append(sum(map(len, answer)) if isinstance(answer, list) else len(str(answer)))
        return answer
    return request
for name in ("get", "multi_get", "wait"):
    setattr(dist.PrefixStore, name, counted(getattr(dist.PrefixStore, name)))
before = len(os.listdir("/proc/self/fd"))
ranks = connect_ranks("cpu", "auto", 60)
asked, number = len(answered), torch.ones(1)
dist.init_process_group(ranks.backend, **ranks.group_options(60))
dist.all_gather([torch.empty(1) for _ in range(size)], number)
dist.all_reduce(number)
dist.broadcast(number, 0)
print(asked, sum(answered[:asked]), len(os.listdir("/proc/self/fd")) - before)
leave_together("known")
"""


def test_ranks_know_each_other_by_few_bytes_and_connections(zygote, tmp_path):
    """
    Every rank used to read every rank's cores: bytes grew with the square of the ranks. In the full mesh of
    gloo's default, a rank has N - 1 sockets, and asks for as many addresses.
    """
    read, files = [], []
    for size in (4, 16):
        (tmp_path / str(size)).mkdir()
        lines = start_ranks(zygote, tmp_path / str(size), size, ASKS).wait().text().splitlines()
        requests, of_each, opened = zip(*(map(int, line.split()) for line in lines), strict=True)
        assert {*requests} == {1}
        read.append(sum(of_each))
        files.append(sum(opened) / size)
    assert 2 * read[0] < read[1] < 8 * read[0]
    assert files[1] <= files[0] + 1


# ------------------------------------------------------------------------------------------------------------
# devices, dtypes, torch.compile


def as_rank(at, rank, world_size, port, **more):
    """Set torchrun's variables."""
    variables = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    for name, value in (variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} | more).items():
        at.env(name, str(value))


def test_device_choice(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device("auto", 0, 1).type == "mps"
    assert pick_device("auto", 1, 2).type == "cpu", "mps has no collectives"
    for wrong in ("cuda", "cuda:0", "mps", "tpu", "cuda:x"):
        with pytest.raises(ValueError, match=f"^device is '{wrong}', which is not available here: set --dev"):
            pick_device(wrong, 0, 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("auto", 1, 2) == torch.device("cuda:1")
    assert pick_device("cuda:0", 1, 2) == torch.device("cuda:1"), "each process has its own GPU"
    assert pick_device("cuda:1", 0, 1) == torch.device("cuda:1")
    assert pick_device("cuda", 2, 4) == torch.device("cuda:0"), "of the two that this process sees"


def test_gloo_communicates_for_gpus_where_there_is_no_nccl(at):
    for name, value in {"is_available": True, "device_count": 1, "set_device": None}.items():
        at.set(torch.cuda, name, lambda *args, value=value: value)
    at.set(dist, "is_nccl_available", lambda: False)
    at.env("GLOO_SOCKET_IFNAME", "lo")
    for backend in ("auto", "nccl"):
        assert connect_ranks("cuda", backend, 1).backend == "gloo"
    as_rank(at, 0, 2, free_port())
    with pytest.raises(ValueError, match="^backend 'nccl' needs GPUs and"):
        connect_ranks("cuda", "nccl", 1)


def test_dtype_choice(monkeypatch):
    """A dtype that the CPU only emulates is noted."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"sse2": True, "avx512_bf16": True})
    assert precision.resolve_dtype("auto", CPU) == "bfloat16"
    kept = precision.resolve_dtype("auto", CPU, previous="float32")
    assert kept == "float32", "a resumed run keeps its dtype"
    assert precision.resolve_dtype("auto", CPU, previous="tf32") == "bfloat16", "unless this device lacks it"
    assert precision.resolve_dtype("float16", CPU, previous="float32") == "float16"
    changed = "this run continues with dtype float32 (was bfloat16): the loss curve changes"
    assert precision.set_up(CPU, default_plan(dtype="float32"), False, "bfloat16") == [changed]
    assert precision.set_up(CPU, default_plan(dtype="bfloat16"), False, None) == []
    (note,) = precision.set_up(CPU, default_plan(dtype="float16"), False, "float16")
    assert note == "this CPU only emulates float16, which is slow: set --dtype=bfloat16"
    assert not precision.is_emulated("float16", torch.device("cuda"))
    # with the speed of an emulated matmul, mfu would be above 100%: the model's kernels compute in float32
    assert find_peak(CPU, "float16").source == "measured matmul in float32"
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    assert precision.resolve_dtype("auto", CPU) == "float32"
    assert precision.common_dtype(["bfloat16", "float32"]) == "float32"


# on the second of two ranks, nothing can be compiled
UNCOMPILED = """
from isogpt.parallel.compilation import compile_note
from dataclasses import replace
from isogpt.parallel.plan import UNDIVIDED
dist.init_process_group("gloo")
ones = torch.ones
torch.ones = lambda *args, device, **options: ones(*args, **options)
def compile(function):
    if rank:
        raise RuntimeError("no C compiler\\nand more")
    return function
torch.compile = compile
for device in ("cpu", "xpu"):
    print(compile_note(torch.device(device), replace(UNDIVIDED, compile=True)))
"""


def test_a_compilation_that_fails_on_one_rank_is_skipped_on_all(zygote, tmp_path):
    lines = start_ranks(zygote, tmp_path, 2, UNCOMPILED).wait().text().splitlines()
    cpu, fails = "compile: off, since it gains nothing on a CPU", "compile: fails on this machine, going on "
    assert lines == [cpu, f"{fails}without it (slower): RuntimeError: no C compiler"] * 2


def test_mfu_uses_the_peak_of_this_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda d: "NVIDIA H100 80GB HBM3")
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    gpu = torch.device("cuda", 0)
    assert find_peak(gpu, "bfloat16") == (989e12, "data sheet") and find_peak(gpu, "tf32").flops == 989e12 / 2


def test_a_resume_needs_no_more_memory(zygote, work):
    """The checkpoint is memory-mapped and freed: a resumed run's peak is that of a new run."""
    big = ["--n_layer=4", "--n_embd=512", "--n_head=4", "--max_iters=2", "--batch_size=1"]  # 12.6M parameters
    zygote.train([*big, "--out_dir=out"], work)
    fresh = max(column(work / "out", "memory_gb").values())
    zygote.train([*big, "--out_dir=out", "--init_from=resume", "--max_iters=5"], work)
    resumed = column(work / "out", "memory_gb")[5]
    state = sum(p.stat().st_size for p in (work / "out").glob("step_00000003/ckpt.pt")) / 1e9
    assert resumed < fresh + 0.75 * state, (fresh, resumed, state)


# ------------------------------------------------------------------------------------------------------------
# rendezvous


# two machines, whose ranks mpirun --map-by node has interleaved; the ranks of one share their cores
INTERLEAVED = """
socket.gethostname = lambda: "ab"[rank % 2]
os.sched_getaffinity = lambda pid: ([0, 1, 2, 3], [0, 1], [0, 1, 2, 3], [2, 3])[rank]
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
for process in (os.getpid(), os.getppid()):  # torchrun may serve the store
    resource.prlimit(process, resource.RLIMIT_NOFILE, (64, most))
ranks = connect_ranks("cpu", "auto", 60)
soft = {resource.prlimit(process, resource.RLIMIT_NOFILE)[0] for process in (os.getpid(), os.getppid())}
facts = [rank, ranks.rank, int(os.environ["RANK"]), torch.get_num_threads(), len(ranks.launch.agents)]
facts += [ranks.hosts, ranks.machines, ranks.network, rank_names(ranks.hosts), soft == {most}]
print(json.dumps(facts))
leave_together("known")
"""


def test_a_number_of_threads_that_a_user_has_chosen_stays(zygote, tmp_path):
    """
    torchrun sets OMP_NUM_THREADS to 1, so this is nobody's choice, and ranks divide the cores. So they do if
    OpenMP ignores it.
    """
    code = """
os.sched_getaffinity = lambda pid: range(8)
os.environ["OMP_NUM_THREADS"] = sys.argv[1]
torch.set_num_threads(int(sys.argv[2]))  # as torch does when it is imported
ranks = connect_ranks("cpu", "auto", 60)
print(torch.get_num_threads())
leave_together("known")
"""
    for chosen, at_import, threads in (("3", 3, 3), ("1", 1, 4), ("1.0", 8, 4), ("0", 8, 4)):
        (tmp_path / chosen).mkdir()
        run = start_ranks(zygote, tmp_path / chosen, 2, code, chosen, at_import).wait()
        assert run.text().split() == [str(threads)] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux's")
def test_cores_are_those_of_the_container(monkeypatch):
    """docker run --cpus limits the time, not the cores that a process sees."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(2, 10)})
    for limit, cores in (("max 100000", 8), ("300000 100000", 3), ("50000 100000", 1), ("9900000 100000", 8)):
        monkeypatch.setattr(network.Path, "read_text", lambda path, limit=limit: f"{limit}\n")
        assert network.usable_cores() == cores
    for quota_us, cores in (("-1", 8), ("300000", 3)):  # control groups of version 1, as on RunPod
        files = {"cpu.cfs_quota_us": quota_us, "cpu.cfs_period_us": "100000"}
        monkeypatch.setattr(network.Path, "read_text", lambda path, files=files: files.get(path.name, ""))
        assert network.usable_cores() == cores
    threads = torch.get_num_threads()
    monkeypatch.setattr(network.Path, "read_text", lambda path: "100000 100000\n")
    for name in ("RANK", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # undone when the test ends
        monkeypatch.delenv(name)
    try:
        connect_ranks("cpu", "auto", 1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores cannot be assigned")
def test_a_process_keeps_its_cores_when_openmp_binds_its_threads():
    """Many clusters set OMP_PROC_BIND: a process computed with one thread, on its first core."""
    code = "import os; before = os.sched_getaffinity(0); import isogpt.launch.torch_import; "
    code += "assert os.sched_getaffinity(0) == before"
    bound = os.environ | {"OMP_PROC_BIND": "true"}
    subprocess.run([sys.executable, "-c", code], cwd=REPO, env=bound, check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="prlimit is Linux's")
def test_ranks_know_each_other(zygote, tmp_path):
    """Those of a machine are neighbors, and those that share cores divide them. Each may open many files."""
    env = {"TORCHELASTIC_RUN_ID": "none"}
    run = start_ranks(zygote, tmp_path, 4, INTERLEAVED, env=env).wait()
    of_each = sorted(json.loads(line) for line in run.text().splitlines())
    # the launcher's number, the own one, of torch's threads, and of torchrun's agents
    numbers = [[0, 0, 0, 2, 2], [1, 2, 2, 2, 1], [2, 1, 1, 2, 1], [3, 3, 3, 2, 1]]
    assert [facts[:5] for facts in of_each] == numbers
    names = ["rank 0 (a)", "rank 1 (a)", "rank 2 (b)", "rank 3 (b)"]
    for *_, hosts, machines, over, named, may_open in of_each:
        assert hosts == ["a", "a", "b", "b"] and machines == [0, 0, 1, 1] and named == names and may_open
        assert over == "gloo over an interface of its choice", "no machine has told an address of a route"


# the first two of three processes see the same GPU
SHARED_GPU = """
from types import SimpleNamespace
dist.is_nccl_available = torch.cuda.is_available = lambda: True
torch.cuda.device_count, torch.cuda.set_device = lambda: 1, lambda device: None
torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=f"GPU-{max(1, rank)}")
for port, backend in zip(sys.argv[1:], ("auto", "gloo")):
    os.environ["MASTER_PORT"] = port
    try:
        ranks = connect_ranks("cuda", backend, 60)
        print(ranks.backend)
    except ValueError as e:
        print(e)
        leave_together("refused")
leave_together("known")
"""


def test_ranks_that_share_a_gpu_are_refused(zygote, tmp_path):
    """NCCL would fail with C++ frames. gloo communicates for them."""
    run = start_ranks(zygote, tmp_path, 3, SHARED_GPU, free_port(), free_port()).wait()
    *refused, _, _, _ = lines = sorted(run.text().splitlines(), reverse=True)
    assert lines[3:] == ["gloo"] * 3 and len(refused) == 3
    assert all(line.startswith("rank 0, 1 share GPUs: ") for line in refused)


def test_the_store_of_one_machine_is_not_open_to_others(at):
    # mpirun and DeepSpeed, torchrun, Kubeflow: its name for the first of several pods
    cases = [("127.0.0.1", 1, False), ("localhost", 2, False), ("localhost", 1, True)]
    if socket.has_ipv6 and Path("/proc/net/if_inet6").exists():
        cases.append(("::1", 2, False))
    for master, local_size, is_open in cases:
        port = free_port()
        as_rank(at, 0, 2, port, MASTER_ADDR=master, LOCAL_WORLD_SIZE=local_size)
        store = network.connect_store(5, serves=True)
        store.set("key", "value")
        (address,) = (address for address, served in listening(os.getpid()) if served == port)
        assert (address in ("::", "0.0.0.0")) == is_open, address


def test_missing_ranks_are_named(at, capfd):
    """The error says what to type, in a sentence without C++ frames."""
    for rank, problem in ((0, "rank 1, 2 of 3 did not join"), (1, ".*[Cc]onnection refused")):
        as_rank(at, rank, 3, free_port())
        with pytest.raises(ValueError, match=f"^cannot reach .* within 1 s: {problem}.*type unset RANK$"):
            connect_ranks("cpu", "gloo", 1)
    assert not capfd.readouterr().err


@pytest.mark.slow
def test_a_store_that_does_not_answer_is_named(at):
    """The port of a different program, rank 0 is suspended, its cable is cut: requests never return."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        as_rank(at, 1, 2, silent.getsockname()[1])
        with pytest.raises(ValueError, match="cannot reach .* no answer within 10.5 s"):
            connect_ranks("cpu", "auto", 0.5)


# ------------------------------------------------------------------------------------------------------------
# what ranks do together


def test_ranks_that_agree_gather_nothing(at):
    """Neither while they wait for a disk nor when no rank has failed."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    at.set(dist, "all_gather_object", lambda *args: pytest.fail("gathered"))
    try:
        wait_together(None)
        with exit_together():
            pass
    finally:
        dist.destroy_process_group()


def test_a_faulty_network(at, capsys):
    at.set(dist, "all_reduce", lambda t: t.fill_(1.0))
    with pytest.raises(SystemExit):
        check_start(Ranks(0, 2, CPU, "gloo"), {})
    assert "an all-reduce over 2 ranks returned 1.0: the network is faulty" in capsys.readouterr().err


def test_settings_that_differ_are_named_before_they_shape_anything(zygote, work):
    """Groups of ranks, for instance, which other ranks would never join."""
    (work / "own.py").write_text("import os\ntp = 1 + int(os.environ['RANK'])\n")
    run = zygote.train(["own.py", "--out_dir=out"], work, 2, ok=False)
    text = "error: the ranks were started with different settings: tp is 1 on rank 0, 2 on rank 1\n"
    assert set(run.codes) == {1} and run.text() == text


FAILS = """
dist.init_process_group("gloo")
with exit_together():
    if rank in FAILING:
        raise KIND
print("goes on")
"""
SAID = [  # processes, those that fail, how, and what is printed
    (10, range(1, 10), 'OSError("no disk")', "error: rank 1, 2, 3, 4, 5, 6, 7, 8 and 1 more: no disk\n"),
    (10, range(1, 10), 'OSError(f"no {rank}")', r"(error: rank \d: no \d\n){8}error: and 1 more from .*\n"),
    (3, range(3), 'KeyError("a bug")', ".*Traceback.*KeyError: 'a bug'\n"),
    (3, [2], 'KeyboardInterrupt("a\\nb")', "error: rank 2: KeyboardInterrupt: a\n.*Traceback.*"),
]


@pytest.mark.parametrize("size, failing, kind, said", SAID)
def test_an_error_in_a_shared_block_ends_all_ranks(zygote, tmp_path, size, failing, kind, said):
    """At once, in a few lines; with the traceback of the first rank that failed if it is unexpected."""
    code = FAILS.replace("FAILING", str([*failing])).replace("KIND", kind)
    run = start_ranks(zygote, tmp_path, size, code).wait(60, ok=False)
    assert all(run.codes) and re.fullmatch(said, run.text(), re.DOTALL), run.text()
    assert run.text().count("Traceback") == ("Traceback" in said)
