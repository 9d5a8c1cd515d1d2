"""
A script of isoGPT several times in one process: `in_turn.py SCRIPT JOBS`. Each line of JOBS is a JSON object
with the folder to run in, the arguments, and the port at which several ranks meet.
"""

import json
import os
import sys
from pathlib import Path

from forks import HOME, exec_script

sys.path[:0] = [str(HOME)]
name, jobs = sys.argv[1:]
for line in Path(jobs).read_text().splitlines():
    job = json.loads(line)
    print("next job", flush=True)
    print(name, *job["args"], file=sys.stderr, flush=True)  # shown if the job fails
    os.chdir(job["folder"])
    os.environ["MASTER_PORT"] = str(job["port"])
    sys.argv = [str(HOME / name), *job["args"]]
    try:
        exec_script(sys.argv[0])
    except SystemExit as end:
        if end.code:
            raise
