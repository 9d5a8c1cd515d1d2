"""Alerts: pass a run's events to the user's command."""

import json
import os
import signal
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired

from isogpt.common.files import as_json
from isogpt.launch.launchers import environment_without_launcher

QUIET = ("save", "mirror", "sample")  # frequent, and no reason to look
LIMIT_S = 10  # seconds that a command may take


class Alerts:
    """
    Runs the user's command for each event that is not in QUIET, with a line of JSON on standard input. The
    run goes on however the command ends. Its output is discarded, but not what it writes to stderr.
    """

    def __init__(self, config: dict) -> None:
        self.command, self.out_dir = config["alert_command"], config["out_dir"]

    def write(self, record: dict, text: str) -> None:
        """Run the command for an event, for up to LIMIT_S; then it is killed, with what it has started."""
        is_taken_spike = record.get("skipped") is False  # of which ordinary runs have some
        if not self.command or is_taken_spike or record.get("event", "save") in QUIET:
            return
        line = json.dumps(as_json(record | {"out_dir": self.out_dir})) + "\n"
        env = environment_without_launcher()
        # no output, since an endless one would fill the disk of the run's log. The session is a process
        # group, which can be killed
        with Popen(
            self.command, shell=True, stdin=PIPE, stdout=DEVNULL, text=True, env=env, start_new_session=True
        ) as process:
            try:
                process.communicate(line, timeout=LIMIT_S)
            except TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
