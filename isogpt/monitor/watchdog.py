"""
The watchdog, which names a rank that failed or hung, and explains the exceptions that end a process. After
running out of memory, the next start continues with smaller micro-batches.
"""

import json
import math
import os
import sys
import threading
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch.distributed as dist

from isogpt.checkpoint.progress import Progress
from isogpt.checkpoint.save import Saver
from isogpt.common import console
from isogpt.common.patience import within
from isogpt.data.reader import Reader
from isogpt.launch import network
from isogpt.launch.process_group import Ranks, rank_names
from isogpt.launch.together import is_connection_lost
from isogpt.monitor.log import Logger, start_sinks
from isogpt.parallel.pipeline import cause_of
from isogpt.parallel.plan import LayoutError
from isogpt.speed.clock import Clock
from isogpt.speed.memory import OUT_OF_MEMORY, memory_report
from isogpt.speed.planner import MICRO_BATCH, record

STORE_TIMEOUT_S = 5
BEAT_S = 1.0  # seconds between two beats of a rank
BEATS = 3  # in which each rank that responds writes another one
LINGER_S = 6.0  # seconds in which the other ranks read the cause of a failure


@dataclass
class Watchdog:
    """
    A thread of each rank, with which the ranks find out which of them failed or hangs.

    Every second it writes where the main thread is to the store: a beat. It ends the process if the main
    thread makes no progress for timeout_s in a step, for instance in a hung collective, if it has lost the
    connection to a rank, or if a different rank has failed, because NCCL, unlike gloo, does not notice a lost
    connection. The first rank that notices a failure reads the beats of all ranks twice: those whose beat
    stands still do not respond. It tells all ranks, as a rank does whose main thread has raised an exception.

    The watchdog begins before there are a reader, a clock and a saver; train.py sets these when they exist.
    With a single process there is no store and nothing to watch, but the hook explains its exceptions.
    """

    out_dir: str
    ranks: Ranks
    timeout_s: float
    logger: Logger
    store: dist.Store | None = None  # reaches all ranks; None: this is the only one
    reader: Reader | None = None  # explains running out of memory; None: a traceback does
    clock: Clock | None = None  # None: the run starts, and its steps are not timed yet
    saver: Saver | None = None  # None: there is no checkpoint yet
    problem: str = ""  # which the main thread has met, and the watchdog reports
    over: threading.Event = field(default_factory=threading.Event)  # nothing is watched any more

    def start(self) -> None:
        """Explain exceptions, and with other ranks, begin to watch."""
        self.name = rank_names(self.ranks.hosts)[self.ranks.rank]  # in messages
        sys.excepthook = self.hook  # also explains a store that does not respond
        if self.ranks.store and self.ranks.world_size > 1:
            # a separate connection, since a request blocks all others on the same connection
            self.store = network.connect_store(self.timeout_s)
            self.thread = threading.Thread(target=self.watch, daemon=True)
            self.thread.start()

    @property
    def position(self) -> str:
        """Where the main thread is."""
        progress = self.logger.progress
        step = progress.step + progress.launched
        return f"step {step}, {self.clock.doing if self.clock else 'the start'}"

    def watch(self) -> None:
        """Write beats, and end the process if something is wrong."""
        failed, marks, since = {}, 0, time.monotonic()
        while True:
            with suppress(Exception):  # the store ends with rank 0 or with the agent
                failed = within(STORE_TIMEOUT_S, self.beat)
            if self.over.wait(BEAT_S):
                return
            if self.clock and self.clock.count != marks:
                marks, since = self.clock.count, time.monotonic()
            if self.problem:
                self.report(self.problem)
            elif failed:
                self.report("a different rank has failed")
            elif self.clock and self.clock.expects_progress and time.monotonic() - since > self.timeout_s:
                stack = traceback.format_stack(sys._current_frames()[threading.main_thread().ident])
                self.report(f"no progress for {self.timeout_s:g} s", "\n" + "".join(stack))

    def beat(self) -> dict[str, str]:
        """Write where this rank is; returns what all ranks know of a failure, see `tell`."""
        self.store.set(f"beat/{self.ranks.rank}", f"{time.monotonic()}: {self.position}")
        return self.tell({})

    def tell(self, states: dict[str, str]) -> dict[str, str]:
        """
        Tell all ranks why the run ends, {name of a rank: its state}, unless a different rank has done so;
        with {}, only ask. Returns what all ranks know.
        """
        known = self.store.compare_set("failed", "", json.dumps(states) if states else "")
        return json.loads(known or "{}")

    def report(self, problem: str, stack: str = "") -> None:
        """Print what is wrong and which rank is the cause, and end the process."""
        try:
            states = within(BEATS * BEAT_S + 2 * STORE_TIMEOUT_S, self.find_cause)
            states = [f"{name} {state}" for name, state in states.items() if name != self.name]
            cause = console.shortened(states, console.RANKS_SHOWN, "; ")
        except Exception:  # an error of the store, or TimeoutError
            cause = f"the store of rank 0 or its agent at {network.store_address()} does not respond"
        text = f"{self.name} at {self.position}: {problem}; {cause}"
        console.print_to_stderr(f"error: {text}{stack}")
        # limited, since writing does not return either if the file system of metrics.jsonl is the cause
        with suppress(Exception):
            within(15, self.logger.failed, text)
        self.exit()

    def find_cause(self) -> dict[str, str]:
        """Return where each rank is: first those that have failed, do not respond, or are elsewhere."""
        keys = [f"beat/{rank}" for rank in range(self.ranks.world_size)]
        before = self.store.multi_get(keys)
        for _ in range(BEATS):
            if failed := self.beat():
                return failed
            time.sleep(BEAT_S)
        states = {}
        beats = zip(rank_names(self.ranks.hosts), before, self.store.multi_get(keys), strict=True)
        for name, earlier, beat in beats:
            state = "does not respond, its last position was" if beat == earlier else "is at"
            states[name] = f"{state} {beat.decode().partition(': ')[2]}"
        counts = Counter(states.values())
        names = sorted(states, key=lambda name: (states[name].startswith("is at"), counts[states[name]]))
        return self.tell({name: states[name] for name in names})

    def leave(self) -> None:
        """Stop watching, before the store ends."""
        self.over.set()
        if self.store:
            self.thread.join(STORE_TIMEOUT_S)

    def exit(self, status: int = 1) -> None:
        """
        End the process. A checkpoint under way is completed if this rank can do so alone, and rank 0 serves
        the store until the other ranks have read why the run ends.
        """
        if self.saver and not self.saver.group:
            self.saver.wait_alone()
        if self.store and self.ranks.is_main and not network.uses_agent_store():
            time.sleep(LINGER_S)
        console.flush()
        # destroying a process group that a DDP model still references was seen to hang (torch 2.13, gloo),
        # and a rank that hangs instead of exiting keeps its launcher from restarting it
        os._exit(status)

    def hook(self, kind: type, error: BaseException, _: object) -> None:
        """Explain an exception, tell the other ranks, and end the process."""
        cause = cause_of(error)
        reason = line_of(cause)[:200]
        if self.store and is_connection_lost(cause):
            self.problem = f"lost the connection to a different rank ({reason})"
            self.thread.join()  # it ends the process
        self.over.set()
        states = {self.name: f"has failed ({reason}), its last position was {self.position}"}
        is_first = True
        with suppress(Exception):  # there is no store, or it does not respond
            is_first = within(STORE_TIMEOUT_S, self.tell, states) == states
        try:
            with suppress(Exception):  # wandb may not answer
                within(15, self.logger.failed, reason)
            if isinstance(error, LayoutError):  # all ranks raise it
                text = str(error)
            elif self.reader and is_out_of_memory(cause):
                text = f"{self.name}: {use_less_memory(cause, self.out_dir, self.reader, self.clock)}"
            else:
                is_first = True
                text = f"{self.name} at {self.position}: {reason}\n"
                text += "".join(traceback.format_exception(error))
            if is_first:
                console.print_to_stderr(f"error: {text}")
        except Exception as e:  # an explanation that fails must not keep the process from exiting
            console.print_to_stderr(f"error: {reason} (and while explaining it: {e})")
        self.exit()


def start_watch(config: dict, ranks: Ranks) -> Watchdog:
    """
    Begin to print, to alert and to watch: from here on, a rank that fails or does not respond is named.

    Args:
        config: train.py's settings.
    """
    sizes = ("gradient_accumulation_steps", "batch_size", "block_size")
    progress = Progress(tokens_per_step=math.prod(config[name] for name in sizes))
    logger = Logger(progress, start_sinks(ranks, config))
    watchdog = Watchdog(config["out_dir"], ranks, config["dist_timeout_s"], logger)
    watchdog.start()
    return watchdog


# ------------------------------------------------------------------------------------------------------------
# why a process ends


def line_of(error: BaseException) -> str:
    """
    Return an error's type and the first line of its message, or the line that says that memory ran out:
    libraries such as cuBLAS and NCCL raise a plain RuntimeError.
    """
    lines = f"{type(error).__name__}: {error}".removesuffix(": ").splitlines()
    return next(filter(OUT_OF_MEMORY.search, lines), lines[0])


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the device or the CPU ran out of memory."""
    return isinstance(error, MemoryError) or OUT_OF_MEMORY.search(line_of(error)) is not None


def use_less_memory(error: BaseException, out_dir: str, reader: Reader, clock: Clock | None) -> str:
    """
    Return what uses the memory and what would reduce it. In the first steps, also record half of the rows as
    the micro-batch size, so that the same command, repeated or restarted by torchrun --max-restarts,
    continues.

    Often all ranks run out of memory, but it can also be one, since the last stage of a pipeline computes the
    loss, and other programs may use a GPU.

    Args:
        clock: None: the model was being allocated.
    """
    plan, rows, most = reader.plan, reader.share.rows, max(reader.share.rows_of)
    when = f"with micro-batches of {rows}" if clock else "while the model was allocated"
    text = f"out of memory {when}: {line_of(error)}\n{memory_report(replace(plan, micro_batch=rows))}"
    # in the first steps, until the times of three are known: `steps` begins with an empty dict
    if clock and len(clock.steps) <= 3 and most > 1 and not plan.exact:
        record(Path(out_dir) / MICRO_BATCH, plan.job(), most // 2)
        text += f"\nthe next start in {out_dir} uses micro-batches of {most // 2}, with the same curve"
    return text
