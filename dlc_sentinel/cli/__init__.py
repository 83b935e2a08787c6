"""The command line, one small module per group of commands; `app.run` is the door. Only here is the environment read.

app -> serve, run, watch, demo, judge (replay, analyze), doctor, config, keys, actions, explain, grafana, prometheus
settings -> the resolved configuration; sentinel -> a live sentinel, put together; screen -> what is printed

Exit codes: 0 did its work; 1 degraded or blind; 2 usage; 70 internal error; `analyze` and `replay` also 10 (a finding)
and 20 (a finding that makes ABORT due); `run -- CMD` gives CMD's own.
"""
