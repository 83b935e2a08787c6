"""What the method claims, on policies small enough to enumerate: float64, exact."""

from dataclasses import replace

import pytest
import torch

from dlc_sentinel.correction import (
    Batch,
    EngineFull,
    EngineList,
    Hidden,
    Logits,
    Weight,
    centred_scores,
    dlc_loss,
    tis_loss,
)

F64 = torch.float64
WEIGHTS = {
    "one": Weight("one"),
    "unclipped": Weight("unclipped"),
    "truncate": Weight("truncate", high=1.2),
    "mask": Weight("mask", low=0.7, high=1.3),
    "ppo": Weight("ppo", low=0.8, high=1.2),
}


def random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def one_prefix(seed=1, num_vocab=5):
    """(z_now, z_gen, z_engine) at one prefix, [V] each."""
    z_gen = random(seed, num_vocab)
    return z_gen + 0.5 * random(seed + 1, num_vocab), z_gen, z_gen + 0.3 * random(seed + 2, num_vocab)


def every_token(z_now, z_gen, z_engine, advantage_V, *, kind="full", weight=WEIGHTS["unclipped"], **settings):
    """(gradient [V] at the prefix, loss): every token of the vocabulary once, each with its advantage."""
    num = len(z_now)
    mu, gen = z_engine.log_softmax(0), z_gen.log_softmax(0)
    full = EngineFull(mu.expand(num, num), gen.expand(num, num))
    listed = EngineList(torch.arange(num).expand(num, num), full.logp, full.gen_logp, whole_support=kind == "support")
    batch = Batch.packed(
        torch.arange(num),
        advantage_V,
        offsets_S1=torch.arange(num + 1),
        gen_logp_N=gen,
        engine=full if kind == "full" else listed,
    )
    z = z_now.clone().requires_grad_()
    out = dlc_loss(Logits(z.expand(num, num)), batch, weight=weight, denominator=1.0, **settings)
    out.loss.backward()
    return z.grad, out


def centre(z_now, z_gen, z_engine, token, *, engine=None, weight=WEIGHTS["unclipped"]):
    """(q [V], scored) at one prefix, read off the gradient of one token's score."""
    mu, gen = z_engine.log_softmax(0), z_gen.log_softmax(0)
    engine = engine or EngineFull(mu[None], gen[None])
    streams = {"gen_logp_N": gen[token][None], "engine_logp_N": mu[token][None], "engine": engine}
    batch = Batch.packed(torch.tensor([token]), torch.ones(1), offsets_S1=torch.tensor([0, 1]), **streams)
    z = z_now.clone().requires_grad_()
    out = centred_scores(Logits(z[None]), batch, weight=weight)
    out.score_M.sum().backward()
    return torch.nn.functional.one_hot(torch.tensor(token), len(z)).to(F64) - z.grad, out


def tree_gradient(tree, now, gen, engine, advantage_N, *, weight, is_centred=True):
    """Minus the loss's gradient in the logit table, [P, V], summed over every sequence."""
    rows = tree.prefix_N
    full = EngineFull(engine.log_softmax(1)[rows], gen.log_softmax(1)[rows])
    batch = Batch.packed(
        tree.token_N,
        advantage_N,
        offsets_S1=tree.offsets_S1,
        gen_logp_N=tree.logp_N(gen),
        engine=full if is_centred else None,
    )
    table = now.clone().requires_grad_()
    dlc_loss(Logits(table[rows]), batch, weight=weight, denominator=1.0).loss.backward()
    return -table.grad


@pytest.fixture
def tree(reference):
    return reference.Tree()


# T1
@pytest.mark.parametrize("kind", ["full", "list", "support"])
def test_an_engine_equal_to_the_trainer_leaves_the_ordinary_policy_gradient(kind):
    z, advantage = random(0, 6), random(1, 6)
    want = -torch.diag(advantage) @ (torch.eye(6, dtype=F64) - z.softmax(0))

    got, _ = every_token(z, z, z, advantage, kind=kind)

    assert torch.allclose(got, want.sum(0), rtol=0, atol=1e-12)


def test_a_short_list_of_an_engine_equal_to_the_trainer_leaves_the_ordinary_policy_gradient():
    z = random(0, 6)
    top = z.log_softmax(0).topk(2)
    engine = EngineList(top.indices[None], top.values[None], top.values[None])

    q, _ = centre(z, z, z, token=4, engine=engine)

    assert torch.allclose(q, z.softmax(0), rtol=0, atol=1e-12)


# T2
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("form", list(WEIGHTS))
@pytest.mark.parametrize("kind", ["full", "list", "support"])
def test_the_weighted_score_has_mean_zero_under_the_engine_also_where_the_clip_bites(kind, form, sign):
    now, gen, engine = one_prefix()
    mu = engine.softmax(0)

    mean, out = every_token(now, gen, engine, sign * mu, kind=kind, weight=WEIGHTS[form])

    assert mean.abs().max() < 1e-12
    assert (float(out.metrics.clip_share) > 0) == (form in ("truncate", "mask", "ppo"))
    assert out.metrics.centring == "nu"


def test_the_unclipped_centre_does_not_fit_a_clipped_weight():
    now, gen, engine = one_prefix()
    mu, ratio = engine.softmax(0), (now.log_softmax(0) - gen.log_softmax(0)).exp()
    nu = mu * ratio

    mean = ((mu * ratio.clamp(max=1.2))[:, None] * (torch.eye(5, dtype=F64) - nu / nu.sum())).sum(0)

    assert mean.abs().max() > 1e-2


@pytest.mark.parametrize("kind", ["full", "list"])
@pytest.mark.parametrize("form", list(WEIGHTS))
def test_with_block_weights_the_score_has_mean_zero_given_the_rest_of_the_block(kind, form):
    now, gen, engine = one_prefix()
    num, first = 5, 0.3
    weight = Weight(WEIGHTS[form].form, WEIGHTS[form].low, WEIGHTS[form].high, horizon=2.0)
    mu, gen_logp = engine.log_softmax(0), gen.log_softmax(0)
    lag_of_first = now.log_softmax(0)[0] - first
    gen_logp_N = torch.stack((lag_of_first.expand(num), gen_logp), 1).ravel()
    token_N = torch.stack((torch.zeros(num, dtype=torch.int64), torch.arange(num)), 1).ravel()
    engine = EngineFull(mu.expand(2 * num, num), gen_logp.expand(2 * num, num))
    if kind == "list":
        engine = EngineList(torch.arange(num).expand(2 * num, num), engine.logp, engine.gen_logp)
    advantage = torch.stack((torch.zeros(num), mu.exp()), 1).ravel()
    batch = Batch.packed(token_N, advantage, offsets_S1=torch.arange(num + 1) * 2, gen_logp_N=gen_logp_N, engine=engine)
    z = now.clone().requires_grad_()

    dlc_loss(Logits(z.expand(2 * num, num)), batch, weight=weight, denominator=1.0).loss.backward()

    assert z.grad.abs().max() < 1e-12


# T3
@pytest.mark.parametrize("form", list(WEIGHTS))
def test_a_baseline_of_the_prefix_changes_nothing(form):
    now, gen, engine = one_prefix()
    mu, advantage = engine.softmax(0), 1.0 + random(7, 5).abs()

    plain, _ = every_token(now, gen, engine, mu * advantage, weight=WEIGHTS[form])
    shifted, _ = every_token(now, gen, engine, mu * (advantage + 3.0), weight=WEIGHTS[form])

    assert torch.allclose(plain, shifted, rtol=0, atol=1e-12)


def test_without_centring_a_baseline_of_the_prefix_moves_the_update(tree):
    now, engine = tree.table(0), tree.table(0) + tree.table(1, 0.3)
    weight_S = tree.row_logp_S(engine).exp().repeat_interleave(tree.length)

    moved = tree_gradient(tree, now, now, engine, weight_S, weight=WEIGHTS["one"], is_centred=False)
    centred = tree_gradient(tree, now, now, engine, weight_S, weight=WEIGHTS["one"])

    assert moved.abs().max() > 1e-2
    assert centred.abs().max() < 1e-12


# T4
def test_at_zero_lag_it_is_the_exact_gradient_of_the_engines_return(tree):
    theta, xi, reward_S = tree.table(0), tree.table(1, 0.3), random(2, len(tree.rows))
    advantage_N = (tree.row_logp_S(theta + xi).exp() * reward_S).repeat_interleave(tree.length)

    got = tree_gradient(tree, theta, theta, theta + xi, advantage_N, weight=WEIGHTS["unclipped"])

    want = tree.numeric_gradient(lambda table: tree.value(table + xi, reward_S), theta)
    assert torch.allclose(got, want, rtol=0, atol=1e-8)
    assert want.abs().max() > 0.05


# T5
def test_the_unclipped_centre_is_the_engine_at_the_trainers_weights():
    now, gen, _ = one_prefix()
    xi = random(9, 5)

    q, _ = centre(now, gen, gen + xi, token=2)

    assert torch.allclose(q, (now + xi).softmax(0), rtol=0, atol=1e-12)


# T6
def test_with_row_weights_over_their_normaliser_it_is_the_exact_gradient_at_the_trainers_weights(tree):
    gen, xi, reward_S = tree.table(0), tree.table(1, 0.3), random(2, len(tree.rows))
    now = gen + tree.table(3, 0.4)
    z_P = (gen + xi).softmax(1).mul((now.log_softmax(1) - gen.log_softmax(1)).exp()).sum(1)
    norm_S = z_P[tree.prefix_N].reshape(-1, tree.length).prod(1)
    advantage_S = tree.row_logp_S(gen + xi).exp() * reward_S
    whole_row = Weight("unclipped", horizon=float("inf"))

    exact = tree_gradient(
        tree, now, gen, gen + xi, (advantage_S / norm_S).repeat_interleave(tree.length), weight=whole_row
    )
    lag_only = tree_gradient(tree, now, gen, gen + xi, advantage_S.repeat_interleave(tree.length), weight=whole_row)

    want = tree.numeric_gradient(lambda table: tree.value(table + xi, reward_S), now)
    assert torch.allclose(exact, want, rtol=0, atol=1e-8)
    assert 1e-4 < (lag_only - want).norm() / want.norm() < 0.2


# T7
@pytest.mark.parametrize("kind", ["full", "list", "support"])
def test_a_constant_added_to_the_logits_changes_no_gradient_and_gradients_sum_to_zero(kind):
    now, gen, engine = one_prefix()
    advantage = random(5, 5)

    plain, _ = every_token(now, gen, engine, advantage, kind=kind, weight=WEIGHTS["truncate"])
    shifted, _ = every_token(now + 11.0, gen - 4.0, engine + 2.0, advantage, kind=kind, weight=WEIGHTS["truncate"])

    assert torch.allclose(plain, shifted, rtol=0, atol=1e-12)
    assert abs(float(plain.sum())) < 1e-12


# T8
@pytest.mark.parametrize("num_listed", [1, 3, 6])
@pytest.mark.parametrize("seed", range(5))
def test_at_zero_lag_a_list_errs_by_at_most_twice_the_mass_it_leaves_out(num_listed, seed):
    z = random(seed, 12)
    engine = z + 0.8 * random(seed + 50, 12)
    mu = engine.log_softmax(0)
    index = mu.topk(num_listed).indices

    q, out = centre(z, z, engine, int(index[0]), engine=EngineList(index[None], mu[index][None]), weight=WEIGHTS["one"])

    error, mass = float((q - mu.exp()).abs().sum()), 1 - float(mu[index].exp().sum())
    assert 0.0 < error <= 2 * mass
    assert float(out.metrics.tail_mass) == pytest.approx(mass)
    assert float(out.metrics.tail_bound) == pytest.approx(2 * mass)


@pytest.mark.parametrize("seed", range(8))
def test_with_a_truncated_lag_the_error_of_a_list_stays_under_the_published_bound(seed):
    z_gen = random(seed, 12)
    now, engine = z_gen + 0.7 * random(seed + 20, 12), z_gen + 0.5 * random(seed + 50, 12)
    mu, gen = engine.log_softmax(0), z_gen.log_softmax(0)
    index, weight = mu.topk(4).indices, Weight("truncate", high=1.5)
    exact, _ = centre(now, z_gen, engine, int(index[0]), weight=weight)

    listed = EngineList(index[None], mu[index][None], gen[index][None])
    q, out = centre(now, z_gen, engine, int(index[0]), engine=listed, weight=weight)

    assert 0.0 < float((q - exact).abs().sum()) <= float(out.metrics.tail_bound) < 2.0


# T9
@pytest.mark.parametrize("token", [0, 11])
@pytest.mark.parametrize("has_gen", [True, False])
@pytest.mark.parametrize("form", list(WEIGHTS))
def test_the_closed_form_is_the_autograd_gradient_of_the_surrogate_with_the_tail_model(reference, form, has_gen, token):
    z_gen = random(3, 12)
    now, engine = z_gen + 0.4 * random(4, 12), z_gen + 0.3 * random(5, 12)
    mu, gen, weight = engine.log_softmax(0), z_gen.log_softmax(0), WEIGHTS[form]
    index = torch.tensor([3, 0, 7])  # token 0 is listed, token 11 is not
    listed = EngineList(index[None], mu[index][None], gen[index][None] if has_gen else None)

    got, out = centre(now, z_gen, engine, token, engine=listed, weight=weight)

    known = index if token in index else torch.cat((index, torch.tensor([token])))
    q = reference.list_q(
        now.log_softmax(0), known, mu[known].exp(), gen[known] if has_gen else None,
        lambda log_ratio: reference.weight_of(weight.form, weight.low, weight.high, log_ratio, 1.0),
    )  # fmt: skip
    z = now.clone().requires_grad_()
    reference.surrogate(z[None], torch.tensor([token]), q[None], torch.ones(1), 1.0).backward()
    want = torch.nn.functional.one_hot(torch.tensor(token), 12) + z.grad
    assert torch.allclose(got, want, rtol=0, atol=1e-12)
    assert torch.allclose(got, q, rtol=0, atol=1e-12)
    assert out.metrics.centring == ("nu" if has_gen or form == "one" else "nu=mu")
    assert float(out.metrics.centred_bias_l1) == pytest.approx(float((q - now.softmax(0)).abs().sum()), abs=1e-12)


@pytest.mark.parametrize("kind", ["full", "list"])
@pytest.mark.parametrize("form", ["unclipped", "truncate"])
def test_a_token_that_neither_engine_nor_generator_could_produce_has_no_part_in_the_centre(kind, form):
    now, gen, engine = one_prefix()
    gen[3] = engine[3] = -torch.inf
    mu, gen_logp = engine.log_softmax(0)[None], gen.log_softmax(0)[None]
    listed = EngineList(torch.arange(5)[None], mu, gen_logp)

    q, _ = centre(now, gen, engine, 2, engine=listed if kind == "list" else None, weight=WEIGHTS[form])

    kept = torch.tensor([0, 1, 2, 4])
    ratio = (now.log_softmax(0) - gen.log_softmax(0))[kept].exp()
    nu = engine.softmax(0)[kept] * (ratio.clamp(max=1.2) if form == "truncate" else ratio)
    assert torch.allclose(q[kept], nu / nu.sum(), rtol=0, atol=1e-12)
    assert float(q[3]) == 0.0


# T10
def test_on_a_kept_support_the_score_has_mean_zero_and_no_gradient_leaves_the_support():
    now, gen, engine = one_prefix(num_vocab=8)
    kept = torch.tensor([6, 1, 4])
    mu, gen_logp = engine[kept].log_softmax(0), gen[kept].log_softmax(0)
    listed = EngineList(kept.expand(3, 3), mu.expand(3, 3), gen.log_softmax(0)[kept].expand(3, 3), whole_support=True)
    batch = Batch.packed(kept, mu.exp(), offsets_S1=torch.arange(4), engine=listed)
    z = now.clone().requires_grad_()

    out = dlc_loss(Logits(z.expand(3, 8)), batch, weight=Weight("truncate", high=1.1), denominator=1.0)
    out.loss.backward()

    ratio = (now[kept].log_softmax(0) - gen_logp).exp()
    assert torch.allclose(out.weight_M, ratio.clamp(max=1.1), rtol=0, atol=1e-12)
    assert float(out.metrics.clip_share) > 0
    assert z.grad.abs().max() < 1e-12
    one = torch.autograd.grad(dlc_loss(Logits(z.expand(3, 8)), replace(batch, advantage_M=torch.eye(3)[1])).loss, z)[0]
    assert set(one.nonzero().ravel().tolist()) == set(kept.tolist())
    assert float(out.metrics.tail_mass) == 0.0
    assert float(out.metrics.log_ratio_rms) == pytest.approx(float(ratio.log().square().mean().sqrt()))
    nu = mu.exp() * ratio.clamp(max=1.1)
    bias = float((nu / nu.sum() - now[kept].softmax(0)).abs().sum())
    assert float(out.metrics.centred_bias_l1) == pytest.approx(bias, abs=1e-12)


def test_on_a_kept_support_without_a_snapshot_the_lag_is_from_the_batchs_own_values():
    now, gen, engine = one_prefix(num_vocab=8)
    kept = torch.tensor([6, 1, 4])
    listed = EngineList(kept.expand(3, 3), engine[kept].log_softmax(0).expand(3, 3), whole_support=True)
    gen_logp = gen[kept].log_softmax(0)
    batch = Batch.packed(kept, torch.ones(3), offsets_S1=torch.arange(4), gen_logp_N=gen_logp, engine=listed)

    out = dlc_loss(Logits(now.expand(3, 8)), batch, weight=WEIGHTS["unclipped"])

    assert torch.allclose(out.weight_M, (now[kept].log_softmax(0) - gen_logp).exp(), rtol=0, atol=1e-12)
    assert out.metrics.centring == "nu=mu"


# T11
def test_a_discrepancy_that_follows_the_weights_costs_an_error_in_proportion(tree):
    theta, xi, reward_S = tree.table(0), tree.table(1, 0.3), random(2, len(tree.rows))
    advantage_N = (tree.row_logp_S(theta + xi).exp() * reward_S).repeat_interleave(tree.length)
    mixing = random(5, tree.shape[1], tree.shape[1])
    got = tree_gradient(tree, theta, theta, theta + xi, advantage_N, weight=WEIGHTS["unclipped"])

    def error(eps):
        def value(table):
            return tree.value(table + xi + eps * (table - theta) @ mixing, reward_S)

        return float((got - tree.numeric_gradient(value, theta)).norm())

    assert error(0.0) < 1e-8
    assert error(0.2) / error(0.1) == pytest.approx(2.0, rel=1e-6)
    assert error(0.1) > 1e-3


# T12
def test_the_score_divides_by_the_temperature():
    now, gen, engine = one_prefix()
    advantage = random(5, 5)

    hot, _ = every_token(now * 0.7, gen, engine, advantage, weight=WEIGHTS["truncate"], temperature=0.7)
    plain, _ = every_token(now, gen, engine, advantage, weight=WEIGHTS["truncate"])

    assert torch.allclose(hot, plain / 0.7, rtol=0, atol=1e-12)
    assert plain.abs().max() > 0.1


def test_the_temperature_also_divides_where_the_logits_come_from_hidden_states():
    hidden, output, bias = random(0, 1, 4).requires_grad_(), random(1, 6, 4), random(2, 6)
    batch = Batch.packed(torch.tensor([3]), torch.ones(1), offsets_S1=torch.tensor([0, 1]), gen_logp_N=torch.zeros(1))
    weight = Weight("one")

    got = torch.autograd.grad(
        dlc_loss(Hidden(hidden, output, bias), batch, weight=weight, temperature=0.7).loss, hidden
    )
    scaled = dlc_loss(Hidden(hidden, output / 0.7, bias / 0.7), batch, weight=weight)

    assert torch.allclose(got[0], torch.autograd.grad(scaled.loss, hidden)[0], rtol=0, atol=1e-12)


def test_the_bias_it_reports_is_the_mean_score_that_an_uncentred_loss_leaves(tree):
    now, engine = tree.table(0), tree.table(0) + tree.table(1, 0.3)
    gap_P = (engine.softmax(1) - now.softmax(1)).abs().sum(1)
    rows = tree.prefix_N
    streams = {"offsets_S1": tree.offsets_S1, "gen_logp_N": tree.logp_N(now), "engine_logp_N": tree.logp_N(engine)}
    batch = Batch.packed(tree.token_N, torch.ones(len(rows)), engine=EngineFull(engine.log_softmax(1)[rows]), **streams)

    centred = dlc_loss(Logits(now[rows]), batch).metrics
    plain = tis_loss(Logits(now[rows]), batch).metrics

    assert float(centred.centred_bias_l1) == pytest.approx(float(gap_P[rows].mean()), abs=1e-12)
    assert float(plain.centred_bias_l1) == 0.0
    assert (centred.centring, plain.centring) == ("nu=mu", "none")
