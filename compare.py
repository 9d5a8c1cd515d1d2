"""
Compare runs of train.py: what differs, which is better, and whether the difference is larger than chance.

    python compare.py out-a out-b              two runs: a table, the difference, and a picture
    python compare.py 'out-lr/*'               all runs in a folder; a group differs only in the seed
    python compare.py out-a out-b --x=tokens   the picture over tokens, seconds or flops instead of steps
    python compare.py out-a out-b --loss=1.5   when each has reached a validation loss of 1.5
    python compare.py out-a out-b --json       everything as JSON instead of the table

The first run's group is the one with which the others are compared. Runs may be running, stopped or resumed.
"""

import isogpt.launch.torch_import  # noqa: F401  (first: sets what must be set before torch is imported)

import sys
from json import dumps
from pathlib import Path

from configurator import configure, fail, settings_of, with_equals_signs
from isogpt.common import console
from isogpt.common.files import as_json
from isogpt.lab import pictures
from isogpt.lab.comparison import commands_for_seeds, compare, group_runs, report
from isogpt.lab.runs import find_runs

# -- what to compare -----------------------------------------------------------------------------------------
loss = 0.0  # also print when each run has reached this validation loss (0: no) [>= 0]
# -- what to write -------------------------------------------------------------------------------------------
x = "steps"  # what the picture draws the losses over [steps | tokens | seconds | flops]
picture = "compare.png"  # the file of the picture ("": none)
json = False  # print everything as JSON instead of the table
# ------------------------------------------------------------------------------------------------------------
# 1. the settings, and the runs
arguments = with_equals_signs(sys.argv[1:], settings_of(__file__))
folders = [argument for argument in arguments if not argument.startswith("-")]
configure(globals(), [option for option in arguments if option not in folders])
train_settings = settings_of(Path(__file__).with_name("train.py"))
defaults = {name: setting.default for name, setting in train_settings.items()}
try:
    groups = group_runs(find_runs(folders), defaults)
    comparison = compare(groups, loss)
except ValueError as e:
    fail(console.visible(str(e)))

# 2. the picture
try:
    if picture and comparison["compared_by"]:
        pictures.write(pictures.losses_figure(groups, x, comparison["compared_by"]), Path(picture))
        comparison["pictures"].append(picture)
except (ValueError, OSError) as e:  # matplotlib is missing, or the folder cannot be written to
    comparison["notes"].append(f"no picture: {e}")

# 3. the table, and what the difference means
if json:
    console.print_result(dumps(as_json(comparison), indent=2))
else:
    console.print_result("\n".join(report(comparison, commands_for_seeds(groups, defaults))))
