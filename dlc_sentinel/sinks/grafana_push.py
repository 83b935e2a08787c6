"""Folder, data source, dashboards and alert rules into a Grafana: again and again with the same result.

What was changed in Grafana since we wrote it is not overwritten unless `force`: of a dashboard, the message of its
newest version tells who wrote it; a rule carries a digest of what we wrote in its annotations.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dlc_sentinel.errors import GrafanaError
from dlc_sentinel.plaintext import plain
from dlc_sentinel.records import Json
from dlc_sentinel.sinks import shipped
from dlc_sentinel.sinks.grafana_http import Api
from dlc_sentinel.version import __version__

FOLDER_UID = "dlc-sentinel"
FOLDER_TITLE = "dlc-sentinel"
SOURCE_UID = "dlc-prometheus"
SOURCE_NAME = "Prometheus (dlc-sentinel)"
RULES_FILE = "alert-rules.json"
DIGEST = "dlc_digest"
_MARK = "dlc-sentinel "
_OWN_RULE_KEYS = ("title", "condition", "for", "noDataState", "execErrState", "labels")

What = Literal["created", "updated", "unchanged", "refused"]


@dataclass(frozen=True, slots=True)
class Outcome:
    kind: str
    """folder, data source, dashboard or alert rules."""
    name: str
    what: What
    why: str = ""


def push(
    api: Api, *, prometheus_url: str | None = None, runbooks: str | None = None, force: bool = False
) -> Iterator[Outcome]:
    """Does the whole and yields what became of each thing, in order.

    `prometheus_url`: a data source for it is made or corrected; None = the default Prometheus that Grafana knows.
    Raises: GrafanaError; what was done before stays done, and another push goes on from there.
    """
    yield _folder(api)
    if prometheus_url is not None:
        yield _data_source(api, prometheus_url, force)
    source = SOURCE_UID if prometheus_url is not None else _known_source(api)
    for path in sorted((shipped.dashboards() / "grafana").glob("dlc-*.json")):
        yield _dashboard(api, json.loads(_text(path, runbooks)), force)
    rules = json.loads(_text(shipped.dashboards() / "grafana" / RULES_FILE, runbooks))
    yield _alert_rules(api, rules, source, force)


def _text(path: Path, runbooks: str | None) -> str:
    return shipped.with_runbooks(path.read_text(encoding="utf-8"), runbooks)


def digest(tree: Json) -> str:
    """12 hex digits of the canonical JSON."""
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _folder(api: Api) -> Outcome:
    if api.find(f"/folders/{FOLDER_UID}") is not None:
        return Outcome("folder", FOLDER_TITLE, "unchanged")
    try:
        api.send("POST", "/folders", {"uid": FOLDER_UID, "title": FOLDER_TITLE})
    except GrafanaError as error:
        # 409, 412: another push made it in the meantime, or the name is taken under another uid.
        if error.status not in (409, 412) or api.find(f"/folders/{FOLDER_UID}") is None:
            raise
        return Outcome("folder", FOLDER_TITLE, "unchanged")
    return Outcome("folder", FOLDER_TITLE, "created")


def _data_source(api: Api, url: str, force: bool) -> Outcome:
    wanted = {"name": SOURCE_NAME, "type": "prometheus", "access": "proxy", "url": url, "uid": SOURCE_UID}
    there = api.find(f"/datasources/uid/{SOURCE_UID}")
    if there is None:
        api.send("POST", "/datasources", wanted)
        return Outcome("data source", SOURCE_NAME, "created")
    if there.get("url") == url and there.get("type") == "prometheus":
        return Outcome("data source", SOURCE_NAME, "unchanged")
    if not force:
        why = f"it points to {plain(there.get('url'), 120)}; --force changes that"
        return Outcome("data source", SOURCE_NAME, "refused", why)
    kept = {key: there[key] for key in ("jsonData", "isDefault", "basicAuth", "basicAuthUser") if key in there}
    api.send("PUT", f"/datasources/uid/{SOURCE_UID}", kept | wanted)
    return Outcome("data source", SOURCE_NAME, "updated")


def _known_source(api: Api) -> str:
    """The uid of the Prometheus that alert rules shall ask. Raises: GrafanaError if Grafana knows none."""
    found = [source for source in api.find("/datasources") or [] if source.get("type") == "prometheus"]
    if not found:
        raise GrafanaError("Grafana has no Prometheus data source; give --prometheus URL to make one")
    ours = [source for source in found if source.get("uid") == SOURCE_UID]
    default = [source for source in found if source.get("isDefault")]
    return str((ours or default or found)[0]["uid"])


# -- dashboards --------------------------------------------------------------------------------------------------------


def _dashboard(api: Api, wanted: dict[str, Json], force: bool) -> Outcome:
    uid, title = str(wanted["uid"]), str(wanted["title"])
    mark = f"{_MARK}{__version__} {digest(wanted)}"
    there = api.find(f"/dashboards/uid/{uid}")
    if there is None:
        _save(api, wanted, mark, force)
        return Outcome("dashboard", title, "created")
    version = int(there["dashboard"].get("version", 0))
    message = _message(api, uid, version)
    if message.startswith(_MARK) and message.split()[-1] == digest(wanted):
        return Outcome("dashboard", title, "unchanged")
    if not message.startswith(_MARK) and not force:
        why = "it was changed in Grafana since we wrote it; save a copy under another name, then --force"
        return Outcome("dashboard", title, "refused", why)
    _save(api, wanted | {"version": version}, mark, force)
    return Outcome("dashboard", title, "updated")


def _save(api: Api, dashboard: Mapping[str, Json], message: str, force: bool) -> None:
    body = {"dashboard": dict(dashboard), "folderUid": FOLDER_UID, "overwrite": force, "message": message}
    api.send("POST", "/dashboards/db", body)


def _message(api: Api, uid: str, version: int) -> str:
    """What was said when the newest version was saved; empty where nothing was, or where it is not the one shown."""
    answer = api.find(f"/dashboards/uid/{uid}/versions?limit=1&start=0")
    versions = answer.get("versions", []) if isinstance(answer, Mapping) else answer or []
    newest = versions[0] if versions else {}
    return str(newest.get("message") or "") if int(newest.get("version", -1)) == version else ""


# -- alert rules -------------------------------------------------------------------------------------------------------


def _alert_rules(api: Api, group: Mapping[str, Json], source: str, force: bool) -> Outcome:
    name = str(group["title"])
    rules = [_signed(rule, source) for rule in group["rules"]]
    path = f"/v1/provisioning/folder/{FOLDER_UID}/rule-groups/{name}"
    there = api.find(path)
    body = {"title": name, "folderUid": FOLDER_UID, "interval": group["interval"], "rules": rules}
    known = list(there.get("rules") or []) if there is not None else []
    if known:
        if _signatures(known) == _signatures(rules) and not _edited(known):
            return Outcome("alert rules", name, "unchanged")
        foreign = {str(rule.get("uid")) for rule in known} - {str(rule["uid"]) for rule in rules}
        changed = _edited(known)
        if (foreign or changed) and not force:
            why = f"changed in Grafana: {', '.join(sorted(foreign | changed))}; --force writes ours over them"
            return Outcome("alert rules", name, "refused", plain(why, 300))
    # Without the header Grafana would lock the rules against every later change in its own pages.
    api.send("PUT", path, body, {"X-Disable-Provenance": "true"})
    return Outcome("alert rules", name, "updated" if known else "created")


def _signed(rule: Mapping[str, Json], source: str) -> dict[str, Json]:
    """The rule for this folder and data source, with the digest of what it says."""
    data = [dict(query, datasourceUid=source) for query in rule["data"]]
    whole = {**rule, "folderUID": FOLDER_UID, "data": data}
    return {**whole, "annotations": {**rule["annotations"], DIGEST: _rule_digest(whole)}}


def _rule_digest(rule: Mapping[str, Json]) -> str:
    """Of what a person may change in it; Grafana adds ids, times and defaults of its own."""
    own = {key: rule.get(key) for key in _OWN_RULE_KEYS}
    notes = {key: text for key, text in (rule.get("annotations") or {}).items() if key != DIGEST}
    queries = [[query.get("datasourceUid"), query.get("model", {}).get("expr")] for query in rule.get("data") or []]
    return digest([own, notes, queries, bool(rule.get("isPaused"))])


def _signatures(rules: Sequence[Mapping[str, Json]]) -> dict[str, str]:
    return {str(rule.get("uid")): str((rule.get("annotations") or {}).get(DIGEST, "")) for rule in rules}


def _edited(rules: Sequence[Mapping[str, Json]]) -> set[str]:
    """uids of the rules that no longer say what their digest says."""
    return {str(rule.get("uid")) for rule in rules if (rule.get("annotations") or {}).get(DIGEST) != _rule_digest(rule)}
