"""The watchdog, which names a rank that failed or hung."""

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from isogpt.checkpoint.progress import Progress
from isogpt.checkpoint.save import Saver
from isogpt.common import console
from isogpt.common.console import RANKS_SHOWN, shortened
from isogpt.common.patience import within
from isogpt.launch import network
from isogpt.launch.launchers import own_agent
from isogpt.launch.process_group import Ranks, rank_names
from isogpt.monitor.log import Logger
from isogpt.speed.clock import Clock

if TYPE_CHECKING:
    from isogpt.monitor.out_of_memory import MemoryUse

STORE_TIMEOUT_S = 5
SILENT_S = 8  # seconds of silence after which a rank whose process has exited counts as failed
BEAT_S = 1.0  # seconds between two beats of a rank; more where they would overload the store
BEATS_PER_S = 500  # of all ranks; each is two requests, and the store serves ten thousand or more a second
LATE_S = 1.5  # how late a beat may be
REPORTERS = 8  # ranks that report why a different rank ends the run


class Beat(NamedTuple):
    """What a rank writes to the store, under one key."""

    number: int
    position: str  # where the main thread is
    process: tuple[str, int]  # see network.has_exited
    fate: str | None = None  # None: the rank goes on; "": it has left, or looks for the cause; else its error


def parse_beat(text: bytes) -> Beat | None:
    """The beat in a value of the store; None: the rank has not begun."""
    return Beat(*json.loads(text)) if text else None


def beat_interval_s(world_size: int) -> float:
    """The seconds between two beats of a rank, which limit how often all ranks together ask the store."""
    return max(BEAT_S, world_size / BEATS_PER_S)


def reporters(world_size: int) -> set[int]:
    """
    The ranks that report why a different rank ends the run: at most REPORTERS, on as many machines as
    possible. They are known without the store, which may be what does not respond.
    """
    return {i * (world_size - 1) // (REPORTERS - 1) for i in range(REPORTERS)}


@dataclass
class Silence:
    """How long a rank has written no new beat."""

    interval_s: float  # between two looks
    last: bytes = b""  # what it wrote last
    seconds: float = 0  # counted, not timed: a job that was suspended as a whole has missed nothing

    def is_too_long(self, now: bytes, timeout_s: float) -> bool:
        """
        Take note of what the rank has written, and return whether the rank is lost. A process that was
        suspended, for instance while its machine moves, looks like a machine without power, so both get
        timeout_s. A process that has exited on this machine does not come back.
        """
        self.seconds = self.seconds + self.interval_s if now and now == self.last else 0
        self.last = now
        if self.seconds < max(SILENT_S, 2 * self.interval_s):
            return False
        beat = parse_beat(now)
        return beat.fate is None and (self.seconds >= timeout_s or network.has_exited(beat.process))


@dataclass
class Watchdog:
    """
    Two threads that watch this rank and its neighbors.

    One thread writes the position of this rank to the store every `interval_s`, and checks that the ranks
    before and after this rank do the same. The other thread ends the process if the main thread makes no
    progress for timeout_s in a step, for instance in a hung collective. After a different rank has failed, a
    moment without progress is enough, because NCCL, unlike gloo, does not notice a lost connection. A store
    that does not respond is a failure, too, but not if it has ended with torchrun's agent: then the ranks are
    saving, see process_group.stop_with_launcher.

    The store serves all ranks with one thread. So each rank has only one key, the `reporters` read all keys
    at once when a rank has failed, and the other ranks write one last beat and print nothing.

    With a single process there is no store and nothing to watch, but the crash hook uses the same report.

    The watchdog begins before there are a clock and a saver; train.py sets these when they exist.
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
    beats: int = 0  # of this rank
    fate: str | None = None  # in its last beat, see Beat
    writing: threading.Lock = field(default_factory=threading.Lock)  # no beat follows the last one
    silent: list[int] = field(default_factory=list)
    reported: threading.Lock = field(default_factory=threading.Lock)
    over: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)

    @property
    def interval_s(self) -> float:
        """The seconds between two beats of a rank."""
        return beat_interval_s(self.ranks.world_size)

    @property
    def look_s(self) -> float:
        """The seconds in which each rank that responds writes a beat."""
        return self.interval_s + LATE_S

    def start(self, store: dist.Store) -> None:
        """Begin to watch, through a store that reaches all ranks."""
        self.store = store
        # two threads, since a request to the store may never return if the network is cut
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
        """Write the position of this rank to the store, and read those of its neighbors, until it leaves."""
        reached, has_keys = time.monotonic(), False
        # two neighbors, since only a rank of the same machine can see that a process has exited
        neighbors = {
            (self.ranks.rank + step) % self.ranks.world_size: Silence(self.interval_s) for step in (1, -1)
        }
        keys = [*(f"beat/{rank}" for rank in neighbors), "failed"]
        while self.fate is None:
            with suppress(Exception):  # the store ends with rank 0 or with the agent
                for key in () if has_keys else keys:  # multi_get would wait for a key that does not exist
                    self.store.compare_set(key, "", "")
                has_keys = True
                self.write_beat()
                *beats, failed = self.store.multi_get(keys)
                silences = zip(neighbors.values(), beats, strict=True)
                # count the silence of each neighbor, even if the other one is lost
                lost = [silence.is_too_long(now, self.timeout_s) for silence, now in silences]
                if any(lost):
                    self.store.set("failed", "yes")
                self.has_failed = bool(failed) or any(lost)
                reached = time.monotonic()
            # only if requests fail, since a store that is suspended answers them later, and torchrun's agent
            # is there or there was none
            patience_s = max(SILENT_S, 2 * self.interval_s)
            if time.monotonic() - reached > patience_s and own_agent() in (*self.ranks.launch.agents, ""):
                self.has_failed = True
            if self.over.wait(self.interval_s):
                return

    def write_beat(self, fate: str | None = None, has_failed: bool = False) -> None:
        """
        Write this rank's position to the store; with a fate (see Beat) it is the last beat. If `has_failed`,
        also tell the other ranks that the run has failed, in the same request.
        """
        with self.writing:
            if self.fate is not None:
                return
            self.fate = fate
            self.beats += 1
            beat = Beat(self.beats, self.position()[1], (network.namespace("pid"), os.getpid()), fate)
            values = {f"beat/{self.ranks.rank}": json.dumps(beat)} | ({"failed": "yes"} if has_failed else {})
            self.store.multi_set(list(values), list(values.values()))

    def read(self, keys: list[str]) -> list[bytes]:
        """
        Return what the store holds under each of these keys, or b"" if nothing. This takes two requests,
        unless keys are missing, which are searched for by halving.
        """
        if self.store.check(keys):
            return self.store.multi_get(keys)
        if len(keys) == 1:
            return [b""]
        half = len(keys) // 2
        return self.read(keys[:half]) + self.read(keys[half:])

    def read_beats(self) -> list[Beat | None]:
        """Return the last beat of each rank."""
        keys = [f"beat/{rank}" for rank in range(self.ranks.world_size)]
        return [parse_beat(text) for text in self.read(keys)]

    def find_cause(self) -> str:
        """
        Return which ranks have failed or do not respond, and where each was. Reads the beats twice, with
        enough time in between for a rank that responds to write one. If all respond, return where they are.
        """
        names = rank_names(self.ranks.hosts)
        self.write_beat(fate="", has_failed=True)  # the others also report, while rank 0's store exists
        before = self.read_beats()
        time.sleep(self.look_s)
        failed, silent, at = {}, {}, defaultdict(list)
        for rank, (earlier, beat) in enumerate(zip(before, self.read_beats(), strict=True)):
            position = beat.position if beat else "the start"
            at[position].append(names[rank])
            if beat and beat.fate:
                failed[rank] = f"has failed ({beat.fate}), its last position was {position}"
            elif not beat or (beat == earlier and beat.fate is None):
                silent[rank] = f"does not respond, its last position was {position}"
        fates = failed | silent
        self.silent = list(fates)
        if fates:
            return shortened([f"{names[rank]} {fate}" for rank, fate in fates.items()], RANKS_SHOWN, "; ")
        rarest = sorted(at.items(), key=lambda item: len(item[1]))  # in a hang, the ranks that are elsewhere
        places = [f"{shortened(ranks)} at {position}" for position, ranks in rarest]
        return f"all ranks respond: {shortened(places, between='; ')}"

    def ask(self, question: Callable[[], str], wait_s: float) -> str:
        """
        Return the answer to a question that needs the store, or after wait_s seconds a sentence that the
        store does not respond, because a request may never return if the store is unreachable.
        """
        try:
            return within(wait_s, question)
        except Exception:  # an error of the store, or TimeoutError
            return f"the store of rank 0 or its agent at {network.store_address()} does not respond"

    def report(self, problem: str) -> None:
        """
        Print once what is wrong and which rank is the cause. A rank that is not one of the `reporters` only
        gives them time to do so, because a launcher may end them when this rank exits.
        """
        if not self.reported.acquire(blocking=False):
            time.sleep(25)  # the other thread is reporting, and then ends the process
            return
        speakers = reporters(self.ranks.world_size)
        if self.ranks.rank not in speakers:
            self.leave(has_failed=True)
            time.sleep(self.interval_s + self.look_s + 2)
            return
        name = rank_names(self.ranks.hosts)[self.ranks.rank]
        cause = self.ask(self.find_cause, self.look_s + STORE_TIMEOUT_S) if self.store else ""
        text = f"{name} at {self.position()[1]}: {problem}; {cause}"
        if others := self.ranks.world_size - len(speakers):
            text += f" (ranks that print no line: {others:,})"
        console.print_to_stderr(f"error: {text}")
        # in a thread, since writing does not return either if the file system of metrics.jsonl is the cause
        self.ask(partial(self.logger.failed, text), 15)
        self.let_others_finish()

    def let_others_finish(self) -> None:
        """
        Say that this rank has reported. On rank 0, which may serve the store that the other ranks are asking,
        wait until the other reporters have reported, too, at most for as long as they look for the cause.
        """
        if self.store and self.ranks.rank in reporters(self.ranks.world_size):
            self.ask(self.wait_for_reports, self.look_s + 3)

    def wait_for_reports(self) -> str:
        """The part of `let_others_finish` that asks the store."""
        self.store.set(f"reported/{self.ranks.rank}", "")
        others = reporters(self.ranks.world_size) - set(self.silent)
        keys = [f"reported/{rank}" for rank in others]
        end = time.monotonic() + self.look_s + 2
        while self.ranks.is_main and not self.store.check(keys) and time.monotonic() < end:
            time.sleep(0.2)
        return ""

    def turn(self, problem: str) -> int:
        """
        Return this rank's place, from 1 on, among the ranks that meet a problem, which many may meet at once;
        the first one explains it. After REPORTERS of them, a rank has nothing to add, and does not write its
        fate. Returns 1 if the store does not respond.
        """
        if not self.store:
            return 1
        number = self.ask(lambda: str(self.store.add(f"turn/{problem}", 1)), STORE_TIMEOUT_S)
        turn = int(number) if number.isdigit() else 1
        if turn > REPORTERS:
            self.fate = ""
        return turn

    def finish_checkpoint(self) -> None:
        """Wait for a checkpoint under way if this rank can complete it alone."""
        if self.saver and self.saver.writes_alone():
            self.saver.wait_alone()

    def leave(self, fate: str = "", has_failed: bool = False) -> None:
        """Write the last beat, see `write_beat`."""
        if self.store:
            self.ask(partial(self.write_beat, fate, has_failed), STORE_TIMEOUT_S)

    def stop(self) -> None:
        """Tell the other ranks that this rank leaves, and stop watching, before the store ends."""
        self.leave()
        self.over.set()
        for thread in self.threads:
            thread.join(2)
