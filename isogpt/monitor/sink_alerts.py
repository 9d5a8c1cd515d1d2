"""Alerts: pass a run's events to the user's command."""

import json
import subprocess
import threading

from isogpt.launch.launchers import environment_without_launcher
from isogpt.monitor.records import as_json

QUIET = ("save", "sample")  # frequent, and no reason to look
FINAL = ("end", "preempted", "failed")  # the command gets time to finish before the process exits
FINAL_S = 10


class Alerts:
    """
    Runs the user's command for each event that is not in QUIET, with a line of JSON on standard input. How
    the command ends has no effect on the run.
    """

    def __init__(self, config: dict) -> None:
        self.command, self.out_dir = config["alert_command"], config["out_dir"]

    def write(self, record: dict, text: str) -> None:
        """Pass an event to the command."""
        if not self.command or "event" not in record or record["event"] in QUIET:
            return
        is_final = record["event"] in FINAL
        process = subprocess.Popen(
            self.command, shell=True, stdin=subprocess.PIPE, text=True, env=environment_without_launcher()
        )
        line = json.dumps(as_json(record | {"out_dir": self.out_dir})) + "\n"
        # a thread, so that a command that does not read its input cannot block the run; it also reaps the
        # process
        thread = threading.Thread(target=process.communicate, args=(line,), daemon=True)
        thread.start()
        thread.join(FINAL_S if is_final else 0)
