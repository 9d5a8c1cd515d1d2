"""
What keeps a run alive, or says why it ended: signals that stop it after the step, a watchdog that names the rank that
hangs or died, losses that spike, ranks that are slow, and out of memory, which becomes a smaller micro-batch.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.distributed import Store

RECORD = "micro_batch.json"
MARK = "PREEMPTED"  # this file in out_dir says that the run stopped because it was asked to, and is not done
BEGAN = time.monotonic()  # the start of this process, nearly
TIME_IS_UP = -1  # what Stop.code says where no signal asked

# ---------------------------------------------------------------------------------------------------------------------
# asked to stop


def running_s() -> float:
    """Seconds since the start of this process, or of torchrun's agent, which may have started it again (Linux)."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with suppress(OSError, ValueError, IndexError):
            ticks = int(Path(f"/proc/{os.getppid()}/stat").read_text().rsplit(")", 1)[1].split()[19])  # since boot
            return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - BEGAN


@dataclass
class Stop:
    """Whether this rank was asked to stop: by a signal, or because stop_after_s (0: never) have nearly passed."""

    stop_after_s: float = 0
    signal: int = 0

    def code(self, still_needed_s: float = 0.0) -> int:
        """0: go on; a signal's number; TIME_IS_UP where another step and a save, so long, would come too late."""
        late = self.stop_after_s and running_s() + still_needed_s > self.stop_after_s
        return self.signal or (TIME_IS_UP if late else 0)


def any_code(codes: torch.Tensor) -> int:
    """What the ranks, whose codes these are, stop by: a signal (above 0) before TIME_IS_UP (below); 0: they go on."""
    return int(codes.max() or codes.min())


def watch_signals(stop_after_s: float = 0) -> Stop:
    """
    From now on SIGTERM, SIGUSR1 and SIGINT do not end the process but are noted in the Stop that is returned, at which
    all ranks look together. A second SIGINT ends it at once; one within a second of the first is the same Ctrl-C,
    which the terminal sends to all and a launcher passes on.
    """
    stop = Stop(stop_after_s)

    def note(number: int, frame: object) -> None:
        if not stop.signal:
            stop.signal = number
            os.write(2, f"{signal.Signals(number).name}: stopping after this step\n".encode())

    for name in ("SIGTERM", "SIGUSR1", "SIGINT"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), note)
    # note runs between two lines of Python; where the main thread waits in C++ for a rank that is gone, a thread that
    # reads the signals' numbers ends the process at a second SIGINT
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def second() -> None:
        first = None
        while numbers := os.read(read, 1):
            if numbers[0] == signal.SIGINT:
                first = first or time.monotonic()
                if time.monotonic() - first > 1:
                    os._exit(128 + signal.SIGINT)

    threading.Thread(target=second, daemon=True, name="signals").start()
    return stop


def leave_mark(out_dir: str, step: int, code: int) -> None:
    """Write the mark of a run that was asked to stop before its end (rank 0); the next start takes it away."""
    why = "stop_after_s" if code == TIME_IS_UP else signal.Signals(code).name
    (Path(out_dir) / MARK).write_text(json.dumps({"iter": step, "reason": why}) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# telling somebody


def alert(command: str, record: dict, wait_s: float = 0) -> None:
    """Run the user's command with one line of JSON on its standard input (rank 0); its failure is only told."""
    if not command:
        return
    try:
        process = subprocess.Popen(
            command, shell=True, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL if not wait_s else None, text=True
        )
    except OSError as e:
        print(f"warning: alert_command: {e}", file=sys.stderr, flush=True)
        return
    # in a thread, which also reaps it: a command that does not read must not hold up the run
    told = threading.Thread(target=process.communicate, args=(json.dumps(record, default=str) + "\n",), daemon=True)
    told.start()
    told.join(wait_s)


# ---------------------------------------------------------------------------------------------------------------------
# what does not look right


@dataclass
class Spikes:
    """Notices a loss far above those of the last hundred logged steps."""

    losses: deque = field(default_factory=lambda: deque(maxlen=100))

    def seen(self, loss: float) -> bool:
        before, n = list(self.losses), len(self.losses)
        self.losses.append(loss)
        if n < 20:
            return False
        mean = sum(before) / n
        deviation = (sum((x - mean) ** 2 for x in before) / n) ** 0.5  # statistics.stdev takes a millisecond
        return loss > mean + max(6 * deviation, 0.1 * abs(mean))


@dataclass
class SlowRanks:
    """Notices a rank that stays well above the others, in time for its own forward, in waiting for data, in memory."""

    patience: int = 20  # looks in a row
    counts: dict = field(default_factory=dict)  # by (what, rank)

    def seen(self, columns: dict[str, list[float]]) -> list[str]:
        """Columns: what is measured -> its value by rank. A rank is named once each time it begins to stay above."""
        named = []
        for what, values in columns.items():
            typical = statistics.median_low(values)
            for rank, value in enumerate(values):
                above = value > 1.5 * typical + (0.2 if what.endswith("GB") else 5)
                self.counts[what, rank] = self.counts.get((what, rank), 0) + 1 if above else 0
                if self.counts[what, rank] == self.patience:
                    named.append(f"rank {rank}: {what} {value:.1f}, others {typical:.1f}")
        return named


class Watchdog:
    """
    Tells which rank is gone or stands still. A thread of each rank writes where it is to the store four times a
    second; another ends the process where the main thread has not come further for timeout_s, as in a hung NCCL
    collective.

    Args:
        store: a connection of the thread's own; None (one process): nothing to watch.
        names: what to call each rank, by rank.
        where: (a number that grows with each span of a step, what is being done).
    """

    def __init__(
        self,
        store: "Store | None",
        rank: int,
        names: list[str],
        timeout_s: float,
        where: Callable[[], tuple[int, str]],
    ) -> None:
        self.store, self.rank, self.names = store, rank, names
        self.timeout_s, self.where = timeout_s, where
        self.told = threading.Lock()
        self.over = threading.Event()
        self.silent = []
        self.armed = False  # the first step may take long: compiling
        self.hang, self.finish = lambda text: None, lambda: None
        self.threads = []
        if store:
            # two of them: where the network is cut, a question to the store may never come back
            self.threads = [threading.Thread(target=f, daemon=True) for f in (self.beat, self.watch)]
            for thread in self.threads:
                thread.start()

    def watch(self) -> None:
        last, since = None, time.monotonic()
        while not self.over.wait(0.5):
            now = self.where()
            if now != last:
                last, since = now, time.monotonic()
            if self.armed and time.monotonic() - since > self.timeout_s:
                self.report(f"no progress for {self.timeout_s:g} s")
                self.finish()
                os._exit(1)

    def beat(self) -> None:
        """Tell the others where this rank is, over and over."""
        for number in count():
            with suppress(Exception):  # the store may have gone with rank 0 or its agent
                self.store.set(f"beat/{self.rank}", json.dumps([number, self.where()[1]]))
            if self.over.wait(0.25):
                return

    def beats(self) -> list[tuple[int, str] | None]:
        """The last word of each rank."""
        keys = [f"beat/{rank}" for rank in range(len(self.names))]
        return [json.loads(self.store.get(key)) if self.store.check([key]) else None for key in keys]

    def blame(self) -> str:
        """Which ranks are silent, and where each was: looks twice, some beats apart."""
        self.store.set(f"left/{self.rank}", "")
        before = self.beats()
        time.sleep(1.5)
        after = self.beats()
        here = [self.store.check([f"left/{r}"]) for r in range(len(self.names))]
        word = [b[1] if b else "not begun" for b in after]
        self.silent = [r for r in range(len(self.names)) if before[r] == after[r] and not here[r]]
        if self.silent:
            return "; ".join(f"{self.names[r]} is silent, it was last at {word[r]}" for r in self.silent)
        return "all ranks answer: " + ", ".join(f"{name} at {w}" for name, w in zip(self.names, word, strict=True))

    def asked(self, question: Callable[[], str], wait_s: float) -> str:
        """The answer to what only the store can tell; where its host is cut off, that may never come back."""
        answers = []

        def ask() -> None:
            with suppress(Exception):
                answers.append(question())

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(wait_s)
        keeper = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return answers[0] if answers else f"the store, which rank 0 or its agent keeps at {keeper}, does not answer"

    def report(self, problem: str) -> None:
        """Say, once, what is wrong and who is to blame."""
        if not self.told.acquire(blocking=False):
            threading.Event().wait(25)  # the other thread is telling it, and then ends the process
            return
        guilty = self.asked(self.blame, 6 + len(self.names) / 50) if self.store else ""
        text = f"{self.names[self.rank]} at {self.where()[1]}: {problem}; {guilty}"
        print(f"error: {text}", file=sys.stderr, flush=True)
        self.hang(text)
        if self.store:
            self.asked(self.see_off, 5)

    def see_off(self) -> str:
        """Rank 0, which may keep the store that the others are asking, leaves after them."""
        self.store.set(f"said/{self.rank}", "")
        others = [f"said/{r}" for r in range(len(self.names)) if r not in self.silent]
        end = time.monotonic() + 4
        while self.rank == 0 and not self.store.check(others) and time.monotonic() < end:
            time.sleep(0.05)
        return ""

    def stop(self) -> None:
        """The run is over: stop watching (before the store goes)."""
        self.over.set()
        for thread in self.threads:
            thread.join(2)


# ---------------------------------------------------------------------------------------------------------------------
# crashes


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that the device, or the CPU, had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def recorded_micro_batch(out_dir: str, job: dict, batch_size: int) -> int:
    """
    The micro-batch to run with: batch_size, or the smaller one that an attempt at the same job, which ran out of
    memory, left in out_dir (rank 0). The settings stay as they are, and by law 1 so does the curve.
    """
    try:
        record = json.loads((Path(out_dir) / RECORD).read_text())
        return min(batch_size, int(record["micro_batch"])) if record["job"] == job else batch_size
    except (OSError, ValueError, KeyError, TypeError):
        return batch_size


def lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone or did not come in time."""
    text = str(error).lower()
    signs = (
        "closed by peer",
        "reset by peer",
        "remote peer",
        "timed out waiting",
        "connection was likely closed",
        "remote process exit",
        "ncclremoteerror",
        "ncclsystemerror",
    )
    return isinstance(error, RuntimeError) and any(s in text for s in (*signs, "broken pipe", "socket closed"))


def explain_crashes(
    out_dir: str,
    job: dict,
    rows: int,
    rank: int,
    plain: type[Exception],
    is_early: Callable[[], bool],
    explain: Callable[[], str],
    watchdog: Watchdog,
    finish: Callable[[], object],
) -> None:
    """
    From now on, what ends the process is said in a line or two instead of a traceback where it is understood.

    An error of type `plain` says all by itself. A rank that lost the others says that another one failed. Out of
    memory (each rank leaves by itself: they all run out alike) rank 0 says what the parts are and what would help; in
    the first steps it also records half of `rows` as the micro-batch, so that the same command, typed again or
    restarted by torchrun --max-restarts, goes on.

    Args:
        job: what the record holds for.
        is_early: whether these are the first steps after a start.
        explain: the parts and the flags.
        watchdog: knows the rank that is gone.
        finish: waits for the save that is under way, which is whole and worth having.
    """
    earlier = sys.excepthook

    def say(kind: type, error: BaseException, trace: object) -> None:
        if isinstance(error, plain):
            print(f"error: rank {rank}: {error}", file=sys.stderr, flush=True)
            watchdog.hang(str(error))
            return
        if lost_connection(error):
            watchdog.report(f"lost the connection to another rank ({str(error).splitlines()[0].split('. ')[0][:200]})")
            return
        if not is_out_of_memory(error):
            watchdog.hang(f"{kind.__name__}: {error}")
            earlier(kind, error, trace)
            return
        if rank > 0:  # the other ranks leave in silence
            return
        lines = [f"error: out of memory with micro-batches of {rows}: {str(error).splitlines()[0]}"]
        if is_early() and rows > 1:
            Path(out_dir).mkdir(parents=True, exist_ok=True)
            other = Path(out_dir) / (RECORD + ".tmp")
            other.write_text(json.dumps({"micro_batch": rows // 2, "job": job}))
            os.replace(other, Path(out_dir) / RECORD)
            lines.append(
                f"the next start in {out_dir} uses micro-batches of {rows // 2} (same steps, same curve): torchrun "
                f"--max-restarts does it by itself, else type the same command again"
            )
        try:
            lines.insert(1, explain())
        except Exception as e:  # the message above matters more
            lines.insert(1, f"(no estimate: {e})")
        print("\n".join(lines), file=sys.stderr, flush=True)
        watchdog.hang(lines[0])

    def hook(kind: type, error: BaseException, trace: object) -> None:
        say(kind, error, trace)
        finish()
        sys.stdout.flush()
        sys.stderr.flush()
        # at once: taking apart a process group that a DDP model still holds has been seen to hang (torch 2.13, gloo),
        # and a rank that hangs instead of failing keeps its launcher from restarting it
        os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = hook
