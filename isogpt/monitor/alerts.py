"""Alerts: pass a run's events to the user's command."""

import json
import subprocess
import sys
import threading

from isogpt.launch.launchers import environment_without_launcher


def alert(command: str, record: dict, wait_s: float = 0) -> None:
    """
    Run the user's command with a line of JSON on standard input (rank 0). A failure of the command does not
    stop the run.
    """
    if not command:
        return
    stderr, env = None if wait_s else subprocess.DEVNULL, environment_without_launcher()
    try:
        process = subprocess.Popen(
            command, shell=True, stdin=subprocess.PIPE, stderr=stderr, text=True, env=env
        )
    except OSError as e:
        print(f"warning: alert_command: {e}", file=sys.stderr, flush=True)
        return
    # a thread, so that a command that does not read its input cannot block the run; it also reaps the process
    thread = threading.Thread(target=process.communicate, args=(json.dumps(record) + "\n",), daemon=True)
    thread.start()
    thread.join(wait_s)
