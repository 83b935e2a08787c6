"""A packed micro-batch of verl's as the correction's Batch: where each response token is, and who generated it.

Axes: B rows, T response tokens (padded), N positions of the packed micro-batch, R response tokens (packed), K listed.
verl and torch are imported inside: only an actor rank comes here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlc_sentinel.integrations import verl_batch
from dlc_sentinel.integrations.verl_dlc_topk import IDS, LOGP

from dlc_sentinel.records import UNKNOWN_VERSION

if TYPE_CHECKING:
    from dlc_sentinel.correction import Batch, EngineList

GEN = "dlc_gen_logp"
"""Column that the old_log_probs pass adds, [N, K+1] nats: the trainer at the listed tokens, then at the sampled one."""


class Rows:
    """The response tokens of a packed micro-batch, R in all, and their places among its N positions."""

    def __init__(self, data: Any) -> None:
        import torch
        from verl.workers.utils.padding import no_padding_2_padding

        self._data = data
        responses = data["responses"]
        if responses.is_nested:
            self._length_B = responses.offsets().diff()
        else:
            self._length_B = data["attention_mask"][:, data["prompts"].shape[1] :].sum(1)
        input_ids = data["input_ids"]
        num = len(input_ids.values())
        place_BT = no_padding_2_padding(torch.arange(num, device=input_ids.device), data)
        self.valid_BT = torch.arange(place_BT.shape[1], device=input_ids.device) < self._length_B[:, None]
        self.place_R = place_BT[self.valid_BT]
        """The position whose logits predict the token."""
        self.row_R = self.valid_BT.nonzero()[:, 0]

    def has(self, name: str) -> bool:
        return name in self._data.keys()  # noqa: SIM118  # a TensorDict answers `in` for its rows

    def take(self, name: str) -> Any:
        """A column of the batch, [R] or [R, K]."""
        import torch

        column = self._data[name]
        if not column.is_nested:
            return column[self.valid_BT]
        if bool((column.offsets().diff() == self._length_B).all()):
            return column.values()
        # verl fills a batch up with short rows that keep the columns it does not know of the row they are copied from.
        return torch.cat([row[:num] for row, num in zip(column.unbind(), self._length_B.tolist(), strict=True)])

    def take_noted(self) -> Any:
        """The column GEN, [R, K+1]."""
        from verl.workers.utils.padding import no_padding_2_padding

        return no_padding_2_padding(self._data[GEN], self._data)[self.valid_BT]

    def spread(self, value_R: Any, fill: float, num: int) -> Any:
        """The same values among all N positions."""
        value_N = value_R.new_full((num, *value_R.shape[1:]), fill)
        value_N[self.place_R] = value_R
        return value_N


def batch_of(data: Any, num: int, delivered: int) -> tuple[Batch, float]:
    """(batch, share of its tokens whose lag is exact) of a packed micro-batch with `num` positions.

    delivered: version of the weights that old_log_probs is of.
    """
    from dlc_sentinel.correction import Batch

    rows = Rows(data)
    mask_R = rows.take("response_mask").bool()
    engine_R = rows.take("rollout_log_probs").float() if rows.has("rollout_log_probs") else None
    exact_R, gen_R, listed = _generator(rows, _is_fresh(data, delivered), mask_R, engine_R)
    columns = {"gen_logp_N": gen_R} | ({} if engine_R is None else {"engine_logp_N": engine_R})
    batch = Batch.packed(
        rows.spread(rows.take("responses"), 0, num),
        rows.spread(rows.take("advantages").float(), 0.0, num),
        offsets_S1=data["input_ids"].offsets(),
        mask_N=rows.spread(mask_R, False, num),
        engine=None if listed is None else _spread_list(rows, listed, num),
        **{name: rows.spread(value_R, 0.0, num) for name, value_R in columns.items()},
    )
    return batch, float((exact_R & mask_R).sum() / mask_R.sum().clamp(min=1))


def _is_fresh(data: Any, delivered: int) -> list[bool]:
    """Of each row, whether all its tokens are of the weights that were last delivered."""
    facts = verl_batch.row_facts(data, len(data["input_ids"].offsets()) - 1)
    return [fact.is_uniform and fact.newest == delivered != UNKNOWN_VERSION for fact in facts]


def _generator(rows: Rows, fresh_B: list[bool], mask_R: Any, engine_R: Any) -> tuple[Any, Any, EngineList | None]:
    """(exact [R], gen_logp [R], list [R, K]): what is known of the policy that generated the tokens.

    Exact where old_log_probs is of the generator's weights. Elsewhere the engine stands in for it, at the list too:
    the weight is then the total ratio, and centring with that same weight stays unbiased.
    """
    import torch

    from dlc_sentinel.correction import EngineList

    old_R = rows.take("old_log_probs").float()
    exact_R = torch.tensor(fresh_B, device=old_R.device)[rows.row_R]
    if engine_R is None:
        return exact_R, old_R, None
    if bool((old_R == engine_R)[mask_R].all()):
        exact_R = torch.zeros_like(exact_R)  # bypass mode: a copy of the engine's
    if not rows.has(IDS) or not bool((rows.take(IDS)[mask_R] >= 0).any()):
        return exact_R, torch.where(exact_R, old_R, engine_R), None
    logp_RK = rows.take(LOGP)
    noted_RL = rows.take_noted() if rows.has(GEN) else torch.cat((logp_RK, engine_R[:, None]), 1)
    exact_R = exact_R & rows.has(GEN)
    gen_RK = torch.where(exact_R[:, None], noted_RL[:, :-1], logp_RK)
    return exact_R, torch.where(exact_R, noted_RL[:, -1], engine_R), EngineList(rows.take(IDS), logp_RK, gen_RK)


def _spread_list(rows: Rows, listed: EngineList, num: int) -> EngineList:
    from dlc_sentinel.correction import EngineList

    assert listed.gen_logp is not None
    index_NK = rows.spread(listed.index, -1, num)
    return EngineList(index_NK, rows.spread(listed.logp, 0.0, num), rows.spread(listed.gen_logp, 0.0, num))
