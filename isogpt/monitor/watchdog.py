"""The watchdog, which names a rank that failed or hung."""

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import torch.distributed as dist

from isogpt.checkpoint.progress import Progress
from isogpt.checkpoint.save import Saver
from isogpt.common import console
from isogpt.launch import network
from isogpt.launch.launchers import has_lost_agent
from isogpt.launch.process_group import Ranks, rank_names
from isogpt.monitor.log import Logger
from isogpt.speed.clock import Clock

if TYPE_CHECKING:
    from isogpt.monitor.out_of_memory import MemoryUse

STORE_TIMEOUT_S = 5
SILENT_S = 8  # seconds of silence after which a rank whose process has exited counts as failed


@dataclass
class Silence:
    """How long a rank has written no new position."""

    last: str | None = None  # what it wrote last
    seconds: int = 0  # counted, not timed: a job that was suspended as a whole has missed nothing

    def is_too_long(self, now: str | None, timeout_s: float) -> bool:
        """
        Read what the rank has written, once a second; returns whether the rank is lost. A process that was
        suspended, for instance while its machine moves, looks like a machine without power: both get
        timeout_s. A process that has exited on this machine does not come back.
        """
        self.seconds = self.seconds + 1 if now and now == self.last else 0
        self.last = now
        if self.seconds < SILENT_S:
            return False
        return self.seconds >= timeout_s or network.has_exited(json.loads(now)[2])


@dataclass
class Watchdog:
    """
    Two threads that watch this rank and its neighbors.

    One thread writes the position of this rank to the store four times a second, and checks that the ranks
    before and after this rank do the same. The other thread ends the process if the main thread makes no
    progress for timeout_s in a step, for instance in a hung collective. After a different rank has failed, a
    moment without progress is enough. Gloo notices a lost connection, NCCL does not. A store that does not
    respond is a failure, too, but not if it has ended with torchrun's agent: then the ranks are saving, see
    process_group.stop_with_launcher.

    With a single process there is no store and nothing to watch, but the crash hook uses the same report.

    It begins before there are a clock and a saver; train.py sets these when they exist.
    """

    ranks: Ranks
    timeout_s: float
    progress: Progress
    logger: Logger
    store: dist.Store | None = None
    clock: Clock | None = None  # None: the run starts, and its steps are not timed yet
    saver: Saver | None = None  # None: there is no checkpoint yet
    memory_use: "MemoryUse | None" = None  # explains running out of memory; None: a traceback does
    has_failed: bool = False  # whether a different rank has failed
    silent: list[int] = field(default_factory=list)
    reported: threading.Lock = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self, store: dist.Store) -> None:
        """Begin to watch, through a store that reaches all ranks."""
        self.store = store
        # two threads: if the network is cut, a request to the store may never return
        self.threads = [threading.Thread(target=target, daemon=True) for target in (self.beat, self.watch)]
        for thread in self.threads:
            thread.start()

    def position(self) -> tuple[int, str]:
        """Return (a number that grows with each part of a step, where the main thread is)."""
        count, doing = (self.clock.count, self.clock.doing) if self.clock else (0, "the start")
        return count, f"step {self.progress.step}, {doing}"

    def watch(self) -> None:
        """End the process if there is no progress for timeout_s."""
        last, since = None, time.monotonic()
        while not self.over.wait(0.5):
            now = self.position()
            if now != last:
                last, since = now, time.monotonic()
            patience = 3.0 if self.has_failed else self.timeout_s
            is_in_step = self.clock is not None and self.clock.expects_progress
            if (is_in_step or self.has_failed) and time.monotonic() - since > patience:
                hang = f"no progress for {self.timeout_s:g} s"
                self.report("a different rank has failed" if self.has_failed else hang)
                self.finish_checkpoint()
                os._exit(1)

    def beat(self) -> None:
        """Write the position of this rank to the store, and read those of its neighbors, until the end."""
        process, reached = network.this_process(), time.monotonic()
        # two neighbors: only a rank of the same machine can see that a process has exited
        neighbors = {(self.ranks.rank + step) % self.ranks.world_size: Silence() for step in (1, -1)}
        for number in count():
            with suppress(Exception):  # the store ends with rank 0 or with the agent
                self.store.set(f"beat/{self.ranks.rank}", json.dumps([number, self.position()[1], process]))
                if number % 4 == 0:
                    for rank, silence in neighbors.items():
                        is_lost = silence.is_too_long(self.read(f"beat/{rank}"), self.timeout_s)
                        if is_lost and not self.store.check([f"left/{rank}"]):
                            self.store.set("failed", "")
                    self.has_failed = self.store.check(["failed"])
                reached = time.monotonic()
            # only if requests fail: a store that is suspended answers them later
            if time.monotonic() - reached > SILENT_S and not has_lost_agent(self.ranks.launch):
                self.has_failed = True
            if self.over.wait(0.25):
                return

    def read(self, key: str) -> str | None:
        """Return what a rank has written to the store; None: nothing."""
        return self.store.get(key).decode() if self.store.check([key]) else None

    def read_all(self, name: str) -> list[str | None]:
        """Return what each rank has written under a name."""
        return [self.read(f"{name}/{rank}") for rank in range(self.ranks.world_size)]

    def find_silent(self) -> str:
        """
        Return which ranks do not respond and where each rank was, from two looks that are some beats apart.
        """
        names = rank_names(self.ranks.hosts)
        self.store.set(f"left/{self.ranks.rank}", "")
        self.store.set("failed", "")  # the others also report, while rank 0's store exists
        before = self.read_all("beat")
        time.sleep(1.5)
        after, errors, left = (self.read_all(name) for name in ("beat", "error", "left"))
        positions = [json.loads(beat)[1] if beat else "the start" for beat in after]
        fates = {}
        for r in range(len(names)):
            if errors[r] and left[r] is None:
                fates[r] = f"has failed ({errors[r]})"
            elif before[r] == after[r] and left[r] is None:
                fates[r] = "does not respond"
        self.silent = list(fates)
        if fates:
            return "; ".join(
                f"{names[r]} {fate}, its last position was {positions[r]}" for r, fate in fates.items()
            )
        return "all ranks respond: " + ", ".join(f"{names[r]} at {positions[r]}" for r in range(len(names)))

    def ask(self, question: Callable[[], str], wait_s: float) -> str:
        """
        Return the answer to a question that needs the store, or say within wait_s seconds that the store does
        not respond: if the store is unreachable, a request may never return.
        """
        try:
            return network.answer_of(question, wait_s)
        except Exception:  # an error of the store, or TimeoutError
            return f"the store of rank 0 or its agent at {network.store_address()} does not respond"

    def report(self, problem: str) -> None:
        """Print once what is wrong and which rank is the cause."""
        if not self.reported.acquire(blocking=False):
            time.sleep(25)  # the other thread is reporting, and then ends the process
            return
        names = rank_names(self.ranks.hosts)
        cause = self.ask(self.find_silent, 6 + len(names) / 50) if self.store else ""
        text = f"{names[self.ranks.rank]} at {self.position()[1]}: {problem}; {cause}"
        console.print_to_stderr(f"error: {text}")
        # in a thread: if the file system of metrics.jsonl is the cause, writing does not return either
        self.ask(partial(self.logger.failed, text), 15)
        self.let_others_finish()

    def let_others_finish(self) -> None:
        """
        Say that this rank has reported. On rank 0, which may serve the store that the other ranks are asking,
        wait until they have reported too, for at most 4 seconds.
        """
        if self.store:
            self.ask(self.wait_for_reports, 5)

    def wait_for_reports(self) -> str:
        """`let_others_finish` with a store."""
        self.store.set(f"reported/{self.ranks.rank}", "")
        others = [f"reported/{r}" for r in range(self.ranks.world_size) if r not in self.silent]
        end = time.monotonic() + 4
        while self.ranks.is_main and not self.store.check(others) and time.monotonic() < end:
            time.sleep(0.05)
        return ""

    def is_first(self, problem: str) -> bool:
        """
        Return whether no other rank has asked this about a problem before: many ranks may meet the same
        problem, and one rank explains it. Also True if the store does not respond.
        """
        if not self.store:
            return True
        number = self.ask(lambda: str(self.store.add(f"first/{problem}", 1)), STORE_TIMEOUT_S)
        return number == "1" or not number.isdigit()

    def finish_checkpoint(self) -> None:
        """Wait for a checkpoint under way if this rank can complete the checkpoint alone."""
        if self.saver and self.saver.writes_alone():
            self.saver.wait_alone()

    def announce(self, key: str, value: str = "") -> None:
        """
        Tell the other ranks that the run has failed here (key "failed"), why (key "error/N"), or that rank N
        has left (key "left/N").
        """
        if self.store:
            self.ask(partial(self.store.set, key, value), STORE_TIMEOUT_S)

    def stop(self) -> None:
        """Tell the other ranks that this rank leaves, and stop watching, before the store ends."""
        self.announce(f"left/{self.ranks.rank}")
        self.over.set()
        for thread in self.threads:
            thread.join(2)
