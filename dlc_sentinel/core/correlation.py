"""Correlation of two streams from sums, so that records of a step add up."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dlc_sentinel.records import F64


@dataclass(slots=True)
class Correlation:
    """Sums over pairs (x, y); `value` is Pearson's correlation, nan under 2 pairs or where one stream is constant."""

    num: int = 0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    yy: float = 0.0
    xy: float = 0.0

    def add(self, x_N: F64, y_N: F64) -> None:
        self.num += len(x_N)
        self.x += float(x_N.sum())
        self.y += float(y_N.sum())
        self.xx += float(x_N @ x_N)
        self.yy += float(y_N @ y_N)
        self.xy += float(x_N @ y_N)

    def value(self) -> float:
        if self.num < 2:
            return math.nan
        vx, vy = self.xx - self.x**2 / self.num, self.yy - self.y**2 / self.num
        if vx <= 0.0 or vy <= 0.0:
            return math.nan
        return (self.xy - self.x * self.y / self.num) / math.sqrt(vx * vy)
