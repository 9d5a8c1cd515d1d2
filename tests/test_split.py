"""Models that several ranks divide: faults and messages. The curves: test_layouts.py."""

import re
import signal
from dataclasses import replace

import numpy as np
import pytest
from runs import TINY, column, default_plan, records, same, start_faulty, wait_for
from test_layouts import ONE, WAYS, args_of

from isogpt.checkpoint.search import find_checkpoint
from isogpt.checkpoint.source import open_checkpoint
from isogpt.common.torch_versions import SENDS_TO_ITSELF
from isogpt.parallel.shares import share_of
from isogpt.training.settings import check_plan


@pytest.fixture(scope="module")
def faulty(zygote, shared_work):
    """Start train.py with faults; for one process, only if its folder does not exist yet."""

    def start(model, way, out, args, ok=True, **faults):
        if way != "one" or not (shared_work / out).exists():
            args = [*args_of(model, way), *args, f"--out_dir={out}"]
            return start_faulty(zygote, args, shared_work, WAYS[way][0], **faults).wait(ok=ok)

    return start


# the rank whose loss is not finite, in a pipeline one with the last stage; its data rank and their number
NOT_FINITE = [
    ("gpt2", "fsdp-tp2-pp2", "NAN", 6, (1, 2)),
    ("gpt2", "cp2", "NAN_GRADIENT", 1, (0, 1)),
    ("gpt2-moe", "ep2-fsdp", "NAN", 2, (2, 4)),
    ("gpt2-moe", "ep2-zero1", "NAN_INPUT", 2, (2, 4)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "way", "kind", "rank", "data_rank"), NOT_FINITE)
def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all_ranks(
    faulty, shared_work, model, way, kind, rank, data_rank
):
    """
    The losses of the other steps are those of one process without that step; the rank and its rows are named.
    """
    one, out = f"skipped-{model}", f"{kind}-{way}"
    args = ["--skip_steps=nan", "--max_iters=11", "--save_checkpoint=False", "--seed=1337"]
    faulty(model, "one", one, args, NAN=[5, 0])
    run = faulty(model, way, out, args, **{kind: [5, rank]})
    assert run.text().count("the step is skipped") == 1
    same(column(shared_work / one, "loss"), column(shared_work / out, "loss"), absolute=2e-5)
    assert sorted(column(shared_work / out, "loss")) == [s for s in range(12) if s != 5]
    (event,) = (r for r in records(shared_work / out) if r.get("event") == "not_finite")
    all_ranks = [*range(WAYS[way][0])]
    assert event["iter"] == 5 and event["ranks"] == (all_ranks if kind == "NAN_GRADIENT" else [rank])
    if kind != "NAN_GRADIENT":
        share = share_of(24, *data_rank, 8, 2 if "pp" in way else 1)
        words = np.random.Philox(key=[1337, 0], counter=[0, 0, 0, 5]).random_raw(24)  # of step 5
        starts = words % np.uint64(20000 - 32)
        rows = [int(s) for m in range(share.micro_steps) for s in share.pick(starts, m)]
        assert event["windows"] == {str(rank): rows}


@pytest.mark.slow
def test_weights_that_differ_across_ranks_are_detected(faulty):
    """Ranks 1 and 3 hold the same parts: either one may be right."""
    run = faulty("gpt2", "ddp-tp2", "differ", [], ok=False, DIFFER=[2, 3])
    assert set(run.codes) == {1} and run.text().count("error:") == 1 and "Traceback" not in run.text()
    assert re.search(
        r"step 5: weights differ across ranks: transformer\.wte\.weight differs on rank [13]\n", run.text()
    )


@pytest.mark.slow
@pytest.mark.parametrize(("model", "way"), [("gpt2", "zero1-tp2"), ("gpt2-moe", "ep2-fsdp")])
def test_float16_with_an_overflow_on_one_rank(faulty, shared_work, model, way):
    """The scaler skips the step on all ranks, in the optimizers of all parameters, and halves its scale."""
    one, out = f"float16-{model}", f"float16-{way}"
    args = ["--dtype=float16", "--grad_clip=0"]
    faulty(model, "one", one, args, OVERFLOW=[0, 0])
    faulty(model, way, out, args, OVERFLOW=[0, WAYS[way][0] - 1])
    same(column(shared_work / one, "loss"), column(shared_work / out, "loss"), absolute=5e-3)
    run = open_checkpoint(find_checkpoint(str(shared_work / out))[0]).run
    assert run["isogpt"]["scaler"]["scale"] == 2**15


@pytest.mark.parametrize(
    ("name", "way"), [("SIGKILL", "pp2"), pytest.param("SIGSTOP", "tp2-pp2", marks=pytest.mark.slow)]
)
def test_a_rank_that_is_lost_is_named_and_the_run_resumes(zygote, work, name, way):
    """Rank 1 is lost: the others name it and exit."""
    nproc, flags = WAYS[way]
    args = [*ONE, *flags, "--out_dir=out", "--save_interval=2"]
    patience = ["--dist_timeout_s=15"] if name == "SIGSTOP" else []  # the ranks also meet within this time
    run = zygote.start([*TINY, *args, *patience, "--max_iters=100000"], work, nproc)
    wait_for(lambda: (work / "out/step_00000002/manifest.json").exists() or run.poll())
    run.kill([1], getattr(signal, name))
    others = [r for r in range(nproc) if r != 1]
    wait_for(lambda: run.poll() or all(run.codes[r] is not None for r in others))
    run.kill([1])
    run.wait(ok=False)
    assert [run.codes[r] for r in others] == [1] * len(others), f"{run.codes}:\n{run.text()[-2000:]}"
    for rank in others:
        assert re.search(rf"error: rank {rank} at step \d+, .*rank 1 does not respond", run.text())
    last = max(column(work / "out", "loss")) + 1
    zygote.train([*args, "--init_from=resume", f"--max_iters={last}"], work, nproc)
    assert sorted(column(work / "out", "loss")) == [*range(last + 1)]


# ------------------------------------------------------------------------------------------------------------
# messages

SHAPE = dict(n_layer=2, n_head=4, n_kv_head=0, n_embd=32, block_size=32, vocab_size=65)
DIVIDED = "processes cannot be divided into"
# (processes, degrees, shape, message)
MISTAKES = [
    (4, dict(tp=3), dict(n_head=12, block_size=96), f"4 {DIVIDED} tp 3: start 3 or 6 processes"),
    (4, dict(tp=2, pp=3), dict(n_layer=4), f"4 {DIVIDED} pp 3 x tp 2: start 6 processes"),
    (3, dict(islands=2), {}, f"3 {DIVIDED} islands 2: start 2 or 4 processes"),
    (4, dict(tp=4), dict(n_head=6), "tp is 4: it must divide n_head, 6: set --tp=2"),
    (4, dict(tp=4), dict(n_kv_head=2), "tp is 4: it must divide n_kv_head, 2: set --tp=2"),
    (4, dict(pp=4), {}, "pp_schedule '1f1b' makes 4 stages with pp 4, but n_layer is 2: set --pp=2"),
    (2, dict(pp=2, pp_schedule="zbv"), {}, "n_layer is 2: set --pp=1 or --pp_schedule=1f1b"),
    (2, dict(tp=2), dict(block_size=33), "it must be a multiple of tp, 2: set --block_size=32 or 34"),
    (4, dict(cp=2, tp=2), dict(block_size=36), "a multiple of 2 x cp x tp, 8: set --block_size=32 or 40"),
    (2, dict(cuda_graphs=True), {}, "True, but needs a single process: set --cuda_graphs=False"),
    (1, dict(cuda_graphs=True), dict(n_expert=4), "needs a model without experts: set --cuda_graphs=False"),
    (6, dict(ep=4), dict(n_expert=12), f"6 {DIVIDED} ep 4: start 4 or 8 processes"),
    (4, dict(ep=4), dict(n_expert=6), "ep is 4: it must divide n_expert, 6: set --ep=2"),
    (3, dict(ep=3), {}, "ep is 3, but needs a model with experts: set --ep=1"),
    (1, dict(exact=True, device_type="mps"), {}, "needs float64, which mps lacks: set --exact=False"),
]


@pytest.mark.parametrize(("world_size", "degrees", "shape", "said"), MISTAKES)
def test_degrees_that_do_not_divide(world_size, degrees, shape, said):
    """What the message advises is accepted."""
    plan = default_plan(world_size=world_size, model_args=SHAPE | shape, **degrees)
    with pytest.raises(ValueError) as problem:
        check_plan(plan)
    assert said in str(problem.value) and "\n" not in str(problem.value)
    for name, value in re.findall(r"--(\w+)=(\w+)", said):
        changed = {name: int(value) if value.isdigit() else {"False": False}.get(value, value)}
        settings = {k: v for k, v in changed.items() if k in vars(plan)}
        check_plan(replace(plan, model_args=plan.model_args | changed, **settings))
    for counts in re.findall(r"start ([\d or]+) processes", said):
        for n in counts.split(" or "):
            args = plan.model_args | dict(n_layer=4, n_head=12, block_size=96)
            check_plan(replace(plan, world_size=int(n), model_args=args))


@pytest.mark.skipif(SENDS_TO_ITSELF, reason="torch 2.13 can run it")
def test_a_schedule_that_torch_2_11_cannot_run_on_cpus():
    plan = default_plan(world_size=2, pp=2, pp_schedule="zbv", model_args=SHAPE | dict(n_layer=4))
    with pytest.raises(ValueError, match="cannot run pp_schedule zbv on CPUs: set --pp_schedule=zero_bubble"):
        check_plan(plan)
    check_plan(replace(plan, pp_schedule="zero_bubble"))


def test_a_checkpoint_that_cannot_be_divided(zygote, work):
    """Its shape applies, not the one of the command line: it is known only after all ranks have met."""
    zygote.train(["--out_dir=out", "--max_iters=1"], work)
    args = ["--out_dir=out", "--init_from=resume", "--n_head=4", "--n_layer=4", "--tp=4"]
    run = zygote.train(args, work, 4, ok=False)
    assert run.codes == [1] * 4 and run.text() == "error: tp is 4: it must divide n_head, 2: set --tp=2\n"
