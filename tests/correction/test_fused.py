"""Chunks and the gradient written by hand, against autograd on whole logits."""

from dataclasses import replace

import pytest
import torch

from dlc_sentinel.correction import Batch, EngineFull, EngineList, Hidden, Logits, Weight, centred_scores, dlc_loss

F64 = torch.float64
TOKENS, HIDDEN, VOCAB, LISTED = 7, 4, 11, 3


def random(seed, *shape, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def on_support(logp_NV, index_NK):
    """Log-probabilities renormalised on the listed tokens, -9 elsewhere: nothing reads them there."""
    return torch.full_like(logp_NV, -9.0).scatter(1, index_NK, logp_NV.gather(1, index_NK).log_softmax(1))


def make(dtype=F64, *, num=TOKENS, width=HIDDEN, vocab=VOCAB, listed=LISTED, whole=False, full=False, has_gen=True):
    """(source, batch): the generator and the engine are the trainer with noise; rows of unequal length."""
    hidden, output = random(0, num, width), random(1, vocab, width) / width**0.5
    gen_NV = (hidden @ output.T + 0.3 * random(2, num, vocab)).log_softmax(1)
    mu_NV = (gen_NV + 0.2 * random(3, num, vocab)).log_softmax(1)
    token = torch.randint(vocab, (num,), generator=torch.Generator().manual_seed(4))
    index = gen_NV.topk(listed, 1).indices
    token = torch.where(torch.arange(num) % 2 == 0, index[:, 0], token)
    if whole:
        token, mu_NV, gen_NV = index[:, 1], on_support(mu_NV, index), on_support(gen_NV, index)
    gen = gen_NV if has_gen else None
    engine = EngineList(
        index, mu_NV.gather(1, index), gen_NV.gather(1, index) if has_gen else None, whole_support=whole
    )
    batch = Batch.packed(
        token,
        random(5, num, dtype=dtype),
        offsets_S1=torch.tensor([0, 1, 1, num // 2, num]),
        gen_logp_N=gen_NV.gather(1, token[:, None]).squeeze(1),
        engine_logp_N=mu_NV.gather(1, token[:, None]).squeeze(1),
        engine=EngineFull(mu_NV, gen) if full else engine,
    )
    return Hidden(hidden.to(dtype).requires_grad_(), output.to(dtype).requires_grad_()), batch


def gradients(source, batch, **settings):
    leaves = [source.hidden, source.output_VH] + ([] if source.bias_V is None else [source.bias_V])
    return torch.autograd.grad(dlc_loss(source, batch, **settings).loss, leaves)


def read_q(source, batch, **settings):
    """q of every token, [M, V], read off the gradient of the logits."""
    logits = (source.hidden.detach() @ source.output_VH.detach().T).requires_grad_()
    scored = centred_scores(Logits(logits), batch, **settings)
    grad = torch.autograd.grad(scored.score_M.sum(), logits)[0]
    return torch.nn.functional.one_hot(batch.token_M, logits.shape[1]) - grad, scored


@pytest.mark.parametrize("case", [{"full": True, "has_gen": False}, {"whole": True, "has_gen": False}])
def test_gradcheck_holds_where_the_centre_is_fixed(case):
    source, batch = make(**case)
    bias = random(6, VOCAB).requires_grad_()

    def scores(hidden, output, bias_V):
        return centred_scores(Hidden(hidden, output, bias_V), batch, chunk_tokens=3, temperature=0.8).score_M

    assert torch.autograd.gradcheck(scores, (source.hidden, source.output_VH, bias))


def test_without_centring_the_score_has_the_gradient_of_the_log_probability():
    source, batch = make()
    plain = Batch.packed(batch.token_M, batch.advantage_M, offsets_S1=batch.offsets_S1, gen_logp_N=batch.gen_logp_M)

    logp_NV = (source.hidden @ source.output_VH.T / 0.8).log_softmax(1)
    logp = logp_NV.gather(1, batch.token_M[:, None]).squeeze(1)
    got = torch.autograd.grad(centred_scores(source, plain, temperature=0.8).score_M.square().sum(), source.hidden)[0]

    values = centred_scores(source, plain, temperature=0.8).score_M.detach()
    want = torch.autograd.grad((2 * values * logp).sum(), source.hidden)[0]
    assert torch.allclose(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", [{}, {"full": True}, {"whole": True}, {"has_gen": False}])
@pytest.mark.parametrize("horizon", [1.0, 2.0, float("inf")])
def test_chunked_and_naive_gradients_agree_to_1e_6_in_float32(reference, case, horizon):
    shape = {"num": 61, "width": 16, "vocab": 97, "listed": 8}
    weight = Weight("truncate", high=1.3, horizon=horizon)
    wide, wide_batch = make(**shape, **case)
    q, scored = read_q(wide, wide_batch, weight=weight)
    logits = wide.hidden @ wide.output_VH.T
    pull = scored.weight_M * wide_batch.advantage_M
    loss = reference.surrogate(logits, wide_batch.token_M, q, pull, wide_batch.num_tokens)
    want = torch.autograd.grad(loss, (wide.hidden, wide.output_VH))

    source, batch = make(torch.float32, **shape, **case)
    got = gradients(source, batch, weight=weight, chunk_tokens=8)

    for one, other in zip(got, want, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).abs().max() < 1e-6
        assert other.abs().max() > 1e-2


@pytest.mark.parametrize("case", [{}, {"full": True}, {"whole": True}])
def test_the_size_of_the_chunks_changes_nothing(case):
    source, batch = make(**case)

    whole, parts = gradients(source, batch), gradients(source, batch, chunk_tokens=2)

    assert all(torch.allclose(one, other, rtol=0, atol=1e-14) for one, other in zip(whole, parts, strict=True))


@pytest.mark.parametrize("case", [{}, {"full": True}, {"whole": True}])
def test_logits_get_the_gradient_that_hidden_states_get(case):
    source, batch = make(**case)
    bias = random(6, VOCAB).requires_grad_()
    source = Hidden(source.hidden, source.output_VH, bias)
    leaves = [source.hidden, source.output_VH, bias]
    through = dlc_loss(Logits(source.hidden @ source.output_VH.T + bias), batch, temperature=0.7)

    want = torch.autograd.grad(through.loss, leaves)

    got = dlc_loss(source, batch, temperature=0.7)
    assert got.loss.item() == pytest.approx(through.loss.item(), abs=1e-13)
    for one, other in zip(torch.autograd.grad(got.loss, leaves), want, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-13)


def test_the_loss_is_the_value_of_the_surrogate(reference):
    source, batch = make()
    q, scored = read_q(source, batch)
    pull = scored.weight_M * batch.advantage_M

    got = dlc_loss(source, batch).loss.item()

    assert got == pytest.approx(
        reference.surrogate(source.hidden @ source.output_VH.T, batch.token_M, q, pull, TOKENS).item(), abs=1e-12
    )


@pytest.mark.parametrize("case", [{}, {"full": True}])
def test_bfloat16_input_is_computed_in_float32(case):
    source, batch = make(torch.bfloat16, **case)
    same = Hidden(source.hidden.float().detach().requires_grad_(), source.output_VH.float().detach().requires_grad_())

    got, want = gradients(source, batch), gradients(same, batch)

    for one, other in zip(got, want, strict=True):
        assert one.dtype == torch.bfloat16
        assert torch.equal(one, other.to(torch.bfloat16))


def test_a_half_precision_matrix_wider_than_one_slice_is_read_whole(monkeypatch):
    from dlc_sentinel.correction import source as source_module

    source, batch = make(torch.bfloat16)
    want = gradients(source, batch)
    monkeypatch.setattr(source_module, "CAST_ROWS", 4)

    got = gradients(source, batch)

    assert all(torch.allclose(one, other, rtol=2e-2, atol=1e-3) for one, other in zip(got, want, strict=True))


@pytest.mark.parametrize("case", [{}, {"full": True}])
def test_autocast_does_not_reach_inside(case):
    source, batch = make(torch.float32, **case)
    want, loss = gradients(source, batch), dlc_loss(source, batch).loss.item()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, loss_inside = gradients(source, batch), dlc_loss(source, batch).loss.item()

    assert loss_inside == loss
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))


def test_a_frozen_output_matrix_gets_no_gradient_and_the_hidden_states_theirs():
    source, batch = make()
    frozen = Hidden(source.hidden, source.output_VH.detach())

    dlc_loss(frozen, batch).loss.backward()

    assert frozen.output_VH.grad is None
    assert torch.allclose(source.hidden.grad, gradients(source, batch)[0], rtol=0, atol=1e-14)


def test_a_confident_list_with_almost_no_tail_keeps_its_digits_in_float32():
    logits = torch.tensor([[12.0, -2.0, -2.0, -3.0]])
    index = torch.tensor([[0]])
    mu = torch.log(torch.tensor([[0.99]]))
    batch = Batch.packed(
        torch.tensor([0]), torch.ones(1), offsets_S1=torch.tensor([0, 1]), engine=EngineList(index, mu)
    )
    leaf = logits.clone().requires_grad_()

    dlc_loss(Logits(leaf), batch, weight=Weight("one")).loss.backward()

    tail = 0.01 * logits.double()[0, 1:].softmax(0)
    assert torch.allclose(leaf.grad.double(), torch.cat((torch.tensor([-0.01], dtype=F64), tail))[None], rtol=1e-5)


@pytest.mark.parametrize("case", [{"full": True}, {"listed": VOCAB}, {"listed": 1}])
def test_where_every_weight_of_a_prefix_is_masked_the_gradient_is_zero_and_not_nan(case):
    source, batch = make(**case)
    far = replace(batch.engine, gen_logp=batch.engine.gen_logp - 50.0)
    batch = replace(batch, gen_logp_M=batch.gen_logp_M - 50.0, engine=far)

    grads = gradients(source, batch, weight=Weight("mask", 0.5, 2.0))

    assert all(not grad.any() for grad in grads)


def test_positions_that_do_not_match_the_batch_are_refused():
    source, batch = make()

    with pytest.raises(ValueError, match="6 positions, the batch 7; drop the last position"):
        dlc_loss(Hidden(source.hidden[1:], source.output_VH), batch)
    with pytest.raises(ValueError, match=r"wanted \[V, 4\]"):
        dlc_loss(Hidden(source.hidden, source.output_VH[:, 1:]), batch)
    with pytest.raises(ValueError, match="ids from 1 to 10 in a vocabulary of 5"):
        dlc_loss(Hidden(source.hidden, source.output_VH[:5]), batch)
    with pytest.raises(ValueError, match="both must be positive"):
        dlc_loss(source, batch, temperature=0.0)
    with pytest.raises(ValueError, match="positive number of tokens"):
        dlc_loss(source, batch, denominator=0.0)
    with pytest.raises(ValueError, match=r"EngineFull\.logp is 11 wide"):
        dlc_loss(Hidden(source.hidden, source.output_VH[:10]), make(full=True)[1])


@pytest.mark.parametrize("case", [{}, {"full": True}])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_make_the_loss_nan_and_raise_nothing_so_that_the_stack_skips_the_step(bad, case):
    source, batch = make(**case)
    logits = (source.hidden @ source.output_VH.T).detach()
    logits[5, 2] = bad

    assert torch.isnan(dlc_loss(Logits(logits), batch, chunk_tokens=2).loss)


def test_logits_of_masked_positions_may_be_nan():
    logits = random(0, 4, VOCAB)
    logits[1] = float("nan")
    token, mask = torch.arange(4), torch.tensor([True, False, True, True])
    batch = Batch.packed(token, torch.ones(4), offsets_S1=torch.tensor([0, 4]), mask_N=mask)

    assert torch.isfinite(dlc_loss(Logits(logits), batch, weight=Weight("one")).loss)


@pytest.mark.parametrize("case", [{}, {"full": True}, {"whole": True}])
def test_a_logit_of_minus_infinity_is_a_token_that_cannot_be_sampled(case):
    source, batch = make(**case)
    logits = (source.hidden @ source.output_VH.T).detach()
    taken = torch.cat((batch.token_M[:, None], make()[1].engine.index[:, :1]), 1)
    ruled_out = torch.ones_like(logits).scatter(1, taken, 0.0).argmax(1, keepdim=True)
    low, none = (logits.scatter(1, ruled_out, value).requires_grad_() for value in (-1e4, -float("inf")))

    want, got = dlc_loss(Logits(low), batch), dlc_loss(Logits(none), batch)

    assert got.loss.item() == pytest.approx(want.loss.item(), abs=1e-12)
    for one, other in zip(torch.autograd.grad(got.loss, none), torch.autograd.grad(want.loss, low), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_an_engine_distribution_of_nan_is_refused():
    source, batch = make(full=True)
    logp = batch.engine.logp.clone()
    logp[3, 0] = float("nan")

    with pytest.raises(ValueError, match="EngineFull: no centre can be made at 1 of 7 kept tokens"):
        dlc_loss(source, replace(batch, engine=EngineFull(logp, batch.engine.gen_logp)))
