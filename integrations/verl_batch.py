"""A batch of verl's, read row by row as plain Python. verl is imported inside: only its own processes come here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dlc_sentinel.integrations import verl_rows

_ROW_KEYS = ("min_global_steps", "max_global_steps", verl_rows.SEGMENTS)


def column(data: Any, name: str, num_rows: int) -> list[Any] | None:
    """One plain value per row, or None where the batch has no such column."""
    from verl.utils import tensordict_utils as tu

    value = tu.get(data, name)
    if value is None:
        return None
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, (list, tuple)) else [value] * num_rows


def row_facts(data: Any, num_rows: int) -> list[verl_rows.Facts]:
    """The generator's facts of every row: from extra_fields (V1), else from the columns of the same names."""
    extra = column(data, "extra_fields", num_rows)
    if extra is not None:
        return [verl_rows.facts_of(row) for row in extra]
    columns = {name: column(data, name, num_rows) for name in _ROW_KEYS}
    return [
        verl_rows.facts_of({name: values[row] for name, values in columns.items() if values is not None})
        for row in range(num_rows)
    ]


def row_names(data: Any, num_rows: int) -> list[str] | None:
    """ "uid_session" of every row, or None where rows have no uid. Rows of one session share it."""
    uids = column(data, "uid", num_rows)
    if uids is None:
        return None
    sessions = column(data, "session_id", num_rows)
    return [str(uid) if sessions is None else f"{uid}_{sessions[row]}" for row, uid in enumerate(uids)]


def select(per_row: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """The same columns (tensors, arrays, lists, None) with these rows only."""
    picked = list(rows)
    return {
        name: values if values is None else [values[i] for i in picked] if isinstance(values, list) else values[picked]
        for name, values in per_row.items()
    }
