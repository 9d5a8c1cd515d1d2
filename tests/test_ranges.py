"""The range of a setting: the end of its comment in a script, which the configurator checks."""

import numbers

import pytest
from runs import REPO, accepted

from configurator import settings_of

# argument of train.py, the error's line
REFUSED = [
    ("--batch_size=0", "batch_size is 0: it must be >= 1"),
    ("--max_iters=-0.5", "max_iters is -0.5: it must be >= 0"),
    ("--dist_timeout_s=0", "dist_timeout_s is 0.0: it must be > 0"),
    ("--beta1=1", "beta1 is 1.0: it must be < 1"),
    (f"--seed={10**400}", "seed is too large: it must be < 2**63"),
    ("--nproc=1025", "nproc is 1025: it must be <= 1024"),
    ("--zero=4", "zero is 4; choose from 0 | 1 | 2 | 3"),
    ("--grad_sync=", "grad_sync is ''; choose from auto | last | every | never"),
    ("--out_dir=s3://k:p@b", "out_dir is s3://b: set the path of a folder on a disk"),
    ("--eval_datasets=a,s3://b/c", "eval_datasets is a,s3://b/c: set the path of a folder on a disk"),
]


@pytest.mark.parametrize("script", ["train.py", "bench.py"])
def test_values_out_of_range_are_refused_all_at_once(capsys, script):
    """bench.py also accepts train.py's settings."""
    arguments, said = zip(*REFUSED, strict=True)
    with pytest.raises(SystemExit):
        accepted(script, *arguments, extra=settings_of(REPO / "train.py"))
    lines = [line.removeprefix("error: ") for line in capsys.readouterr().err.splitlines()]
    assert sorted(lines) == sorted(said)


@pytest.mark.parametrize("script", ["train.py", "sample.py", "bench.py"])
def test_every_number_has_a_range_that_contains_its_default(script):
    settings = settings_of(REPO / script)
    for name, setting in settings.items():
        assert not setting.problem(setting.default)
        is_number = isinstance(setting.default, numbers.Real) and not isinstance(setting.default, bool)
        assert setting.range or not is_number, name
