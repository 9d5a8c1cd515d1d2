"""The watchdog, which names a rank that failed or hung, and explains the exceptions that end a process."""

import json
import os
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from operator import itemgetter
from typing import NamedTuple

import torch.distributed as dist

from isogpt.checkpoint.progress import Progress
from isogpt.checkpoint.save import Saver
from isogpt.common import console
from isogpt.common.patience import within
from isogpt.launch import network
from isogpt.launch.process_group import Ranks, rank_names
from isogpt.launch.together import is_connection_lost
from isogpt.monitor.log import Logger
from isogpt.monitor.out_of_memory import MemoryUse, is_out_of_memory, line_of
from isogpt.parallel.pipeline import cause_of
from isogpt.parallel.plan import LayoutError
from isogpt.speed.clock import Clock

STORE_TIMEOUT_S = 5
BEAT_S = 1.0  # seconds between two beats of a rank
LOOK_S = 2.5  # seconds in which each rank that responds writes a beat
LINGER_S = 6.0  # seconds in which the other ranks notice a failure and look for its cause
REPORTERS = 8  # ranks that print what happened, if more of them meet the same problem


class Beat(NamedTuple):
    """What a rank writes to the store, under one key."""

    number: int
    position: str  # where the main thread is
    fate: str | None  # None: the rank goes on; "": it leaves, or looks for the cause; else its error


@dataclass
class Watchdog:
    """
    Two threads, with which the ranks find out which of them failed or hangs.

    One thread writes the position of this rank to the store every second. The other ends the process if the
    main thread makes no progress for timeout_s in a step, for instance in a hung collective, or for a moment
    after a different rank has failed, because NCCL, unlike gloo, does not notice a lost connection. A rank
    that ends reads the beats of all ranks twice: those whose beat stands still do not respond.

    The watchdog begins before there are a clock and a saver; train.py sets these when they exist. With a
    single process there is no store and nothing to watch, but the hook explains its exceptions.
    """

    ranks: Ranks
    timeout_s: float
    progress: Progress
    logger: Logger
    store: dist.Store | None = None  # reaches all ranks
    clock: Clock | None = None  # None: the run starts, and its steps are not timed yet
    saver: Saver | None = None  # None: there is no checkpoint yet
    memory_use: MemoryUse | None = None  # explains running out of memory; None: a traceback does
    has_failed: bool = False  # whether a rank has failed
    fate: str | None = None  # in the last beat, see Beat
    over: threading.Event = field(default_factory=threading.Event)  # this rank leaves
    reporting: threading.Lock = field(default_factory=threading.Lock)
    beating: threading.Thread | None = None

    def start(self, store: dist.Store) -> None:
        """Begin to watch, through a store that reaches all ranks."""
        self.store = store
        # two threads, since a request to the store may never return if the network is cut
        self.beating = threading.Thread(target=self.beat, daemon=True)
        self.beating.start()
        threading.Thread(target=self.watch, daemon=True).start()

    @property
    def name(self) -> str:
        """This rank's name in messages."""
        return rank_names(self.ranks.hosts)[self.ranks.rank]

    @property
    def position(self) -> str:
        """Where the main thread is."""
        return f"step {self.progress.step}, {self.clock.doing if self.clock else 'the start'}"

    def beat(self) -> None:
        """Write where this rank is, until it leaves, and learn whether a rank has failed."""
        for number in count():
            fate = self.fate
            with suppress(Exception):  # the store ends with rank 0 or with the agent
                beat = Beat(number, self.position, fate)
                self.store.set(f"beat/{self.ranks.rank}", json.dumps(beat))
                if self.has_failed:
                    self.store.set("failed", "yes")
                self.has_failed = self.store.check(["failed"])
            if fate is not None:
                return
            self.over.wait(BEAT_S)

    def watch(self) -> None:
        """End the process if the main thread makes no progress."""
        last, since = 0, time.monotonic()
        while not self.over.wait(0.5):
            now = self.clock.count if self.clock else 0
            if now != last:
                last, since = now, time.monotonic()
            waited_s, is_in_step = time.monotonic() - since, self.clock and self.clock.expects_progress
            if self.has_failed and waited_s > 1:
                self.report("a different rank has failed")
            elif is_in_step and waited_s > self.timeout_s:
                self.report(f"no progress for {self.timeout_s:g} s")

    def report(self, problem: str) -> None:
        """Print what is wrong and which rank is the cause, and end the process."""
        self.reporting.acquire()  # for ever, if the other thread reports: it then ends the process
        if self.turn("a different rank") > REPORTERS:
            time.sleep(LOOK_S + 2)  # a launcher may end the ranks that print when this one exits
            self.exit()
        try:
            cause = within(LOOK_S + 2 * STORE_TIMEOUT_S, self.find_cause)
        except Exception:  # an error of the store, or TimeoutError
            cause = f"the store of rank 0 or its agent at {network.store_address()} does not respond"
        text = f"{self.name} at {self.position}: {problem}; {cause}"
        console.print_to_stderr(f"error: {text}")
        # limited, since writing does not return either if the file system of metrics.jsonl is the cause
        with suppress(Exception):
            within(15, self.logger.failed, text)
        self.exit()

    def find_cause(self) -> str:
        """Return where each rank is: first those that have failed, do not respond, or are elsewhere."""
        self.has_failed = True
        self.leave()  # the others look for the cause, too, while rank 0's store exists
        before = self.read_beats()
        time.sleep(LOOK_S)
        now, states = self.read_beats(), []
        counts = Counter(beat.position for beat in now)
        for name, earlier, beat in zip(rank_names(self.ranks.hosts), before, now, strict=True):
            order, state = counts[beat.position], "is at"
            if beat.fate:
                order, state = -1, f"has failed ({beat.fate}), its last position was"
            elif beat == earlier and beat.fate is None:
                order, state = 0, "does not respond, its last position was"
            states.append((order, f"{name} {state} {beat.position}"))
        states.sort(key=itemgetter(0))
        return console.shortened([text for _, text in states], console.RANKS_SHOWN, "; ")

    def read_beats(self) -> list[Beat]:
        """Return the last beat of each rank."""
        keys = [f"beat/{rank}" for rank in range(self.ranks.world_size)]
        texts = [self.store.compare_set(key, "", "") for key in keys]  # get waits for a key that is missing
        return [Beat(*json.loads(text)) if text else Beat(0, "the start", None) for text in texts]

    def turn(self, problem: str) -> int:
        """
        Return this rank's place, from 1 on, among the ranks that meet a problem, which many may meet at once.
        Returns 1 if the store does not respond.
        """
        if self.store:
            with suppress(Exception):
                return within(STORE_TIMEOUT_S, self.store.add, f"turn/{problem}", 1)
        return 1

    def leave(self, fate: str = "") -> None:
        """Write the last beat, and stop watching, before the store ends. See Beat for `fate`."""
        self.fate = fate
        self.over.set()
        if self.beating:
            self.beating.join(STORE_TIMEOUT_S)

    def exit(self, fate: str = "", status: int = 1) -> None:
        """
        End the process. A checkpoint under way is completed if this rank can do so alone, and rank 0 serves
        the store until the other ranks have read why the run ends.
        """
        self.has_failed = True
        self.leave(fate)
        if self.saver and self.saver.writes_alone():
            self.saver.wait_alone()
        if self.store and self.ranks.is_main and not network.uses_agent_store():
            time.sleep(LINGER_S)
        console.flush()
        # destroying a process group that a DDP model still references was seen to hang (torch 2.13, gloo),
        # and a rank that hangs instead of exiting keeps its launcher from restarting it
        os._exit(status)

    def install_hook(self) -> None:
        """Explain exceptions from here on."""
        sys.excepthook = self.hook

    def hook(self, kind: type, error: BaseException, trace: object) -> None:
        """Explain an exception, tell the other ranks, and end the process."""
        cause = cause_of(error)
        what = "out of memory" if is_out_of_memory(cause) else type(cause).__name__
        reason = f"{what}: {line_of(cause)[:200]}".removesuffix(": ")
        try:
            if self.store and is_connection_lost(cause):
                self.report(f"lost the connection to a different rank ({reason})")
            else:
                self.logger.failed(reason)
                self.explain(error, cause, reason)
        except Exception as e:  # an explanation that fails must not keep the process from exiting
            console.print_to_stderr(f"error: {reason} (and while explaining it: {e})")
        self.exit(reason, 130 if kind is KeyboardInterrupt else 1)

    def explain(self, error: BaseException, cause: BaseException, reason: str) -> None:
        """Print a traceback; or, on the first rank that meets it, a message about a known problem."""
        if self.memory_use and is_out_of_memory(cause):
            if self.turn("out of memory") == 1:
                text = self.memory_use.explain(cause, self.progress.step, is_allocating=self.clock is None)
                console.print_to_stderr(f"error: {self.name}: {text}")
        elif isinstance(error, LayoutError):
            if self.turn("layout") == 1:  # all ranks raise it
                console.print_error(str(error))
        elif self.turn("exception") <= REPORTERS:
            console.print_to_stderr(f"error: {self.name} at {self.position}: {reason}")
            sys.__excepthook__(type(error), error, error.__traceback__)


def start_watchdog(ranks: Ranks, timeout_s: float, progress: Progress, logger: Logger) -> Watchdog:
    """
    Return the watchdog of the start, with its hook: from here on, a rank that fails is named. With other
    ranks, the watchdog connects to the store.
    """
    watchdog = Watchdog(ranks, timeout_s, progress, logger)
    watchdog.install_hook()  # also explains a store that does not respond
    if ranks.world_size > 1 and ranks.store:
        # a separate connection, since a request blocks all others on the same connection
        watchdog.start(network.connect_store(timeout_s))
    return watchdog
