"""Packages that not every install has, and the extra that brings each: one place for the error and for `doctor`."""

from __future__ import annotations

EXTRAS = {
    "serve": (
        "numpy", "msgspec", "pyzmq", "prometheus-client", "rich", "typer", "pyarrow", "starlette", "uvicorn", "jinja2",
        "apprise",
    ),
    "demo": ("torch", "transformers", "matplotlib"),
    "grafana": ("grafana-api",),
    "verl": ("verl",),
}  # fmt: skip
"""Extra -> its packages, as pip names them."""


def missing(error: ModuleNotFoundError) -> str | None:
    """What is missing and how to install it; None where the module is of none of the extras (a fault of ours)."""
    module = (error.name or "").partition(".")[0]
    for extra, packages in EXTRAS.items():
        for package in packages:
            if package.replace("-", "_") == module:
                return f"{package} is not installed, which this needs: pip install 'dlc-sentinel[{extra}]'"
    return None
