"""What users may import, and nothing by accident."""

from __future__ import annotations

import dlc_sentinel
from dlc_sentinel import errors


def test_the_package_offers_connect_and_analyze():
    assert sorted(dlc_sentinel.__all__) == ["__version__", "analyze", "connect"]
    assert all(hasattr(dlc_sentinel, name) for name in dlc_sentinel.__all__)


def test_every_error_is_a_sentinel_error_and_a_standard_one():
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert issubclass(kind, errors.SentinelError)
        assert kind is errors.SentinelError or issubclass(kind, (ValueError, OSError))


def test_the_integrations_are_importable_under_one_name():
    import dlc_sentinel.integrations

    assert dlc_sentinel.integrations.__name__ == "dlc_sentinel.integrations"
