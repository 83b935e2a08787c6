"""Layouts and what a batch refuses."""

import math

import pytest
import torch

from dlc_sentinel.correction import Batch, EngineFull, EngineList, Hidden, Weight, dlc_loss

F64 = torch.float64
B, T, H, V, K = 3, 5, 4, 9, 2
MASK = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)


def random(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def padded(kind, *, spoil=False, **change):
    """(hidden [B, T, H], output, batch); spoil puts nan at masked positions of every stream."""
    hidden, output = random(0, B, T, H).requires_grad_(), random(1, V, H).requires_grad_()
    logp = random(2, B, T, V).log_softmax(2)
    gen = (logp + 0.2 * random(3, B, T, V)).log_softmax(2)
    index = logp.topk(K, 2).indices
    token = logp.argmax(2)
    streams = {
        "gen_logp_BT": gen.gather(2, token[..., None]).squeeze(2),
        "engine_logp_BT": logp.gather(2, token[..., None]).squeeze(2),
    }
    if spoil:
        streams = {name: stream.masked_fill(~MASK, math.nan) for name, stream in streams.items()}
    listed = EngineList(index, logp.gather(2, index), gen.gather(2, index))
    engine = {"full": EngineFull(logp, gen), "list": listed, "none": None}[kind]
    arguments = {"advantage": random(4, B, T), "mask_BT": MASK, "engine": engine, **streams, **change}
    return hidden, output, Batch.padded(token, **arguments)


def packed_rows(kind, horizon_batch):
    """The same batch, row by row, packed by hand."""
    hidden, output, _ = horizon_batch
    logp = random(2, B, T, V).log_softmax(2)
    gen = (logp + 0.2 * random(3, B, T, V)).log_softmax(2)
    pick = MASK.reshape(-1)
    token, logp_N, gen_N = logp.argmax(2).reshape(-1)[pick], logp.reshape(-1, V)[pick], gen.reshape(-1, V)[pick]
    index = logp_N.topk(K, 1).indices
    listed = EngineList(index, logp_N.gather(1, index), gen_N.gather(1, index))
    batch = Batch.packed(
        token,
        random(4, B, T).reshape(-1)[pick],
        offsets_S1=torch.tensor([0, 3, 3, 8]),
        gen_logp_N=gen_N.gather(1, token[:, None]).squeeze(1),
        engine_logp_N=logp_N.gather(1, token[:, None]).squeeze(1),
        engine={"full": EngineFull(logp_N, gen_N), "list": listed, "none": None}[kind],
    )
    return hidden.reshape(-1, H)[pick], output, batch


@pytest.mark.parametrize("horizon", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("kind", ["full", "list", "none"])
def test_padded_and_packed_batches_give_one_loss_gradient_and_metrics(kind, horizon):
    weight = Weight("truncate", high=1.1, horizon=horizon)
    first = padded(kind, spoil=True)
    second = packed_rows(kind, first)

    one = dlc_loss(Hidden(*first[:2]), first[2], weight=weight, chunk_tokens=2)
    other = dlc_loss(Hidden(*second[:2]), second[2], weight=weight)

    assert one.loss.item() == pytest.approx(other.loss.item(), abs=1e-14)
    leaves = first[:2]
    for got, want in zip(torch.autograd.grad(one.loss, leaves), torch.autograd.grad(other.loss, leaves), strict=True):
        assert torch.allclose(got, want, rtol=0, atol=1e-14)
    assert one.metrics.as_dict() == pytest.approx(other.metrics.as_dict(), nan_ok=True)


def test_masked_positions_get_no_gradient():
    hidden, output, batch = padded("list", spoil=True)

    dlc_loss(Hidden(hidden, output), batch).loss.backward()

    assert not hidden.grad[~MASK].any()
    assert hidden.grad[MASK].abs().amin(1).gt(0).all()


def test_a_packed_mask_takes_tool_tokens_out_and_closes_the_gap():
    mask = torch.tensor([1, 0, 1, 1, 0], dtype=torch.bool)

    batch = Batch.packed(torch.arange(5), torch.arange(5.0), offsets_S1=torch.tensor([0, 3, 5]), mask_N=mask)

    assert batch.offsets_S1.tolist() == [0, 2, 3]
    assert batch.token_M.tolist() == [0, 2, 3]
    assert batch.advantage_M.tolist() == [0.0, 2.0, 3.0]


def test_an_advantage_per_row_is_every_tokens():
    by_row = Batch.packed(torch.arange(5), torch.tensor([2.0, -1.0]), offsets_S1=torch.tensor([0, 2, 5]))
    in_padding = padded("none", advantage=torch.tensor([2.0, 0.0, -1.0]))[2]

    assert by_row.advantage_M.tolist() == [2.0, 2.0, -1.0, -1.0, -1.0]
    assert in_padding.advantage_M.tolist() == [2.0] * 3 + [-1.0] * 5


def test_a_batch_with_no_kept_token_has_loss_zero_a_gradient_of_zeros_and_nan_metrics():
    hidden, output, batch = padded("list", mask_BT=torch.zeros(B, T, dtype=torch.bool))

    out = dlc_loss(Hidden(hidden, output), batch)
    out.loss.backward()

    assert out.loss.item() == 0.0
    assert not hidden.grad.any()
    assert not output.grad.any()
    metrics = out.metrics.as_dict()
    assert metrics.pop("dlc/num_tokens") == 0.0
    metrics.pop("dlc/centring")
    assert all(math.isnan(value) for value in metrics.values())


def test_the_denominator_is_the_kept_tokens_unless_given():
    hidden, output, batch = padded("list")

    mean, total = (dlc_loss(Hidden(hidden, output), batch, denominator=d).loss.item() for d in (None, 1.0))

    assert total == pytest.approx(8 * mean)


@pytest.mark.parametrize("fill", [math.nan, 0.0])
def test_empty_slots_of_a_list_count_for_nothing(fill):
    hidden, output, batch = padded("list")
    wide = EngineList(
        *(torch.nn.functional.pad(part, (1, 2), value=value) for part, value in (
            (batch.engine.index, -1), (batch.engine.logp, fill), (batch.engine.gen_logp, fill))),
    )  # fmt: skip
    streams = {"gen_logp_N": batch.gen_logp_M, "engine_logp_N": batch.engine_logp_M, "offsets_S1": batch.offsets_S1}
    rows = hidden.reshape(-1, H)[MASK.reshape(-1)]

    loose = dlc_loss(Hidden(rows, output), Batch.packed(batch.token_M, batch.advantage_M, engine=wide, **streams))

    tight = dlc_loss(Hidden(hidden, output), batch)
    for got, want in zip(*(torch.autograd.grad(out.loss, (hidden, output)) for out in (loose, tight)), strict=True):
        assert torch.allclose(got, want, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"advantage": torch.zeros(B, T + 1)}, r"advantage has shape \(3, 6\) but the tokens \(3, 5\)"),
        ({"advantage": torch.zeros(B, 1)}, r"advantage has shape \(3, 1\) .* or one per row, shape \(3,\)"),
        (
            {"advantage": torch.full((B,), math.nan)},
            "advantage is not finite at 8 of 8 kept tokens.*standard deviation",
        ),
        ({"gen_logp_BT": torch.full((B, T), math.nan)}, "gen_logp is not finite at 8 of 8 kept tokens.*kept set"),
        ({"gen_logp_BT": torch.ones(B, T)}, "gen_logp is above 0 at 8 of 8 kept tokens, up to 1; wanted log-prob"),
        ({"engine_logp_BT": torch.full((B, T), 0.01)}, "engine_logp is above 0 at 8 of 8 kept tokens, up to 0.01;"),
        ({"prox_logp_BT": -torch.full((B, T), -2.0)}, "prox_logp is above 0"),
        ({"engine": EngineList(torch.rand(B, T, K), torch.full((B, T, K), -2.0))}, "EngineList.index is torch.float32"),
        ({"mask_BT": torch.ones(B)}, "use Batch.packed"),
        ({"engine": EngineFull(torch.zeros(B, V))}, r"EngineFull.logp has shape \(3, 9\)"),
        ({"engine": EngineList(torch.zeros(B, T, K), torch.zeros(B, T, K + 1))}, "EngineList.index has shape"),
        ({"engine": EngineList(torch.zeros(B, T, K).long(), torch.full((B, T, K), -2.0))}, "listed twice"),
        ({"engine": EngineList(torch.arange(K).expand(B, T, K), torch.zeros(B, T, K))}, "sum to 2.0000"),
        ({"engine": EngineList(torch.arange(K).expand(B, T, K), torch.full((B, T, K), math.nan))}, "index -1 where"),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused_with_the_numbers(change, match):
    with pytest.raises(ValueError, match=match):
        padded("none", **change)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_token_ids_that_are_no_integers_are_refused(dtype):
    with pytest.raises(ValueError, match=f"token is {dtype}; wanted token ids of an integer dtype"):
        Batch.packed(torch.ones(5, dtype=dtype), torch.zeros(5), offsets_S1=torch.tensor([0, 5]))


def test_a_masked_position_may_hold_what_is_no_logprob_and_a_kept_one_what_rounding_makes_of_zero():
    above = torch.full((B, T), 1e-3).masked_fill(~MASK, 7.0)

    assert padded("none", gen_logp_BT=above, engine_logp_BT=above, prox_logp_BT=above)[2].num_tokens == 8


def test_an_advantage_of_another_number_of_rows_is_told_how_many_there_are():
    with pytest.raises(ValueError, match=r"shape \(3,\) but the tokens \(5,\).*or one per row, shape \(2,\)"):
        Batch.packed(torch.arange(5), torch.zeros(3), offsets_S1=torch.tensor([0, 2, 5]))


def test_offsets_that_do_not_cut_the_tokens_are_refused():
    for offsets in ([0, 4], [1, 5], [0, 3, 2, 5]):
        with pytest.raises(ValueError, match="wanted cu_seqlens"):
            Batch.packed(torch.arange(5), torch.zeros(5), offsets_S1=torch.tensor(offsets))


def test_what_a_loss_lacks_it_names_with_the_next_move():
    hidden, output, batch = padded("none")
    rare = EngineList(torch.full((8, 1), 8), torch.full((8, 1), -3.0))
    token, rows = torch.zeros(8, dtype=torch.int64), hidden.reshape(-1, H)[MASK.reshape(-1)]

    def loss(**streams):
        offsets = torch.tensor([0, 8])
        return dlc_loss(Hidden(rows, output), Batch.packed(token, torch.zeros(8), offsets_S1=offsets, **streams))

    with pytest.raises(ValueError, match="has no gen_logp"):
        loss()
    with pytest.raises(ValueError, match="outside the list at 8 of 8 kept tokens and the batch has no engine_logp"):
        loss(gen_logp_N=torch.zeros(8), engine=rare)
    with pytest.raises(ValueError, match="declared the whole support"):
        loss(gen_logp_N=torch.zeros(8), engine=EngineList(rare.index, rare.logp, whole_support=True))
    with pytest.raises(ValueError, match="no token is listed"):
        loss(gen_logp_N=torch.zeros(8), engine=EngineList(rare.index[:, :0], rare.logp[:, :0]))
    assert batch.num_tokens == 8
