"""The neighbours: their weights by plain formulas, their score the ordinary one."""

import math

import pytest
import torch

from dlc_sentinel.correction import LOSSES, Batch, EngineList, Hidden, Weight

F64 = torch.float64
NUM, H, V = 12, 4, 9
OFFSETS = torch.tensor([0, 5, 12])


def random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def make(*, has_prox=True, engine=None):
    """(source, batch, logp now [N])."""
    hidden, output = random(0, NUM, H).requires_grad_(), random(1, V, H)
    token = torch.arange(NUM) % V
    now = (hidden @ output.T).log_softmax(1).gather(1, token[:, None]).squeeze(1)
    prox = now.detach() - 0.3 * random(2, NUM)
    batch = Batch.packed(
        token,
        random(4, NUM),
        offsets_S1=OFFSETS,
        gen_logp_N=prox,
        engine_logp_N=prox - 0.6 * random(3, NUM),
        prox_logp_N=prox if has_prox else None,
        engine=engine,
    )
    return Hidden(hidden, output), batch, now


def behave(name, log_ratio):
    ratio = log_ratio.exp()
    if name == "tis":
        return ratio.clamp(max=2.0)
    if name == "decoupled_ppo":
        return ratio.clamp(max=5.0)
    if name == "icepop":
        return torch.where((ratio >= 0.5) & (ratio <= 5.0), ratio, 0.0)
    whole = torch.cat([log_ratio[a:b].sum().exp().expand(b - a) for a, b in ((0, 5), (5, 12))])
    return torch.where(whole <= 2.0, whole, 0.0)


@pytest.mark.parametrize(
    ("name", "has_prox"),
    [
        ("tis", True),
        ("tis", False),
        ("sequence_mis", True),
        ("sequence_mis", False),
        ("icepop", True),
        ("icepop", False),
        ("decoupled_ppo", True),
    ],
)
def test_its_gradient_is_its_weight_times_the_ordinary_score(name, has_prox):
    source, batch, now = make(has_prox=has_prox)
    prox = batch.prox_logp_M if has_prox else now.detach()
    ratio, advantage = (now.detach() - prox).exp(), batch.advantage_M
    clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) != ratio * advantage
    weight = behave(name, prox - batch.engine_logp_M) * torch.where(clipped, 0.0, ratio)

    out = LOSSES[name](source, batch)

    want = torch.autograd.grad(-(weight * advantage * now).sum() / NUM, source.hidden)[0]
    assert torch.allclose(out.weight_M, weight, rtol=1e-12)
    assert torch.allclose(torch.autograd.grad(out.loss, source.hidden)[0], want, rtol=0, atol=1e-14)
    assert out.metrics.centring == "none"
    assert 0.0 < float(out.metrics.clip_share) < 1.0 or (name == "sequence_mis" and not has_prox)


def test_every_loss_takes_the_same_arguments():
    source, batch, _ = make()

    losses = {
        name: loss(source, batch, denominator=5.0, chunk_tokens=4, temperature=1.0) for name, loss in LOSSES.items()
    }

    assert list(losses) == ["dlc", "tis", "sequence_mis", "icepop", "decoupled_ppo"]
    assert all(math.isfinite(out.loss.item()) for out in losses.values())
    assert {frozenset(out.metrics.as_dict()) for out in losses.values()} == {frozenset(losses["dlc"].metrics.as_dict())}


def test_the_ladder_of_a_neighbour_is_of_the_total_ratio_and_that_of_dlc_of_the_lag():
    source, batch, now = make()

    tis, dlc = (LOSSES[name](source, batch).metrics.log_ratio_rms.item() for name in ("tis", "dlc"))

    assert tis == pytest.approx((now.detach() - batch.engine_logp_M).square().mean().sqrt().item())
    assert dlc == pytest.approx((now.detach() - batch.gen_logp_M).square().mean().sqrt().item())


def test_on_a_kept_support_the_ordinary_score_is_that_of_the_renormalised_policy():
    source, plain, _ = make()
    index = torch.stack((plain.token_M, (plain.token_M + 1) % V, (plain.token_M + 4) % V), 1)
    kept = EngineList(index, torch.full((NUM, 3), math.log(1 / 3), dtype=F64), whole_support=True)
    source, batch, _ = make(engine=kept)
    logits = source.hidden @ source.output_VH.T
    now = logits.gather(1, plain.token_M[:, None]).squeeze(1) - logits.gather(1, index).logsumexp(1)

    out = LOSSES["icepop"](source, batch, weight=Weight("one"), ppo=Weight("one"))

    want = torch.autograd.grad(-(batch.advantage_M * now).sum() / NUM, source.hidden)[0]
    assert torch.allclose(out.logp_M, now, rtol=0, atol=1e-12)
    assert torch.allclose(torch.autograd.grad(out.loss, source.hidden)[0], want, rtol=0, atol=1e-14)


def test_a_missing_stream_is_named():
    source, batch, _ = make(has_prox=False)
    bare = Batch.packed(batch.token_M, batch.advantage_M, offsets_S1=OFFSETS)

    with pytest.raises(ValueError, match="no prox_logp"):
        LOSSES["decoupled_ppo"](source, batch)
    with pytest.raises(ValueError, match="tis_loss: the batch has no engine_logp"):
        LOSSES["tis"](source, bare)
