"""Alerts: pass a run's events to the user's command."""

import json
import os
import signal
import subprocess
import threading
import time
from contextlib import suppress

from isogpt.launch.launchers import environment_without_launcher
from isogpt.monitor.records import as_json

QUIET = ("save", "mirror", "sample")  # frequent, and no reason to look
FINAL = ("end", "preempted", "failed")  # the commands get time to finish before the process exits
FINAL_S = 10  # seconds after which they are ended


class Alerts:
    """
    Runs the user's command for each event that is not in QUIET, with a line of JSON on standard input. The
    run goes on however the command ends. Its output is discarded, but not what it writes to stderr.
    """

    def __init__(self, config: dict) -> None:
        self.command, self.out_dir = config["alert_command"], config["out_dir"]
        self.running: list[tuple[subprocess.Popen, threading.Thread]] = []

    def write(self, record: dict, text: str) -> None:
        """Pass an event to the command."""
        if not self.command or "event" not in record or record["event"] in QUIET:
            return
        process = subprocess.Popen(
            self.command,
            shell=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,  # an endless output would fill the disk of the run's log
            text=True,
            env=environment_without_launcher(),
            start_new_session=True,  # a process group, which can be ended
        )
        line = json.dumps(as_json(record | {"out_dir": self.out_dir})) + "\n"
        # a thread, so that a command that does not read its input cannot block the run; it also reaps the
        # process
        thread = threading.Thread(target=process.communicate, args=(line,), daemon=True)
        thread.start()
        self.running = [pair for pair in self.running if pair[1].is_alive()] + [(process, thread)]
        if record["event"] in FINAL:
            self.end()

    def end(self) -> None:
        """Wait for the commands for up to FINAL_S, and end those that still run: nobody else would."""
        deadline = time.monotonic() + FINAL_S
        for process, thread in self.running:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
