"""The watchdog, which names a rank that failed or hung, and the crash hook, which explains exceptions."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count

import torch.distributed as dist

from isogpt.checkpoint.progress import Progress
from isogpt.checkpoint.save import Saver
from isogpt.launch import network
from isogpt.launch.process_group import Ranks, connect_store, rank_names
from isogpt.monitor.log import Logger
from isogpt.speed.clock import Clock
from isogpt.speed.memory import OUT_OF_MEMORY

# parts of the error messages of gloo and NCCL, in lower case, after a different rank has exited
CONNECTION_LOST = (
    "closed by peer",
    "reset by peer",
    "remote peer",
    "timed out waiting",
    "connection was likely closed",
    "remote process exit",
    "ncclremoteerror",
    "ncclsystemerror",
    "broken pipe",
    "socket closed",
    "communicator was aborted",
)
STORE_TIMEOUT_S = 5
SILENT_S = 8  # seconds of silence after which a rank counts as failed, if other ranks also wait for something


@dataclass
class Watchdog:
    """
    Two threads that watch this rank and the next rank.

    One thread writes the rank's position to the store four times a second, and checks that the next rank does
    the same. The other thread ends the process if the main thread makes no progress for timeout_s while
    `armed`, for instance in a hung collective. After a different rank has failed, a moment without progress
    is enough. Gloo notices a lost connection, NCCL does not.

    With a single process there is nothing to watch, but the crash hook uses the same report.
    """

    ranks: Ranks
    timeout_s: float
    progress: Progress
    clock: Clock
    logger: Logger
    saver: Saver | None = None  # known before the first checkpoint
    default_hook: Callable | None = None  # the excepthook that ours replaced
    # disarmed while a step may take long: compilation in the first step, a slow disk at a checkpoint
    armed: bool = False
    store: dist.Store | None = None
    has_failed: bool = False  # whether a different rank has failed
    silent: list[int] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    reported: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """
        Install an excepthook that names lost ranks; connect to the store if there are other ranks; start the
        threads.
        """
        install(self, partial(explain_failure, self))
        if self.ranks.world_size == 1 or not self.ranks.store:
            return
        # a separate connection, since a request blocks all others on the same connection
        self.store = dist.PrefixStore(self.ranks.start, connect_store(self.timeout_s))
        self.store.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
        # two threads: if the network is cut, a request to the store may never return
        self.threads = [threading.Thread(target=target, daemon=True) for target in (self.beat, self.watch)]
        for thread in self.threads:
            thread.start()

    def position(self) -> tuple[int, str]:
        """(a number that grows with each part of a step, where the main thread is)."""
        return self.clock.count, f"step {self.progress.step}, {self.clock.doing}"

    def watch(self) -> None:
        """End the process if there is no progress for timeout_s."""
        last, since = None, time.monotonic()
        while not self.over.wait(0.5):
            now = self.position()
            if now != last:
                last, since = now, time.monotonic()
            patience = 3.0 if self.has_failed else self.timeout_s
            if (self.armed or self.has_failed) and time.monotonic() - since > patience:
                self.report(
                    "another rank has failed" if self.has_failed else f"no progress for {self.timeout_s:g} s"
                )
                self.finish_checkpoint()
                os._exit(1)

    def beat(self) -> None:
        """Write this rank's position to the store and read the next rank's, until the run is over."""
        next_rank = (self.ranks.rank + 1) % self.ranks.world_size
        before, unchanged, reached = None, 0, time.monotonic()
        for number in count():
            with suppress(Exception):  # the store ends with rank 0 or with the agent
                self.store.set(f"beat/{self.ranks.rank}", json.dumps([number, self.position()[1]]))
                if number % 4 == 0:
                    now = (
                        self.store.get(f"beat/{next_rank}")
                        if self.store.check([f"beat/{next_rank}"])
                        else None
                    )
                    # counted, not timed: a job that was suspended as a whole has missed no beat
                    before, unchanged = now, unchanged + 1 if now and now == before else 0
                    if unchanged >= SILENT_S and not self.store.check([f"left/{next_rank}"]):
                        self.store.set("failed", "")
                    self.has_failed = self.store.check(["failed"])
                reached = time.monotonic()
            if time.monotonic() - reached > SILENT_S:
                self.has_failed = True
            if self.over.wait(0.25):
                return

    def beats(self) -> list[tuple[int, str] | None]:
        """The last position of each rank."""
        keys = [f"beat/{rank}" for rank in range(self.ranks.world_size)]
        return [json.loads(self.store.get(key)) if self.store.check([key]) else None for key in keys]

    def errors(self) -> dict[int, str]:
        """{rank: the error that ends the rank}, for ranks that have announced an error."""
        keys = {rank: f"error/{rank}" for rank in range(self.ranks.world_size)}
        return {rank: self.store.get(key).decode() for rank, key in keys.items() if self.store.check([key])}

    def find_silent(self) -> str:
        """
        Which ranks do not respond and where each rank was: compares two looks that are some beats apart.
        """
        names = rank_names(self.ranks.hosts)
        self.store.set(f"left/{self.ranks.rank}", "")
        self.store.set("failed", "")  # the others also report, while rank 0's store exists
        before = self.beats()
        time.sleep(1.5)
        after = self.beats()
        has_left = [self.store.check([f"left/{r}"]) for r in range(len(names))]
        positions = [beat[1] if beat else "the start" for beat in after]
        fates = {
            r: "does not respond" for r in range(len(names)) if before[r] == after[r] and not has_left[r]
        }
        fates |= {r: f"has failed ({error})" for r, error in self.errors().items() if not has_left[r]}
        self.silent = sorted(fates)
        if self.silent:
            return "; ".join(
                f"{names[r]} {fates[r]}, its last position was {positions[r]}" for r in self.silent
            )
        return "all ranks respond: " + ", ".join(f"{names[r]} at {positions[r]}" for r in range(len(names)))

    def ask(self, question: Callable[[], str], wait_s: float) -> str:
        """
        Return the answer to a question that needs the store, which may be unreachable: then a request may
        never return.
        """
        try:
            return network.answer_of(question, wait_s)
        except Exception:  # an error of the store, or TimeoutError
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            return f"the store of rank 0 or its agent at {address} does not respond"

    def report(self, problem: str) -> None:
        """Print once what is wrong and which rank is the cause."""
        if not self.reported.acquire(blocking=False):
            time.sleep(25)  # the other thread is reporting, and then ends the process
            return
        names = rank_names(self.ranks.hosts)
        cause = self.ask(self.find_silent, 6 + len(names) / 50) if self.store else ""
        text = f"{names[self.ranks.rank]} at {self.position()[1]}: {problem}; {cause}"
        print(f"error: {text}", file=sys.stderr, flush=True)
        # in a thread: if the file system of metrics.jsonl is the cause, writing does not return either
        self.ask(partial(self.logger.failed, text), 15)
        if self.store:
            self.ask(self.let_others_finish, 5)

    def let_others_finish(self) -> str:
        """Rank 0, which may serve the store that the other ranks are asking, exits after them."""
        self.store.set(f"reported/{self.ranks.rank}", "")
        others = [f"reported/{r}" for r in range(self.ranks.world_size) if r not in self.silent]
        end = time.monotonic() + 4
        while self.ranks.is_main and not self.store.check(others) and time.monotonic() < end:
            time.sleep(0.05)
        return ""

    def is_first(self, problem: str) -> bool:
        """
        Whether no other rank has asked this about a problem before: many ranks may meet the same problem, and
        one rank explains it. Also True if the store does not respond.
        """
        if not self.store:
            return True
        number = self.ask(lambda: str(self.store.add(f"first/{problem}", 1)), STORE_TIMEOUT_S)
        return number == "1" or not number.isdigit()

    def finish_checkpoint(self) -> None:
        """Wait for a checkpoint under way if this rank can complete the checkpoint alone."""
        if self.saver and self.saver.writes_alone():
            self.logger.saved(self.saver.wait())

    def announce(self, key: str, value: str = "") -> None:
        """
        Tell the other ranks that the run has failed here (key "failed"), why (key "error/N"), or that rank N
        has left (key "left/N").
        """
        if self.store:
            self.ask(partial(self.store.set, key, value), STORE_TIMEOUT_S)

    def stop(self) -> None:
        """Stop watching, before the store ends."""
        self.announce(f"left/{self.ranks.rank}")
        self.over.set()
        for thread in self.threads:
            thread.join(2)


def is_connection_lost(error: BaseException) -> bool:
    """Whether a collective or the store failed because a different rank exited or did not respond in time."""
    has_failed = isinstance(error, RuntimeError) and any(
        text in str(error).lower() for text in CONNECTION_LOST
    )
    return has_failed or isinstance(error, dist.DistStoreError | dist.DistNetworkError)


def explain_failure(watchdog: Watchdog, kind: type, raised: BaseException, trace: object) -> None:
    """Name the rank that was lost, if this is why `raised` was raised; else print the traceback."""
    error = cause_of(raised)
    if is_connection_lost(error):
        reason = str(error).splitlines()[0].split(". ")[0][:200]
        watchdog.report(f"lost the connection to another rank ({reason})")
    else:
        watchdog.logger.failed(f"{type(error).__name__}: {error}")
        watchdog.default_hook(kind, raised, trace)


def cause_of(error: BaseException) -> BaseException:
    """
    Return the first error of a chain: torch.distributed.pipelining raises a RuntimeError from what a stage
    raised.
    """
    while error.__cause__:
        error = error.__cause__
    return error


def line_of(error: BaseException) -> str:
    """Return the line of an error's message that says that memory is missing; else the first line."""
    lines = str(error).splitlines() or [""]
    return next((line for line in lines if OUT_OF_MEMORY.search(line)), lines[0])


def summary_of(error: BaseException) -> str:
    """Return an error's type, and the line of the message that `line_of` chooses."""
    return f"{type(error).__name__}: {line_of(error)[:200]}".removesuffix(": ")


def install(watchdog: Watchdog, explain: Callable[[type, BaseException, object], None]) -> None:
    """Install an excepthook that calls `explain`, tells the other ranks and ends the process."""

    def hook(kind: type, error: BaseException, trace: object) -> None:
        try:
            explain(kind, error, trace)
        except Exception as e:  # an explanation that fails must not keep the process from exiting
            print(f"error: {error} (and while explaining it: {e})", file=sys.stderr, flush=True)
        watchdog.announce(f"error/{watchdog.ranks.rank}", summary_of(cause_of(error)))
        watchdog.announce("failed")
        watchdog.finish_checkpoint()
        sys.stdout.flush()
        # destroying a process group that a DDP model still references was seen to hang (torch 2.13, gloo),
        # and a rank that hangs instead of exiting keeps its launcher from restarting it
        os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    watchdog.default_hook = watchdog.default_hook or sys.excepthook
    sys.excepthook = hook
