"""With `exact`, a run has the same bits on any number of processes."""

import itertools
import re
from functools import partial

import numpy as np
import pytest
import torch
import torch._dynamo
from runs import TINY, column, default_plan, records, script_that_fails, start_changed, tiny_data
from torch._dynamo.utils import counters

from isogpt.parallel import integer_sums as exact
from isogpt.parallel.compare_weights import weights_digest
from isogpt.parallel.mesh import Mesh
from isogpt.parallel.shares import PADDING, share_of_whole
from isogpt.training import muon, precision
from isogpt.training.optim import AdamW
from model import GPT, GPTConfig

# rates of a recipe for short runs, at which one process and two differ by 1e-2 after 15 steps
MUON = [
    "--arch=nanochat",
    "--optimizer=muon",
    "--muon_lr=0.045",
    "--learning_rate=1e-2",
    "--embedding_lr=0.3",
]
MUON += ["--beta1=0.8", "--beta2=0.99", "--lr_schedule=linear", "--min_lr=0.0", "--warmup_iters=5"]
# shapes that are no multiples of a vector, so that shards cut vectors
ODD = ["--n_embd=36", "--n_head=3", "--vocab_size=67", "--bias=True"]
MODELS = {
    "nanochat-muon": MUON,
    "gpt2": ["--bias=True"],
    "experts": ["--arch=llama", "--n_expert=4"],
    "dropout": [*MUON, "--dropout=0.1"],
    "bfloat16": [*MUON, "--dtype=bfloat16"],
    "float16": ["--bias=True", "--dtype=float16"],
}
EXACT = ["--exact=True", "--batch_size=4", "--gradient_accumulation_steps=6", "--eval_iters=5"]
EXACT += ["--save_checkpoint=False"]
# processes and flags
LAYOUTS = ["1", "2", "3", "7", "2 --zero=1", "5 --zero=1", "2 --zero=2", "3 --zero=3", "1 --zero=3"]
LAYOUTS += ["4 --zero=3 --dp_replicate=2", "2 --zero=2 --dp_replicate=2"]
LAYOUTS += ["2 --pp=2", "4 --pp=2 --pp_schedule=gpipe --zero=1"]
NUMBERS = ("iter", "loss", "grad_norm", "train_loss", "val_loss", "weights", "router_entropy")


def numbers_of(folder):
    """Every number of a run's steps and evaluations that must not depend on the layout."""
    numbers = [{k: r[k] for k in NUMBERS if k in r} for r in records(folder) if "event" not in r]
    # the last evaluation of a launch may be repeated by the next one
    return [one for one, following in zip(numbers, [*numbers[1:], {}], strict=True) if one != following]


def same_numbers(folder, *others):
    """The numbers of the runs are equal, bit for bit; the first difference is shown."""
    expected = numbers_of(folder)
    assert expected and any("weights" in record for record in expected)
    for other in others:
        found = numbers_of(other)
        for one, two in zip(expected, found, strict=True):
            assert one == two, other.name


# ------------------------------------------------------------------------------------------------------------
# whole runs


def test_three_layouts_have_the_bits_of_one_process(zygote, work):
    """Muon at the shipped rates, dropout and padding micro-batches; DDP, ZeRO-1 and 3."""
    args = [*MUON, *ODD[:3], *EXACT, "--dropout=0.1", "--max_iters=11", "--eval_interval=6"]
    # without exact, 2 ranks would compute 2 micro-batches of 3 rows each, in a step and in an evaluation
    args += ["--gradient_accumulation_steps=3", "--eval_iters=3"]
    text = zygote.train([*args, "--out_dir=one"], work).text()
    zygote.train([*args, "--out_dir=ddp"], work, 3)
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
    args = [*EXACT, *MODELS[model], "--save_checkpoint=True", "--eval_interval=2"]
    # see rules_of_exact
    takes_pp = "nanochat" in model or model == "bfloat16"
    layouts = [layout.split() for layout in LAYOUTS if takes_pp or "--pp" not in layout]
    one = numbers_of(trained([*args, f"--max_iters={2 * len(layouts) - 1}"]))
    for number, (processes, *flags) in enumerate(layouts):
        more = [f"--max_iters={2 * number + 1}", "--init_from=auto", f"--out_dir={tmp_path}/out"]
        zygote.train([*args, *flags, *more], session_work, int(processes))
        steps = numbers_of(tmp_path / "out")
        assert steps == one[: len(steps)], (processes, *flags)
    assert len(steps) > 2 * len(layouts)
    resumed = [r["iter"] for r in records(tmp_path / "out") if r.get("event") == "resume"]
    assert resumed == [*range(2, 2 * len(layouts), 2)], "a run that starts again has the same bits"


# A run in which the loss of micro-batch 4 of step 2 is not finite
FAULTY = """
import model
from isogpt.training import precision
now = []
forward, seed_micro_batch = model.GPT.forward, precision.seed_micro_batch
def seeded(seed, step, first, mesh):
    now[:] = step, first
    seed_micro_batch(seed, step, first, mesh)
def faulty(self, *args, **kwargs):
    logits, loss = forward(self, *args, **kwargs)
    if self.training and now == [2, 4 * 4]:
        loss.register_hook(lambda g: g * float("nan"))
    return logits, loss
precision.seed_micro_batch, model.GPT.forward = seeded, faulty
"""


@pytest.mark.slow
def test_a_step_that_is_skipped_on_one_layout_is_skipped_on_all(zygote, work):
    args = [*EXACT, *MUON, "--max_iters=5", "--eval_interval=3", "--skip_steps=nan"]
    layouts = ("1", "2", "3 --zero=3", "4 --zero=1", "4 --zero=3 --dp_replicate=2")
    for layout in layouts:
        processes, *flags = layout.split()
        run_args = [*args, *flags, f"--out_dir={layout}"]
        text = start_changed(zygote, FAULTY, run_args, work, int(processes)).wait().text()
        assert "the step is skipped" in text
        (skipped,) = (r for r in records(work / layout) if r.get("event") == "not_finite")
        assert skipped["iter"] == 2
        assert set(skipped["largest_gradients"].values()) == {"nan"}, "the parameters are named"
    assert 2 not in column(work / layouts[0], "loss")
    same_numbers(*(work / layout for layout in layouts))


# ------------------------------------------------------------------------------------------------------------
# sums without an order


CPU = torch.device("cpu")


def squares(grads):
    convert = exact.Conversions(CPU, compiles=False)
    return torch.stack([part for grad in grads for part in convert(exact.squares_of, grad)]).sum(0)


def gradients(n, seed=0):
    """Numbers of many sizes, which float32 sums in different orders would round differently."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator) * 10.0 ** torch.randint(-9, 1, (n,), generator=generator)


def test_integer_sums_have_no_order_and_round_once():
    terms = [gradients(1000, seed) for seed in range(6)]
    sums = []
    for order in itertools.islice(itertools.permutations(terms), 0, 720, 97):
        totals, values = torch.zeros(1000, dtype=torch.int64), torch.empty(1000)
        for term in order:
            assert exact.add_rounded(totals, term, torch.tensor(1 / exact.UNIT), 2.0**62)
        exact.write_sums(totals, values, torch.tensor(exact.UNIT))
        sums.append(values)
    assert all(torch.equal(values, sums[0]) for values in sums)
    true_sum = torch.stack(terms).double().sum(0)
    assert (sums[0] - true_sum).abs().max() <= 2.0**-24 * true_sum.abs().max()
    assert (sums[0] - true_sum.float()).abs().max() <= 6 * exact.UNIT + true_sum.abs().max() * 2.0**-23


def test_conversions_do_not_depend_on_the_place_in_a_tensor():
    """Vectors of a CPU's instructions and the rest of a tensor are converted alike."""
    integers = torch.randint(-(2**62), 2**62, (1003,), generator=torch.Generator().manual_seed(0))
    expected = torch.from_numpy(integers.numpy().astype(np.float32))
    for start, end in ((0, 1003), (1, 1003), (500, 517), (1002, 1003)):
        part = torch.empty(end - start)
        exact.write_sums(integers[start:end], part, torch.tensor(1.0))
        assert torch.equal(part, expected[start:end])


def test_the_squared_norm_does_not_depend_on_how_elements_are_divided():
    grad = gradients(100_001)
    whole = squares([grad])
    assert torch.equal(sum(squares([part]) for part in grad.split(777)), whole)
    for seed in range(8):
        order = torch.randperm(len(grad), generator=torch.Generator().manual_seed(seed))
        assert torch.equal(squares(grad[order].split(31 + 100 * seed)), whole)
    assert float(whole.sum()) == pytest.approx(float(grad.double().square().sum()), rel=1e-9)
    assert squares([torch.tensor([torch.nan])]).isnan().any()


def sums_for(compiles=False):
    """ExactSums of a single process with 4 micro-batches, and a small model."""
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=16, block_size=8), seed=1)
    if compiles:
        model.compile(backend="eager")
    plan = default_plan(batch_size=2, gradient_accumulation_steps=4, model_args=model.describe())
    scaler = precision.make_scaler("float32", CPU)
    return exact.ExactSums(model, Mesh(), plan, share_of_whole(8, 0, 1, 2), scaler)


def step_of(sums, *values):
    """A step whose micro-batches have these numbers as gradients; returns those of the step."""
    params = list(sums.model.parameters())
    sums.start_step()
    for number, value in enumerate(values):
        with sums.micro_batch(is_last=number == len(values) - 1):
            for p in params:
                p.grad = torch.full_like(p, value)
        assert all(p.grad is None for p in params)
    sums.finish()
    return torch.cat([p.grad.flatten() for p in params])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1025.0, -1e30])
def test_what_does_not_fit_counts_as_not_finite(bad):
    """The largest of 4 micro-batches' elements is 2^12 / 4. The sums take 8 bytes for each parameter."""
    sums = sums_for()
    for value, is_finite in ((1023.0, True), (bad, False), (1.0, True)):  # the next step starts again
        grad = step_of(sums, 1.0, 1.0, value, 1.0)
        assert sums.norm_share()[0].isfinite() == is_finite
        assert (grad == 3 + value).all() if is_finite else grad.isnan().all()
        assert sums.total.nbytes == 8 * len(grad)


def test_padding_adds_nothing_even_if_it_is_not_finite():
    sums = sums_for()
    sums.share = share_of_whole(4, 0, 1, 2, pp=4)  # 2 micro-batches and 2 of padding
    assert (step_of(sums, 1.0, 1.0, torch.nan, torch.nan) == 2).all()
    assert sums.norm_share()[0].isfinite()


def converted(compiles):
    """The bits of all conversions, of several lengths, and how often something was compiled."""
    convert = exact.Conversions(CPU, compiles)
    bits, compiled = [], []
    for step in range(3):
        for n in (4096, 1003, 4096, 777):
            values, totals = gradients(n, step), torch.zeros(n, dtype=torch.int64)
            how = dict(factor=torch.tensor(1 / exact.UNIT), largest=2.0**62)
            fits = [convert(exact.add_rounded, totals, values, **how) for _ in range(2)]
            values[3] = (torch.nan, torch.inf, 2.0**13)[step]
            fits.append(convert(exact.add_rounded, totals.clone(), values, **how))
            sums = torch.empty(n)
            convert(exact.write_sums, totals, sums, factor=torch.tensor(exact.UNIT))
            squared = torch.stack(convert(exact.squares_of, sums)).sum(0)
            bits += [torch.stack([torch.stack(fit).all() for fit in fits]), totals, sums, squared]
        compiled.append(counters["stats"]["unique_graphs"])
    return bits, compiled


def test_compiled_conversions_have_the_same_bits(monkeypatch):
    """Without recompilation for a further length or step."""
    torch._dynamo.reset()
    counters.clear()
    expected, _ = converted(compiles=False)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    bits, graphs = converted(compiles=True)
    assert all(torch.equal(one, two) for one, two in zip(bits, expected, strict=True))
    assert torch.stack(bits[::4]).tolist() == [[True, True, False]] * 12
    assert graphs == [6, 6, 6]  # three functions, for the first length and for all others
    torch._dynamo.reset()


@pytest.mark.parametrize("compiles", [False, True])
def test_gradients_of_many_parameters_are_converted_together(monkeypatch, compiles):
    """A compiled model's by compiled code, in rows. What is large for a CPU's cache is not copied."""
    calls, add_rounded = [], exact.add_rounded

    def noted(totals, values, **how):
        calls.append((values, values.data_ptr()))
        return add_rounded(totals, values, **how)

    monkeypatch.setattr(exact, "add_rounded", noted)
    monkeypatch.setattr(exact, "CHUNK", 100)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    sums = sums_for(compiles=compiles)
    grads = [torch.full_like(p, 3.0) for p in sums.model.parameters()]
    sums.start_step()
    with sums.micro_batch(is_last=True):
        for p, grad in zip(sums.model.parameters(), grads, strict=True):
            p.grad = grad
    n = sum(map(torch.numel, grads))
    if compiles:
        assert [values.shape for values, _ in calls] == [(n // 256, 256), (n % 256,)]
    else:
        assert max(len(values) for values, _ in calls) == 100 * torch.get_num_threads()
        assert {grad.data_ptr() for grad in grads} & {address for _, address in calls}


def test_a_parameter_that_is_not_used_has_no_norm():
    """With FSDP it has no gradient."""
    sums = sums_for()
    sums.start_step()
    sums.units, sums.gradient = [None], None
    for p in sums.model.parameters():
        p.grad = torch.ones_like(p)
    sums.model.transformer.wpe.weight.grad = None
    used = sum(p.numel() for p in sums.model.parameters() if p.grad is not None)
    assert sum(sums.norm_share()) == used


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

    values = [gradients(4003, seed) for seed in range(3)]

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
def test_muon_does_not_depend_on_the_matrices_beside_it(monkeypatch, shape, rows):
    """A batch of a different size can be multiplied by a different kernel: each batch is one matrix."""
    sizes, orthogonalize = set(), muon.orthogonalize

    def noted(x, dtype):
        sizes.add(len(x))
        return orthogonalize(x, dtype)

    monkeypatch.setattr(muon, "orthogonalize", noted)
    values = torch.randn(7, *shape, generator=torch.Generator().manual_seed(0))

    def stepped(chosen):
        params = [torch.nn.Parameter(values[i].clone()) for i in chosen]
        for i, p in zip(chosen, params, strict=True):
            p.grad = values[-i].clone()
        optimizer = muon.Muon([{"params": params, "rows": rows, "weight_decay": 0.1}], 0.1, exact=True)
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
    def digest(change=None):
        model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, vocab_size=16, block_size=8), seed=1)
        model.transformer.wpe.weight.data[0, 0] = 0.0
        if change is not None:
            name, value = change
            model.get_parameter(name).data.view(-1)[0] = value
        return weights_digest(model, Mesh())

    assert digest() == digest(("transformer.wpe.weight", -0.0))
    names = ("transformer.wpe.weight", "transformer.wte.weight", "transformer.ln_f.weight")
    assert len({digest(), *(digest((name, 0.123)) for name in names)}) == 4


def test_other_hardware_is_said():
    first = precision.kind_of_device(torch.device("cpu"))
    assert f", {torch.get_num_threads()} thread" in first
    assert precision.differences_of_devices([first, first]) == []
    (note,) = precision.differences_of_devices([first, first, "a CPU, 64 threads"])
    assert f"rank 0 computes on {first}, rank 2 on a CPU, 64 threads: bits may differ" in note


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
