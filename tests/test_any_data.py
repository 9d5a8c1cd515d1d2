"""A mixture of shards and a file, with windows that begin with a document: the same bits through kills."""

import pytest
from runs import TINY, records
from test_exact import same_numbers

# two sources, of which the larger one is in shards; 11 steps of 120 sequences go beyond the first 1,000
# sequences, over which the sources are spread
MIXTURE = ["--dataset=shards:0.7,file:0.3", "--data_order=documents", "--gradient_accumulation_steps=4"]
MIXTURE += ["--batch_size=30", "--max_iters=10", "--eval_interval=6", "--save_interval=3", "--dropout=0.1"]


@pytest.mark.slow
def test_a_mixture_that_was_killed_on_2_and_3_ranks_has_the_bits_of_one(
    zygote, session_work, trained, tmp_path
):
    args, out = [*MIXTURE, "--exact=True"], tmp_path / "killed"
    one = trained(args)
    args = [*TINY, *args, f"--out_dir={out}", "--init_from=auto"]
    for processes, step in ((2, 4), (3, 8)):
        run = zygote.start(args, session_work, processes)
        assert run.until(lambda text, step=step: f"iter {step}:" in text and any(out.glob("step_*")))
        run.kill()
        run.wait(ok=False)
    zygote.start([*args, "--zero=3"], session_work, 2).wait()
    same_numbers(one, out)
    assert [record.get("event") for record in records(out)].count("resume") == 2
