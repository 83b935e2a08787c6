"""State machines over records: join, window, diagnose, detect, decide. Pure: time is
passed in, nothing is read or written.

`monitor.Monitor.feed` is the path; read it first.
"""
