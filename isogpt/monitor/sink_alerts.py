"""Alerts: pass a run's events to the user's command."""

import json
import subprocess
import threading
from pathlib import Path

from isogpt.common import console
from isogpt.launch.launchers import environment_without_launcher
from isogpt.monitor.records import as_json

FINAL = ("end", "preempted", "failed")  # the command gets time to finish before the process exits
FINAL_S = 10


class Alerts:
    """Passes each event except `save` and `sample` to the user's command."""

    def __init__(self, command: str, out_dir: str | Path) -> None:
        self.command, self.out_dir = command, str(out_dir)

    def event(self, record: dict, text: str) -> None:
        """Pass an event to the command."""
        if record["event"] not in ("save", "sample"):  # frequent, and no reason to look
            wait_s = FINAL_S if record["event"] in FINAL else 0
            alert(self.command, as_json(record | {"out_dir": self.out_dir}), wait_s)


def alert(command: str, record: dict, wait_s: float = 0) -> None:
    """
    Run the user's command with a line of JSON on standard input, and wait for the command at most wait_s
    seconds. A failure of the command does not stop the run.
    """
    if not command:
        return
    stderr, env = None if wait_s else subprocess.DEVNULL, environment_without_launcher()
    try:
        process = subprocess.Popen(
            command, shell=True, stdin=subprocess.PIPE, stderr=stderr, text=True, env=env
        )
    except OSError as e:
        console.print_to_stderr(f"warning: alert_command: {e}")
        return
    # a thread, so that a command that does not read its input cannot block the run; it also reaps the process
    thread = threading.Thread(target=process.communicate, args=(json.dumps(record) + "\n",), daemon=True)
    thread.start()
    thread.join(wait_s)
