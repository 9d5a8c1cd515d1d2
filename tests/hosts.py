"""
Several machines, each a network namespace with its own name, address and cable (Linux, root, iproute2), whose
rate can be limited.
"""

import json
import os
import shutil
import subprocess
import sys

from runs import REPO

HAS_NAMESPACES = sys.platform == "linux" and os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")


def ip(*words, ok=True):
    run = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert run.returncode == 0 or not ok, f"ip {' '.join(words)}: {run.stderr}"
    return run.stdout


class Hosts:
    """
    h1, h2, ... at 10.77.0.N on a switch. Each resolves its own name to a loopback address, as on Debian.
    """

    def __init__(self, work, number):
        self.work, self.tag, self.logs = work, f"iso{os.getpid()}", {}
        self.spaces = {f"h{i}": f"{self.tag}h{i}" for i in range(1, number + 1)}
        try:
            self.build()
        except BaseException:
            self.close()
            raise

    def build(self):
        """Make the namespaces and their links."""
        switch = f"{self.tag}sw"
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "switch", "type", "bridge")
        ip("-n", switch, "link", "set", "switch", "up")
        for i, (host, space) in enumerate(self.spaces.items(), 1):
            ip("netns", "add", space)
            ip("link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", host, "netns", switch)
            ip("-n", switch, "link", "set", host, "master", "switch", "up")
            ip("-n", space, "addr", "add", f"10.77.0.{i}/24", "dev", "eth0")
            # a second interface, which leads nowhere
            ip("-n", space, "link", "add", "backup", "type", "veth", "peer", "name", "nowhere")
            ip("-n", space, "addr", "add", f"192.168.9.{i}/24", "dev", "backup")
            for link in ("lo", "eth0", "backup", "nowhere"):
                ip("-n", space, "link", "set", link, "up")
            folder = f"/etc/netns/{space}"
            os.makedirs(folder, exist_ok=True)
            names = [f"10.77.0.{j} {other}" for j, other in enumerate(self.spaces, 1) if other != host]
            with open(f"{folder}/hosts", "w") as f:
                local = ["127.0.0.1 localhost", f"127.0.1.1 {host}"]
                f.write("\n".join([*local, *names]) + "\n")

    def start(self, host, command, env=None, mount="true"):
        """
        Run a command on this host, on one core, with its output in a file. `mount` is a shell command that
        runs before it, whose mounts only this process sees.
        """
        cores = sorted(os.sched_getaffinity(0))
        on_core = ["taskset", "-c", str(cores[list(self.spaces).index(host) % len(cores)])]
        env = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} | (env or {})  # docs/launchers.md
        there = f"ip netns exec {self.spaces[host]} unshare --uts --mount sh -c".split()
        there.append(f'hostname {host} && {mount} && exec "$@"')
        self.logs[host] = self.work / f"{host}.txt"
        with open(self.logs[host], "a") as log:
            streams = {"stdout": log, "stderr": log, "start_new_session": True}
            return subprocess.Popen([*there, "sh", *on_core, *command], cwd=self.work, env=env, **streams)

    def train(self, args, own=None):
        """
        Start train.py as one process on each host, without a launcher; returns {host: process}. `own`: what
        differs on a host, (arguments, `mount`).
        """
        shared = {"WORLD_SIZE": str(len(self.spaces)), "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500"}
        shared |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "PYTHONUNBUFFERED": "1"}
        started = {}
        for i, host in enumerate(self.spaces):
            more, mount = (own or {}).get(host, ([], "true"))
            command = [sys.executable, str(REPO / "train.py"), *args, *more]
            started[host] = self.start(host, command, shared | {"RANK": str(i)}, mount)
        return started

    def limit(self, rate):
        """
        Let each host send at this rate at most, such as 100mbit, with a queue of 50 ms; None: without a
        limit.
        """
        shape = ["noqueue"]
        if rate:  # a burst holds one packet before segmentation; with less than 256kb, 1gbit was not reached
            burst = "256kb" if rate.endswith("gbit") else "64kb"
            shape = ["tbf", "rate", rate, "burst", burst, "latency", "50ms"]
        for space in self.spaces.values():
            command = ["tc", "-n", space, "qdisc", "replace", "dev", "eth0", "root", *shape]
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode:
                raise ValueError(f"no link with a rate of {rate!r}: {run.stderr.strip()}")

    def sent(self, host):
        """Bytes that have left this host, with headers."""
        (link,) = json.loads(ip("-n", self.spaces[host], "-json", "-stats", "link", "show", "eth0"))
        return link["stats64"]["tx"]["bytes"]

    def cable(self, host, state):
        ip("-n", f"{self.tag}sw", "link", "set", host, state)

    def kill(self, host):
        """Power off: no more packets leave the host."""
        self.cable(host, "down")
        self.kill_all(host)

    def kill_all(self, host):
        """End the processes of this host."""
        pids = ip("netns", "pids", self.spaces[host], ok=False).split()
        subprocess.run(["kill", "-9", *pids], capture_output=True)

    def text(self, host):
        return self.logs[host].read_text(errors="replace")

    def end(self):
        """End all processes."""
        for host in self.spaces:
            self.kill_all(host)

    def close(self):
        self.end()
        for space in self.spaces.values():
            ip("netns", "delete", space, ok=False)
            shutil.rmtree(f"/etc/netns/{space}", ignore_errors=True)
        ip("netns", "delete", f"{self.tag}sw", ok=False)
