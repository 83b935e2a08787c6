"""The page for people without Grafana: served on loopback by the sentinel itself.

view (snapshot -> what the page shows) -> app (routes, guard) -> sink (the thread that serves them); static/ the rest.
"""
