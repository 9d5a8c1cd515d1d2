"""The traffic in metrics.jsonl, and slow links: machines are network namespaces (Linux, root, iproute2)."""

import re
import socket
import subprocess
import sys

import pytest
from hosts import HAS_NAMESPACES, Hosts, ip
from runs import REPO, TINY, column

from isogpt.speed.bytes_sent import BytesSent, bytes_by_socket

needs_namespaces = pytest.mark.skipif(not HAS_NAMESPACES, reason="needs Linux, root and iproute2")
MODES = {
    "ddp": [],
    "zero 3": ["--zero=3"],
    "tp": ["--tp=2"],
    "fp16": ["--grad_compression=fp16"],
    "int8": ["--grad_compression=int8"],
    "sign": ["--grad_compression=sign"],
    "topk": ["--grad_compression=topk:0.05"],
    "powersgd": ["--grad_compression=powersgd:4"],
    "islands": ["--islands=2", "--local_steps=4"],
    "streams": ["--islands=2", "--local_steps=4", "--outer_parts=2", "--outer_compression=int8"],
}


@pytest.fixture
def connection():
    """Both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as here, server.accept()[0] as there:
            yield here, there


def exchange(here, there, size):
    here.sendall(bytes(size))
    while size:
        size -= len(there.recv(size))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the bytes of a connection")
def test_bytes_of_new_closed_and_idle_connections(connection):
    exchange(*connection, 1000)
    traffic = BytesSent(2)
    assert traffic.is_counted and traffic.per_step(True) == 0, "1,000 bytes were sent before"
    exchange(*connection, 300)
    assert traffic.per_step(False) == 0 and traffic.per_step(False) == 0
    assert traffic.per_step(True) == 100, "over three steps"
    exchange(*connection, 40)
    with traffic.paused():
        exchange(*connection, 5000)
    assert traffic.per_step(True) == 40
    connection[0].close()
    # its descriptors may be those of the closed socket
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as here, server.accept()[0] as there:
            exchange(here, there, 70)
            exchange(there, here, 7)
            copy = here.dup()
            assert traffic.per_step(True) == 77
            copy.close()
    assert traffic.per_step(True) == 0


def test_no_count_with_one_process_or_on_a_different_system(monkeypatch):
    monkeypatch.setattr("isogpt.speed.bytes_sent.LIBC", None)
    assert bytes_by_socket() == {}
    for world_size in (1, 2):
        traffic = BytesSent(world_size)
        with traffic.paused():
            assert not traffic.is_counted
        assert str(traffic.per_step(True)) == "nan"


@needs_namespaces
@pytest.mark.parametrize(
    "modes",
    [
        pytest.param(["ddp", "zero 3", "tp", "int8", "topk", "islands"], marks=pytest.mark.extra),
        pytest.param(["fp16", "sign", "powersgd", "streams"], marks=pytest.mark.extra),
    ],
    ids=["some", "others"],
)
def test_the_traffic_is_what_leaves_the_machine(work, modes):
    """
    Within 5%, since the interface counts headers and acknowledgements too: a long run's bytes less a short
    one's.
    """
    model = ["--n_embd=256", "--n_head=4", "--vocab_size=256", "--save_checkpoint=False"]
    hosts, steps, ratios = Hosts(work, 2), (3, 23), {}
    try:
        for mode in modes:
            sent = []
            for last in steps:
                before = sum(map(hosts.sent, hosts.spaces))
                out = f"{mode} {last}"
                run = hosts.train([*TINY, *model, *MODES[mode], f"--max_iters={last}", f"--out_dir={out}"])
                assert [process.wait(120) for process in run.values()] == [0, 0], "".join(
                    map(hosts.text, hosts.spaces)
                )
                sent.append(sum(map(hosts.sent, hosts.spaces)) - before)
            on_the_wire = (sent[1] - sent[0]) / len(hosts.spaces)
            logged = sum(n for step, n in column(work / out, "bytes_sent").items() if step > steps[0])
            ratios[mode] = on_the_wire / logged
    finally:
        hosts.close()
    print(ratios)
    # rank 0's messages to its own store are logged, but do not leave the machine
    assert all(0.95 < ratio < 1.05 for ratio in ratios.values()), ratios


@pytest.mark.slow
@needs_namespaces
def test_a_run_over_slow_links(work):
    """The curve is that of one machine, and a step of DDP sends each gradient once."""
    args = [*TINY, f"--dataset={work / 'data' / 'tiny'}", "--max_iters=5"]
    command = [
        sys.executable,
        str(REPO / "measure" / "slow_network.py"),
        "--rate=100mbit",
        "--hosts=2",
        "--",
        *args,
    ]
    run = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    (megabytes,) = re.findall(
        r"^6 steps on 2 hosts at 100mbit: median [\d.]+ ms, ([\d.]+) MB sent", run.stdout, re.M
    )
    losses = [float(loss) for loss in re.search(r"^losses: (.+)$", run.stdout, re.M)[1].split()]
    assert len(losses) == 6 and losses[0] > losses[-1]
    parameters = 65 * 32 + 32 * 32 + 2 * (12 * 32**2 + 2 * 32) + 32
    assert float(megabytes) == pytest.approx(4 * parameters / 1e6, rel=0.05)
    with subprocess.Popen([*command, "--n_head=3"], cwd=work, stderr=subprocess.PIPE, text=True) as failed:
        assert "error: h1: n_embd is 32" in failed.communicate(timeout=300)[1]
    assert failed.returncode == 1 and f"iso{failed.pid}" not in ip("netns", "list"), (
        "no hosts are left behind"
    )
