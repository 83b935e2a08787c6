"""The DLC loss inside real verl: the gradient of its actor's logits, a job that learns, and how the lists travel."""

import functools
import importlib
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from dlc_sentinel.integrations import verl_dlc_loss, verl_dlc_topk
from dlc_sentinel.integrations.verl_dlc_topk import TOP_K, VLLM_GENERATE, Piece, columns, lists
from dlc_sentinel.integrations.verl_wraps import Symbol, Wraps
from stacks.verl.support import job as jobs

from dlc_sentinel.errors import ConfigError

COLUMNS = ("rmpad", "lists", "bypass", "kl", "filled", "versions")
CASES = {
    "padded": (False, True, False, False, False, (5, 5)),
    "packed": (True, True, False, False, False, (5, 5)),
    "one row stale": (False, True, False, False, False, (5, 4)),
    "bypass mode": (True, True, True, False, False, (5, 5)),
    "no lists": (False, False, False, False, False, (5, 5)),
    "with a KL loss": (True, True, False, True, False, (5, 5)),
    "filled up": (True, True, False, False, True, (5, 5, 5)),
}
EXACT_SHARE = {"one row stale": 3 / 6, "bypass mode": 0.0}
"""The first row has 4 tokens, one of them masked; the second has 3."""


@pytest.fixture(scope="module")
def batches(warm, tmp_path_factory):
    """Name of a case -> what one micro-batch of it gave, as numpy arrays."""
    folder = tmp_path_factory.mktemp("dlc")
    cases = {name: dict(zip(COLUMNS, values, strict=True)) for name, values in CASES.items()}
    env = jobs.environment(folder, folder, "dlc-batch") | {
        "VERL_CPU_WARM": warm,
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu,dlc_sentinel.integrations.verl_dlc",
    }
    command = [str(jobs.PYTHON), str(jobs.SUPPORT / "dlc_batch.py"), str(folder), json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: np.load(folder / f"{name}.npz") for name in cases}


def softmax(logits, temperature):
    z = np.exp(logits.astype(np.float64) / temperature - (logits / temperature).max(-1, keepdims=True))
    return z / z.sum(-1, keepdims=True)


def expected(seen, exact_R, is_listed):
    """Second implementation, one vector over the vocabulary a token: - w A (e_a - q) / (6 tokens, temperature)."""
    gen_RV, now_RV = (softmax(seen[name], float(seen["temperature"])) for name in ("gen_RV", "now_RV"))
    grad_NV = np.zeros(seen["grad_NV"].shape)
    for r, token in enumerate(seen["responses"]):
        if not seen["response_mask"][r]:
            continue
        mu, now = seen["mu_RV"][r].astype(np.float64), now_RV[r]
        known = gen_RV[r] if exact_R[r] else mu
        weight = np.minimum(now / known, 2.0)
        q = now
        if is_listed:
            best = {*np.argsort(mu)[-int(seen["listed"]) :], token}
            rest = np.array([b not in best for b in range(len(mu))])
            nu = mu * weight
            nu[rest] = mu[rest].sum() * now[rest] / now[rest].sum() * min(now[rest].sum() / known[rest].sum(), 2.0)
            q = nu / nu.sum()
        pull = weight[token] * seen["advantages"][r] / seen["response_mask"].sum() / float(seen["temperature"])
        grad_NV[seen["place_R"][r]] = -pull * (np.eye(len(mu))[token] - q)
    return grad_NV


def exact_rows(name):
    rows = [name != "bypass mode" and version == 5 for version in CASES[name][-1]]
    return np.repeat(rows[:2], (4, 3))


@pytest.mark.slow
@pytest.mark.verl
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_of_the_actors_logits_is_the_closed_form(batches, name):
    want_NV = expected(batches[name], exact_rows(name), CASES[name][1])

    assert np.abs(want_NV).max() > 0.1
    np.testing.assert_allclose(batches[name]["grad_NV"], want_NV, atol=2e-6)


@pytest.mark.slow
@pytest.mark.verl
def test_the_gradient_reaches_tokens_that_were_not_sampled_where_the_engine_and_the_trainer_differ(batches):
    grad_NV, plain_NV = (batches[name]["grad_NV"] for name in ("padded", "no lists"))
    seen = batches["padded"]
    kept = seen["response_mask"] == 1
    others_RV = np.ones_like(seen["mu_RV"], bool)
    others_RV[np.arange(len(others_RV)), seen["responses"]] = False

    apart_RV = np.abs(grad_NV - plain_NV)[seen["place_R"]]
    assert (np.where(others_RV, apart_RV, 0).max(1)[kept] > 1e-3).all()


@pytest.mark.slow
@pytest.mark.verl
@pytest.mark.parametrize("name", CASES)
def test_what_the_centring_and_the_weight_rest_on_is_told(batches, name):
    told = json.loads(str(batches[name]["metrics"]))

    assert told["actor/dlc/centring"] == (1.0 if CASES[name][1] else 0.0)
    assert told["actor/dlc/lag_exact_share"] == pytest.approx(EXACT_SHARE.get(name, 1.0))
    assert told["actor/dlc/num_tokens"] == 6
    assert np.isnan(told["actor/dlc/tail_mass"]) == (not CASES[name][1])
    assert 0 < told["actor/dlc/clip_share"] < 1


@pytest.mark.slow
@pytest.mark.verl
def test_with_a_kl_loss_the_log_prob_kernel_is_kept_from_writing_over_the_logits(batches):
    assert bool(batches["with a KL loss"]["entropy"]) and not bool(batches["packed"]["entropy"])


LATE = """
import ray
from verl.single_controller.ray.base import RayClassWithInitArgs, create_colocated_worker_cls
from verl.workers.engine_workers import ActorRolloutRefWorker
actor = RayClassWithInitArgs(ray.remote(ActorRolloutRefWorker), config=None, role="actor_rollout")
import dlc_sentinel.integrations.verl_dlc
worker = create_colocated_worker_cls({"actor_rollout": actor})
print(len(ray.cloudpickle.dumps(worker)) > 1000)
"""


@pytest.mark.slow
@pytest.mark.verl
def test_a_driver_that_loads_it_late_can_still_send_its_actors_class(warm, tmp_path):
    env = jobs.environment(tmp_path, tmp_path, "dlc-late") | {"VERL_CPU_WARM": warm}
    done = subprocess.run(
        [str(jobs.PYTHON), "-c", LATE], capture_output=True, text=True, timeout=120, check=False, env=env
    )

    assert done.stdout.split()[-1:] == ["True"], done.stderr[-2000:]


# -- how the lists travel --------------------------------------------------------------------------------------------


def listed(*tokens):
    """Lists of as many positions: each names one token, with a logprob of its own."""
    ids_nK, logp_nK = np.full((len(tokens), TOP_K), -1), np.zeros((len(tokens), TOP_K), np.float32)
    ids_nK[:, 0], logp_nK[:, 0] = tokens, -0.1 * np.arange(1, len(tokens) + 1)
    return ids_nK, logp_nK


def test_the_lists_of_a_sample_stand_at_the_tokens_they_were_made_for():
    sample = [Piece([5, 6], listed(50, 60)), Piece([7], None), Piece([8], listed(80))]

    ids_TK, logp_TK = columns(sample, [5, 6, 99, 99, 7, 8], [1, 1, 0, 0, 1, 1])

    assert ids_TK[:, 0].tolist() == [50, 60, -1, -1, -1, 80] and (ids_TK[:, 1:] == -1).all()
    assert logp_TK[:, 0].tolist() == pytest.approx([-0.1, -0.2, 0, 0, 0, -0.1])


def test_a_response_cut_to_its_limit_keeps_the_lists_of_what_is_left():
    ids_TK, _ = columns([Piece([5, 6, 7], listed(50, 60, 70))], [5, 6], [1, 1])

    assert ids_TK[:, 0].tolist() == [50, 60]


def test_a_response_that_is_not_what_was_generated_gets_no_list():
    ids_TK, _ = columns([Piece([5, 6], listed(50, 60))], [5, 7], [1, 1])

    assert (ids_TK == -1).all()


def test_vllms_lists_are_read_by_rank_without_what_has_no_mass():
    entries = {4: -2.0, 9: -0.5, 3: -np.inf, **{100 + i: -10.0 - i for i in range(TOP_K)}}

    ids_nK, logp_nK = lists([{token: SimpleNamespace(logprob=x) for token, x in entries.items()}, {}])

    assert ids_nK[0, :3].tolist() == [9, 4, 100] and 3 not in ids_nK[0] and ids_nK[0, -1] == 100 + TOP_K - 3
    assert logp_nK[0, :3].tolist() == [-0.5, -2.0, -10.0]
    assert (ids_nK[1] == -1).all()


@pytest.mark.parametrize(("most", "got"), [(20, 20), (5, 5), (-1, 20)])
@pytest.mark.parametrize("wish", [None, TOP_K])
def test_a_vllm_engine_is_asked_for_as_many_as_it_gives_by_those_who_wish_it(most, got, wish):
    engine = SimpleNamespace(model_config=SimpleNamespace(max_logprobs=most))
    params = SimpleNamespace(logprobs=0, extra_args=wish and {verl_dlc_topk.TOPK: wish})
    seen = []
    generate = verl_dlc_topk._raise_logprobs(lambda self, prompt, params, **_: seen.append(params.logprobs))

    generate(engine, prompt="x", sampling_params=params, request_id="1")

    assert seen == [got if wish else 0]


@pytest.mark.slow
@pytest.mark.vllm
def test_vllms_engine_has_the_entrance_that_is_wrapped():
    python = jobs.REPO / ".venv-vllm" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python} is not there: `make .venv-vllm/.ready` installs a real vLLM")
    code = (
        "import ast, importlib.util as u, json; "
        f"tree = ast.parse(open(u.find_spec('vllm').submodule_search_locations[0] + "
        f"'/{'/'.join(VLLM_GENERATE.module.split('.')[1:])}.py').read()); "
        "(kind,) = [n for n in tree.body if getattr(n, 'name', '') == 'AsyncLLM']; "
        "(f,) = [n for n in kind.body if getattr(n, 'name', '') == 'generate']; "
        "print(json.dumps([a.arg for a in f.args.args]))"
    )
    out = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert VLLM_GENERATE.misfit(json.loads(out.stdout)) == ""


ENGINE = {"use_fused_kernels": False, "ulysses_sequence_parallel_size": 1, "pad_to_length": False}


def loss_set(loss_mode, strategy="fsdp2", distillation=None, **engine):
    """What a training worker is left with that verl gives its loss to."""
    config = SimpleNamespace(policy_loss=SimpleNamespace(loss_mode=loss_mode), strategy=strategy)
    given = functools.partial(max, config=config, distillation_config=distillation)
    worker = SimpleNamespace(engine_config=SimpleNamespace(**ENGINE | engine))
    return given, verl_dlc_loss._set_loss(lambda self, loss_fn: loss_fn)(worker, given)


def test_only_the_loss_of_an_actor_that_asks_for_it_is_replaced():
    given, left = loss_set("vanilla", strategy="megatron")
    assert left is given

    _, left = loss_set("dlc")
    assert isinstance(left, verl_dlc_loss.ActorLoss)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"strategy": "megatron"}, "actor.strategy other than fsdp"),
        ({"use_fused_kernels": True}, "use_fused_kernels"),
        ({"ulysses_sequence_parallel_size": 2}, "ulysses"),
        ({"pad_to_length": True}, "pad_to_length"),
        ({"distillation": "a config"}, "distillation"),
    ],
)
def test_a_job_whose_logits_the_loss_cannot_see_is_refused_at_its_start(setting, said):
    with pytest.raises(ConfigError, match=said):
        loss_set("dlc", **setting)


def test_the_policy_loss_without_scores_says_which_line_is_missing():
    with pytest.raises(ConfigError, match="external_lib=dlc_sentinel"):
        verl_dlc_loss.policy_loss(None, None, None, None)


def test_the_plug_ins_wraps_and_these_stand_beside_each_other_in_a_module_that_comes_later(tmp_path, monkeypatch):
    (tmp_path / "stack_for_two.py").write_text("def f(x):\n    return [x]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    symbol, both = Symbol("stack_for_two", "f", ("x",)), [Wraps(), Wraps()]
    try:
        for name, wraps in zip("ab", both, strict=True):
            wraps.add(symbol, lambda original, name=name: lambda x: [name, *original(x)])

        assert importlib.import_module("stack_for_two").f(1) == ["b", "a", 1]
    finally:
        for wraps in reversed(both):
            wraps.undo()


def test_nothing_is_imported_for_it_where_nobody_asks():
    code = (
        "import sys; import dlc_sentinel.integrations.verl_hook;"
        "print('dlc_sentinel.integrations.verl_dlc' in sys.modules, 'torch' in sys.modules)"
    )
    env = {"DLC_SENTINEL": "", "PATH": ""}
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True, timeout=60)

    assert out.stdout.split() == ["False", "False"]
