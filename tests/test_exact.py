"""With `exact`, a run has the same bits on any number of processes."""

import itertools
import re
from functools import partial

import numpy as np
import pytest
import torch
import torch._dynamo
from edits import edited_train
from runs import TINY, column, default_plan, records, script_that_fails, start_changed, tiny_data
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from isogpt.parallel.compare_weights import weights_digest
from isogpt.parallel.gradients import make_sums
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.shares import PADDING, share_of_whole
from isogpt.training import muon, precision
from isogpt.training.optim import AdamW
from model import GPT, GPTConfig

# rates of a recipe for short runs, at which one process and two differ by 1e-2 after 15 steps
MUON = (
    "--arch=nanochat --optimizer=muon --muon_lr=0.045 --learning_rate=1e-2 --embedding_lr=0.3 --beta1=0.8 "
    "--beta2=0.99 --lr_schedule=linear --min_lr=0.0 --warmup_iters=5"
)
MODELS = {
    "nanochat-muon": MUON,
    "gpt2": "--bias=True",
    "experts": "--arch=llama --n_expert=4",
    "dropout": f"{MUON} --dropout=0.1",
    "bfloat16": f"{MUON} --dtype=bfloat16",
    "float16": "--bias=True --dtype=float16",
}
EXACT = "--exact=True --batch_size=4 --gradient_accumulation_steps=6 --eval_iters=5 --save_checkpoint=False"
# processes and flags; the second row is tried with one model only
LAYOUTS = ["1", "3", "2 --zero=1", "3 --zero=3", "4 --zero=3 --dp_replicate=2", "2 --pp=2"]
MORE_LAYOUTS = ["7", "5 --zero=1", "2 --zero=2", "1 --zero=3", "2 --zero=2 --dp_replicate=2"]
MORE_LAYOUTS += ["4 --pp=2 --pp_schedule=gpipe --zero=1"]
NUMBERS = ("iter", "loss", "grad_norm", "train_loss", "val_loss", "weights", "router_entropy")


def numbers_of(folder):
    """Every number of a run's steps and evaluations that must not depend on the layout."""
    numbers = [{k: r[k] for k in NUMBERS if k in r} for r in records(folder) if "event" not in r]
    # the last evaluation of a launch may be repeated by the next one
    return [one for one, following in zip(numbers, [*numbers[1:], {}], strict=True) if one != following]


def same_numbers(folder, *others):
    """The numbers of the runs are equal, bit for bit."""
    expected = numbers_of(folder)
    assert expected and any("weights" in record for record in expected)
    for other in others:
        assert numbers_of(other) == expected, other.name


# ------------------------------------------------------------------------------------------------------------
# whole runs


def test_three_layouts_have_the_bits_of_one_process(zygote, work):
    """
    Muon at the shipped rates, dropout and padding micro-batches; DDP, ZeRO-1 and 3. The shapes are no
    multiples of a vector, so that shards cut vectors.
    """
    args = f"{MUON} {EXACT} --n_embd=36 --n_head=3 --vocab_size=67 --dropout=0.1".split()
    # without exact, 2 ranks would compute 2 micro-batches of 3 rows each, in a step and in an evaluation
    args += ["--gradient_accumulation_steps=3", "--eval_iters=3", "--max_iters=11", "--eval_interval=6"]
    text = zygote.train([*args, "--out_dir=one"], work).text()
    assert "may differ" not in zygote.train([*args, "--out_dir=ddp"], work, 3).text()
    zygote.train([*args, "--out_dir=zero1", "--zero=1"], work, 2)
    zygote.train([*args, "--out_dir=zero3", "--zero=3"], work, 3)
    same_numbers(work / "one", *(work / name for name in ("ddp", "zero1", "zero3")))
    digests = column(work / "one", "weights")
    assert re.search(rf"^weights: SHA-256 {digests[12]} before step 12$", text, re.M)
    assert len(set(digests.values())) == 3 and all(re.fullmatch("[0-9a-f]{12}", d) for d in digests.values())


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_run_that_goes_on_on_every_layout_has_the_bits_of_one_process(
    zygote, session_work, trained, tmp_path, model
):
    """Two steps on each, with evaluations."""
    args = f"{EXACT} {MODELS[model]} --save_checkpoint=True --eval_interval=2".split()
    # see rules_of_exact
    takes_pp = "nanochat" in model or model == "bfloat16"
    layouts = LAYOUTS + MORE_LAYOUTS if model == "nanochat-muon" else LAYOUTS
    layouts = [layout.split() for layout in layouts if takes_pp or "--pp" not in layout]
    one = numbers_of(trained([*args, f"--max_iters={2 * len(layouts) - 1}"]))
    for number, (processes, *flags) in enumerate(layouts):
        more = [f"--max_iters={2 * number + 1}", "--init_from=auto", f"--out_dir={tmp_path}/out"]
        zygote.train([*args, *flags, *more], session_work, int(processes))
        steps = numbers_of(tmp_path / "out")
        assert steps == one[: len(steps)], (processes, *flags)
    assert len(steps) > 2 * len(layouts)
    resumed = [r["iter"] for r in records(tmp_path / "out") if r.get("event") == "resume"]
    assert resumed == [*range(2, 2 * len(layouts), 2)], "a run that starts again has the same bits"


@pytest.mark.slow
def test_a_step_that_is_skipped_on_one_layout_is_skipped_on_all(zygote, work):
    """The gradients of micro-batch 4 of step 2 are not finite."""
    fault = "scaler.scale(loss)", "scaler.scale(loss * (float('nan') if (step, first) == (2, 4 * 4) else 1))"
    edited_train(work, fault)
    args = f"{EXACT} {MUON} --max_iters=5 --eval_interval=3 --skip_steps=nan".split()
    layouts = ("1", "3 --zero=3", "4 --zero=1", "4 --zero=3 --dp_replicate=2")
    for layout in layouts:
        processes, *flags = layout.split()
        run_args = [*args, *flags, f"--out_dir={layout}"]
        text = zygote.train(run_args, work, int(processes), repo=work).text()
        assert "the step is skipped" in text
        (skipped,) = (r for r in records(work / layout) if r.get("event") == "not_finite")
        assert skipped["iter"] == 2
        assert set(skipped["largest_gradients"].values()) == {"nan"}, "the parameters are named"
    assert 2 not in column(work / layouts[0], "loss")
    same_numbers(*(work / layout for layout in layouts))


# ------------------------------------------------------------------------------------------------------------
# sums without an order


def numbers_of_many_sizes(*shape, seed=0):
    """Numbers that float32 would round differently if they were added in another order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 10.0 ** torch.randint(-9, 1, shape, generator=generator)


def sums_for(share=None, compiles=False):
    """The sums of a single process, of 4 micro-batches, and a small model."""
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=67, block_size=8), seed=1)
    if compiles:
        model.compile(backend="eager")
    args = {"batch_size": 2, "gradient_accumulation_steps": 4, "model_args": model.describe()}
    plan, scaler = default_plan(exact=True, **args), precision.make_scaler("float32", torch.device("cpu"))
    return make_sums(model, model, Mesh(), plan, share or share_of_whole(8, 0, 1, 2), scaler)


def step_of(sums, *micro_batches):
    """
    A step whose micro-batches have these gradients: a number for all parameters, or one for each element.
    Returns the gradient and its squared norm.
    """
    params = list(sums.model.parameters())
    sums.start_step()
    for number, values in enumerate(micro_batches):
        with sums.micro_batch(is_last=number == len(micro_batches) - 1):
            values = torch.as_tensor(values).expand(sum(p.numel() for p in params))
            for p, grad in zip(params, values.split([p.numel() for p in params]), strict=True):
                p.grad = grad.view_as(p).clone()
    sums.finish()
    return torch.cat([p.grad.flatten() for p in params]), sum(sums.norm_share())


def test_sums_have_no_order_and_round_once():
    sums = sums_for()
    n = sum(p.numel() for p in sums.model.parameters())
    terms = [numbers_of_many_sizes(n, seed=seed) for seed in range(4)]
    first, square = step_of(sums, *terms)
    for order in itertools.permutations(terms):
        assert torch.equal(step_of(sums, *order)[0], first)
    true_sum = torch.stack(terms).double().sum(0)
    assert ((first - true_sum).abs() <= 2.0**-24 * true_sum.abs() + 4 * 2.0**-51).all()
    assert (step_of(sums, *4 * [0.75 * 2.0**-50])[0] == 4 * 2.0**-50).all(), "rounded, not cut"
    assert float(square) == pytest.approx(float(first.double().square().sum()), rel=1e-9)
    for seed in range(8):
        places = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
        assert step_of(sums, *(term[places] for term in terms))[1] == square, "wherever an element is"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1025.0, -1e30])
def test_what_does_not_fit_counts_as_not_finite(bad):
    """The largest of 4 micro-batches' elements is 2^12 / 4."""
    sums = sums_for()
    for value, is_finite in ((1023.0, True), (bad, False), (1.0, True)):  # the next step starts again
        grad, square = step_of(sums, 1.0, 1.0, value, 1.0)
        assert square.isfinite() == is_finite
        assert (grad == 3 + value).all() if is_finite else grad.isnan().all()


def test_padding_adds_nothing_even_if_it_is_not_finite():
    share = share_of_whole(4, 0, 1, 2, pp=4)  # 2 micro-batches and 2 of padding
    grad, square = step_of(sums_for(share), 1.0, 1.0, torch.nan, torch.nan)
    assert (grad == 2).all() and square.isfinite()


def test_compiled_sums_have_the_same_bits(monkeypatch):
    """Without compilation in a further step."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    expected, compiled, graphs = sums_for(), sums_for(compiles=True), []
    n = sum(p.numel() for p in expected.model.parameters())
    for step in range(3):
        terms = [numbers_of_many_sizes(n, seed=10 * step + number) for number in range(4)]
        (one, square), (two, other) = step_of(expected, *terms), step_of(compiled, *terms)
        assert torch.equal(one, two) and square == other
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0 and len({*graphs}) == 1
    assert step_of(compiled, 1.0, torch.inf, 1.0, 1.0)[0].isnan().all()
    torch._dynamo.reset()


def test_micro_batches_are_dealt_whole():
    starts = np.arange(14)
    for ranks in (1, 2, 3, 7, 9):
        shares = [share_of_whole(14, rank, ranks, 2) for rank in range(ranks)]
        picked = [share.pick(starts, step) for step in range(shares[0].micro_steps) for share in shares]
        assert np.concatenate(picked[:7]).tolist() == list(range(14))
        assert all((rows == PADDING).all() for rows in picked[7:])
        firsts = [share.first(step) for step in range(shares[0].micro_steps) for share in shares]
        assert firsts == list(range(0, 2 * len(firsts), 2))
    assert share_of_whole(14, 0, 2, 2, pp=3).micro_steps == 6


# ------------------------------------------------------------------------------------------------------------
# optimizers


def test_a_fused_step_on_a_shard_has_the_bits_of_the_whole():
    """Fused AdamW rounds the elements that do not fill a vector differently, wherever a shard ends."""

    values = [numbers_of_many_sizes(4003, seed=seed) for seed in range(3)]

    def stepped(start, end, exact=True):
        p = torch.nn.Parameter(values[0][start:end].clone())
        p.grad = values[1][start:end].clone()
        adamw = AdamW([p], lr=0.1, exact=exact)
        moments = {"exp_avg": values[2][start:end].clone(), "exp_avg_sq": p.grad.square()}
        adamw.state[p] = {"step": torch.tensor(3.0)} | moments
        adamw.step()
        return torch.stack((p.detach(), *(adamw.state[p][name] for name in moments)))

    whole = stepped(0, 4003)
    for start in range(0, 4003, 13):
        end = min(start + 13, 4003)
        assert torch.equal(stepped(start, end), whole[:, start:end])
    assert stepped(5, 5).numel() == 0
    usual = stepped(0, 4003, exact=False)
    assert (whole - usual).abs().max() < 1e-6


@pytest.mark.parametrize("shape, rows", [((36, 12), (12, 12, 12)), ((96, 384), (96,)), ((144, 36), (144,))])
def test_muon_does_not_depend_on_the_matrices_beside_it(shape, rows):
    """A batch of a different size can be multiplied by a different kernel: each batch is one matrix."""
    sizes = set()

    class NoteSizes(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if operator.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm):
                sizes.add(len(args[-1]))
            return operator(*args, **kwargs or {})

    values = torch.randn(7, *shape, generator=torch.Generator().manual_seed(0))

    def stepped(chosen):
        params = [torch.nn.Parameter(values[i].clone()) for i in chosen]
        for i, p in zip(chosen, params, strict=True):
            p.grad = values[-i].clone()
        optimizer = muon.Muon([{"params": params, "rows": rows, "weight_decay": 0.1}], 0.1, exact=True)
        with NoteSizes():
            optimizer.step()
        return dict(zip(chosen, params, strict=True))

    together = stepped(range(7))
    for chosen in ([3], [0, 5], [2, 3, 4, 6]):
        for i, p in stepped(chosen).items():
            assert torch.equal(p, together[i])
    assert sizes == {1}


# ------------------------------------------------------------------------------------------------------------
# digests, seeds, and what a user is told


def test_the_digest_depends_on_every_weight_but_not_on_the_sign_of_zero():
    def digest(name, value):
        model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=16, block_size=8), seed=1)
        model.transformer.wpe.weight.data[0, 0] = 0.0
        model.get_parameter(name).data.view(-1)[0] = value
        return weights_digest(model, Mesh())

    names = ("transformer.wpe.weight", "transformer.wte.weight", "transformer.ln_f.weight")
    unchanged = digest(names[0], 0.0)
    assert unchanged == digest(names[0], -0.0)
    assert len({unchanged, *(digest(name, 0.123) for name in names)}) == 4


def test_other_hardware_is_said(zygote, work):
    changes = 'os.environ["OMP_NUM_THREADS"] = str(1 + (os.environ["RANK"] == "2"))'
    text = start_changed(zygote, changes, ["--exact=True", "--max_iters=0"], work, 3).wait().text()
    assert re.search(r"rank 0 computes on .+, 1 thread, rank 2 on .+, 2 threads: bits may differ", text)


INEXACT = (
    *("--tp=2", "--cp=2", "--ep=2 --n_expert=4", "--layout=auto", "--shares=2,1", "--grad_compression=int8"),
    *("--islands=2", "--grad_sync=last", "--cuda_graphs=True", "--cpu_offload=True --zero=3"),
    *("--pp=2 --zero=3", "--pp=2 --pp_schedule=zbv", "--pp=2 --dropout=0.1"),
)


@pytest.mark.parametrize("flags", INEXACT)
def test_what_cannot_be_exact_gets_one_message(at, capsys, flags):
    tiny_data(at.path)
    out = script_that_fails(at, capsys, "train.py", [*TINY, "--exact=True", *flags.split()])
    lines = [line for line in out.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and re.fullmatch(r"error: exact: .*: set --.*, or --exact=False", lines[0])
