"""Builds what dashboards/ holds from the metric catalogue and the words of the verdicts; a tool for developers.

    python -m dashboards.builders          # writes dashboards/grafana, dashboards/prometheus and docs/runbooks anew
    python -m dashboards.builders --check  # exit code 1 where a committed file is not what would be written

boards -> overview, lag, engine, learning, health -> panels; alerts -> rules, runbooks, grafana_rules. Needs the SDK
grafana-foundation-sdk==0.0.21 and PyYAML; users need neither: the files are shipped.
"""
