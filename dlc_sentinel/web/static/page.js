"use strict";
// Polls /api/v1/page and shows it. Every text goes in as text (textContent), never as markup.
(() => {
  const PERIOD_MS = 1000, MAX_STEPS = 512, MAX_CLOSED = 6;
  const byId = (id) => document.getElementById(id);
  const state = { run: null, steps: null, columns: null, scalars: new Map(), charts: [], drawn: "", heard: 0, commands: [] };

  function el(name, words, cls) {
    const node = document.createElement(name);
    if (words !== undefined) node.textContent = words;
    if (cls) node.className = cls;
    return node;
  }

  const short = (value) => (value === null || value === undefined ? "–" : Strips.digits(value));
  const percent = (value) => (value === null ? "" : `${Math.round(100 * value)} % sure`);
  const count = (value) => value.toLocaleString("en");
  const ago = (s) => (s === null ? "" : s < 100 ? `${Math.round(Math.max(s, 0))} s ago` : s < 6000 ? `${Math.round(s / 60)} min ago` : `${Math.round(s / 3600)} h ago`);

  // -- data ----------------------------------------------------------------------------------------------------------

  function merge(run) {
    const newest = state.columns ? state.columns.step.at(-1) ?? -1 : -1;
    if (state.run !== run.run || !state.columns || run.last_step < newest) {
      state.run = run.run;
      state.columns = run.columns;
      state.scalars = new Map(run.scalars.map((each) => [each.kind, each]));
      state.drawn = "";
      return;
    }
    for (const [name, values] of Object.entries(run.columns))
      state.columns[name] = (state.columns[name] || []).concat(values).slice(-MAX_STEPS);
    for (const each of run.scalars) {
      const held = state.scalars.get(each.kind);
      if (!held || held.name !== each.name) state.scalars.set(each.kind, each);
      else for (const part of ["step", "value"]) held[part] = held[part].concat(each[part]).slice(-MAX_STEPS);
    }
  }

  async function poll() {
    try {
      const query = new URLSearchParams();
      const wanted = byId("runs").value || state.run;
      if (wanted) query.set("run", wanted);
      const same = wanted === state.run && state.columns;
      query.set("since", same ? String(state.columns.step.at(-1) ?? -1) : "-1");
      const answer = await fetch(`api/v1/page?${query}`, { cache: "no-store" });
      if (!answer.ok) throw new Error((await answer.text()).slice(0, 200));
      const page = await answer.json();
      // A run that began again under its old name has fewer steps than are held: ask for all of them.
      if (same && page.run && page.run.last_step < (state.columns.step.at(-1) ?? -1)) state.columns = null;
      else show(page);
      state.heard = performance.now();
      old("");
    } catch (error) {
      old(error instanceof Error ? error.message : "no answer");
    }
  }

  function old(why) {
    const silence = state.heard ? (performance.now() - state.heard) / 1000 : Infinity;
    const banner = byId("old");
    banner.hidden = !why || silence < 3;
    banner.textContent = state.heard
      ? `This picture is old: ${Math.round(silence)} s without an answer (${why}). The job trains on without the sentinel.`
      : `Waiting for the sentinel: ${why}`;
    document.body.classList.toggle("is-old", !banner.hidden);
    byId("pulse").textContent = why ? "no answer" : "live";
  }

  // -- what is shown -------------------------------------------------------------------------------------------------

  function show(page) {
    byId("version").textContent = `dlc-sentinel ${page.version}`;
    runs(page.runs, page.run);
    const run = page.run;
    if (!run) {
      byId("head").replaceChildren(el("p", "The sentinel is up and no run has reported yet; is DLC_SENTINEL set in the job?"));
      return;
    }
    merge(run);
    state.commands = run.commands;
    head(run);
    byId("breaker").hidden = !run.breaker_open;
    ladder(run);
    findings(run);
    list("commands", run.commands, command, run.mode === "observe" ? "None sent: mode observe." : `None sent; mode ${run.mode}.`);
    list("events", run.events, event, "Nothing to tell.");
    producers(run);
    curves(run);
    const mark = `${run.run}/${run.worst.map((strip) => `${strip.step}.${strip.id}.${strip.score}`).join()}/${byId("worst").clientWidth}`;
    if (state.worst !== mark) Strips.draw(byId("worst"), run.worst);
    state.worst = mark;
  }

  function runs(all, chosen) {
    const select = byId("runs");
    const key = all.map((each) => `${each.run}${each.verdict}`).join("\n");
    if (select.dataset.key !== key) {
      const kept = select.value;
      select.replaceChildren(...all.map((each) => {
        const option = el("option", `${each.name} · ${each.verdict}`);
        option.value = each.run;
        return option;
      }));
      select.dataset.key = key;
      if (all.some((each) => each.run === kept)) select.value = kept;
      else if (chosen) select.value = chosen.run;
    }
    byId("runs-label").hidden = all.length < 2;
  }

  function head(run) {
    const kind = !run.is_known ? "unknown" : run.verdict === "HEALTHY" ? "ok" : "bad";
    const mark = { unknown: "?", ok: "✓", bad: "!" }[kind];
    const badge = el("span", `${mark} ${run.verdict}`, `badge ${kind}`);
    const title = el("p", undefined, "verdict");
    title.append(badge, el("span", run.is_known ? run.meaning : `health not known; ${run.meaning}`));
    const since = run.since_step === null || run.since_step === undefined ? "" : ` · ${run.state} since step ${run.since_step}`;
    const facts = el("p", `run ${run.name} · ${run.model} · engine ${run.engines} · mode ${run.mode} · step ${run.last_step}${since}`, "soft");
    const advice = el("p", undefined, "do");
    advice.append(el("b", "Do: "), document.createTextNode(run.advice));
    const cards = el("div", undefined, "cards");
    const own = run.ladder.find((rung) => rung.acts) || { ess: null };
    const [low, mid, high] = run.forecast;
    const last = (name) => (state.columns[name] || []).at(-1) ?? null;
    const trust = run.is_trusted ? "" : "not trusted: ";
    for (const [name, value, remark] of [
      [`ESS, h* = ${run.horizon}`, short(own.ess), run.interval[0] === null ? `${trust}RESYNC below 1/2` : `${trust}90 %: ${short(run.interval[0])} to ${short(run.interval[1])}`],
      own.ess !== null && own.ess < 0.5 && run.is_trusted ? ["time left", "none", "ESS is below 1/2 now"]
        : ["time left", mid === null ? "–" : `${short(mid)} steps`, mid === null ? "no crossing forecast" : `until ESS < 1/2; ${short(low)} to ${short(high)}`],
      ["lag, rms", short(last("lag")), `${trust}nats per token`],
      ["discrepancy, rms", short(last("discrepancy")), `floor ${short(last("floor"))}`],
      ["KL, trajectory", short(last("kl_gen_now")), `nats; reliability ${run.reliability}`],
      ["age of the rows", short(last("age_mean")), `versions, oldest ${short(last("age_max"))}`],
    ]) {
      const card = el("div", name, "card");
      card.append(el("b", value), el("span", remark, "soft"));
      cards.append(card);
    }
    byId("head").replaceChildren(title, facts, advice, cards);
    document.title = `${mark} ${run.verdict} · ${run.name}`;
  }

  function ladder(run) {
    const table = el("table", undefined, "ladder");
    for (const rung of run.ladder) {
      const row = el("tr", undefined, rung.acts ? "acts" : "");
      const meter = el("td", undefined, "meter"), bar = el("span"), half = el("i");
      bar.style.width = `${100 * (rung.ess ?? 0)}%`;
      bar.className = !run.is_trusted ? "unsure" : (rung.ess ?? 1) < 0.5 ? "below" : "";
      meter.append(bar, half);
      const few = rung.coverage !== null && rung.coverage < 0.5;
      const word = rung.ess === null ? "no data" : !run.is_trusted ? "unsure" : few ? "short" : rung.ess < 0.5 ? "below" : "ok";
      row.append(el("td", rung.acts ? `h* = ${rung.h}` : `h = ${rung.h === "inf" ? "∞" : rung.h}`), meter, el("td", short(rung.ess)), el("td", word, "soft"));
      table.append(row);
    }
    byId("ladder").replaceChildren(table);
  }

  function findings(run) {
    const box = byId("findings"), open = new Set([...box.querySelectorAll("details[open]")].map((node) => node.dataset.key));
    const closed = run.findings.filter((each) => !each.is_open);
    const rows = [...run.findings.filter((each) => each.is_open), ...closed.slice(0, MAX_CLOSED)].map((each) => {
      const row = el("details", undefined, each.is_open ? "finding open" : "finding");
      row.dataset.key = `${each.verdict}/${each.kind}/${each.since_step}`;
      row.open = open.has(row.dataset.key);
      const name = `${each.verdict}${each.kind ? ` (${each.kind})` : ""}`;
      const summary = el("summary", name);
      const marks = [each.state, `since step ${short(each.since_step)}`, percent(each.confidence), each.catastrophic ? "catastrophic" : "", each.asked];
      summary.append(el("span", ` ${marks.filter(Boolean).join(", ")}`, "soft"));
      const advice = el("p");
      advice.append(el("b", "Do: "), document.createTextNode(each.advice));
      const pairs = el("dl", undefined, "pairs");
      for (const [key, value] of each.evidence) pairs.append(el("dt", key), el("dd", value));
      const checks = el("ul");
      for (const line of each.check_first) checks.append(el("li", line));
      row.append(summary, el("p", each.means), advice, pairs, el("p", `How sure: ${each.how_sure}`, "soft"), el("p", "Check first:"), checks);
      return row;
    });
    const none = el("p", run.is_trusted ? "None open." : "None open, which proves nothing while health is not known.", "soft");
    if (closed.length > MAX_CLOSED) rows.push(el("p", `${closed.length - MAX_CLOSED} more closed ones`, "soft"));
    box.replaceChildren(...(rows.length ? rows : [none]));
  }

  function list(id, rows, make, none) {
    byId(id).replaceChildren(...(rows.length ? rows.map(make) : [el("p", none, "soft")]));
  }

  function command(each) {
    const row = el("p", undefined, "row");
    const version = each.version === null ? "" : ` v${each.version}`;
    row.append(el("b", `step ${short(each.step)} ${each.kind}`), document.createTextNode(` ${each.action} → `),
      el("span", `${each.outcome}${version}`, ["refused", "expired"].includes(each.outcome) ? "WARN" : "soft"),
      el("span", each.reason ? ` · ${each.reason}` : "", "soft"));
    return row;
  }

  function event(each) {
    const row = el("p", undefined, "row");
    row.append(el("span", `step ${each.step} `, "soft"), el("b", each.kind, each.level), document.createTextNode(` ${each.text}`));
    return row;
  }

  function producers(run) {
    const rows = run.producers.map((each) => {
      const row = el("p", undefined, "row");
      row.append(document.createTextNode(`${each.name} `), el("span", each.state, each.state === "alive" ? "soft" : "WARN"),
        el("span", ` ${ago(each.silence_s)}, step ${short(each.last_step)} ${each.host}`, "soft"));
      return row;
    });
    const most = Math.max(...Object.values(run.tokens), 0);
    const lost = Object.entries(run.dropped).map(([cause, num]) => `${cause} ${count(num)}`).join(", ");
    const refused = Object.entries(run.refused).map(([cause, num]) => `${cause} ${count(num)}`).join(", ");
    rows.push(el("p", `${count(most)} tokens; dropped: ${lost || "none"}; frames ${count(run.num_frames)}, missing ${count(run.gaps)}${refused ? `, ${refused}` : ""}; basis ${run.basis}`, lost || run.gaps ? "row WARN" : "row soft"));
    byId("producers").replaceChildren(...rows);
  }

  // -- curves --------------------------------------------------------------------------------------------------------

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function panels(run) {
    const own = `ess_${run.horizon}`;
    const line = (label, key, hue, extra = {}) => ({ label, key, hue, ...extra });
    const rungs = ["1", "8", "128"].filter((h) => h !== run.horizon);
    const found = [
      { title: "ESS of the lag ratio, by block length", lines: [line(`h* = ${run.horizon}`, own, "--blue", { width: 2.5 }),
        ...rungs.map((h) => line(`h = ${h}`, `ess_${h}`, { 1: "--grey", 8: "--sky", 128: "--deep" }[h], { dash: { 1: [2, 2], 128: [6, 3] }[h] }))], range: [0, 1], rule: 0.5, height: 190, letters: true },
      { title: "Mismatch per token, rms in nats", log: true, height: 170, lines: [line("lag", "lag", "--orange", { width: 2 }),
        line("discrepancy", "discrepancy", "--green"), line("floor", "floor", "--grey", { dash: [5, 4] })] },
      { title: "KL per trajectory, nats", log: true, height: 140, lines: [line("generator to now", "kl_gen_now", "--blue"), line("now to generator", "kl_now_gen", "--orange", { dash: [6, 3] })] },
      { title: "Age of the rows, versions", height: 120, lines: [line("mean", "age_mean", "--blue"), line("oldest", "age_max", "--grey", { dash: [2, 2] })] },
    ];
    for (const each of state.scalars.values())
      found.push({ title: `${each.name}, as the stack reports it`, height: 120, steps: each.step, lines: [{ label: each.name, values: each.value, hue: "--green" }] });
    return found;
  }

  function values(panel, line) {
    const raw = line.values || state.columns[line.key] || [];
    if (!panel.log) return raw;
    // A logarithmic scale has no zero: exactly 0 stands on the decade below the smallest value.
    const above = panel.lines.flatMap((each) => state.columns[each.key] || []).filter((value) => value !== null && value > 0);
    const bottom = above.length ? 10 ** Math.floor(Math.log10(Math.min(...above))) : null;
    return raw.map((value) => (value === null || value < 0 ? null : value > 0 ? value : bottom));
  }

  function curves(run) {
    const box = byId("curves"), shown = panels(run).filter((panel) => panel.lines.some((line) => values(panel, line).some((value) => value !== null)));
    const key = [box.clientWidth, color("--ink"), run.run, shown.map((panel) => panel.title).join()].join("/");
    if (state.drawn !== key) {
      state.charts.forEach((chart) => chart.destroy());
      box.replaceChildren();
      state.charts = shown.map((panel) => chart(box, panel));
      state.drawn = key;
    }
    shown.forEach((panel, i) => {
      const steps = panel.steps || state.columns.step;
      state.charts[i].setData([steps, ...panel.lines.map((line) => values(panel, line))]);
      const drawn = state.charts[i];
      // The chart settles after this turn; only then does it know the index.
      setTimeout(() => { if (drawn.cursor.idx == null && state.charts.includes(drawn)) drawn.setLegend({ idx: steps.length - 1 }); });
    });
    if (!shown.length) box.replaceChildren(el("p", "No step has been closed yet.", "soft"));
  }

  function chart(box, panel) {
    const decades = (u, splits) => splits.map((split) => (!panel.log || split === null || Math.abs(Math.log10(split) % 1) < 1e-9 ? split : null));
    const axis = { stroke: color("--soft"), grid: { stroke: color("--faint"), width: 1 }, ticks: { stroke: color("--faint"), width: 1 }, font: "11px system-ui, sans-serif" };
    const frame = el("figure");
    frame.append(el("figcaption", panel.title));
    box.append(frame);
    const y = panel.log ? { distr: 3 } : panel.range ? { range: panel.range } : { range: (u, low, high) => {
      const bottom = low >= 0 && low < 0.5 * high ? 0 : low, pad = 0.06 * (high - bottom) || 1;
      return [bottom ? bottom - pad : 0, high + pad];
    } };
    const options = {
      width: Math.max(box.clientWidth, 200), height: panel.height, padding: [panel.letters ? 20 : 6, 14, 0, 0], cursor: { y: false, sync: { key: "steps" } }, legend: { live: true },
      scales: { x: { time: false }, y },
      axes: [{ ...axis, size: 28, space: 60 }, { ...axis, size: 52, filter: decades, grid: { ...axis.grid, filter: decades }, ticks: { ...axis.ticks, filter: decades }, values: (u, ticks) => ticks.map((tick) => (tick === null ? "" : Math.abs(tick) >= 0.01 && Math.abs(tick) < 1e5 || tick === 0 ? String(Number(tick.toPrecision(4))) : tick.toExponential(0))) }],
      series: [{ label: "step", value: (u, value) => (value === null || value === undefined ? "–" : String(value)) },
        ...panel.lines.map((line) => ({ label: line.label, stroke: color(line.hue), width: line.width || 1.5, dash: line.dash, points: { show: false }, spanGaps: false, value: (u, value) => short(value) }))],
      hooks: { draw: [(u) => marks(u, panel)] },
    };
    return new uPlot(options, [[], ...panel.lines.map(() => [])], frame);
  }

  function marks(u, panel) {
    const context = u.ctx, { left, top, width, height } = u.bbox, dpr = devicePixelRatio || 1;
    context.save();
    context.lineWidth = dpr;
    if (panel.rule !== undefined) {
      context.strokeStyle = color("--ink");
      context.setLineDash([5 * dpr, 4 * dpr]);
      const at = u.valToPos(panel.rule, "y", true);
      context.beginPath(); context.moveTo(left, at); context.lineTo(left + width, at); context.stroke();
    }
    context.setLineDash([dpr, 3 * dpr]);
    context.font = `bold ${11 * dpr}px system-ui, sans-serif`;
    context.textAlign = "center";
    let free = -Infinity;
    for (const each of [...state.commands].reverse()) {
      if (each.step === null || each.step < u.scales.x.min || each.step > u.scales.x.max) continue;
      const at = u.valToPos(each.step, "x", true);
      context.strokeStyle = context.fillStyle = color(each.kind === "ABORT" ? "--bad" : "--soft");
      context.beginPath(); context.moveTo(at, top); context.lineTo(at, top + height); context.stroke();
      if (panel.letters && at - free > 12 * dpr) {
        context.fillText(each.kind.slice(0, 1), at, top - 8 * dpr);
        free = at;
      }
    }
    context.restore();
  }

  // -- doing ---------------------------------------------------------------------------------------------------------

  byId("breaker").addEventListener("submit", async (submitted) => {
    submitted.preventDefault();
    const answer = byId("answer"), token = byId("token");
    try {
      const reply = await fetch(`api/v1/actions/reset?${new URLSearchParams({ run: state.run })}`, { method: "POST", headers: { Authorization: `Bearer ${token.value}` } });
      answer.textContent = reply.ok ? "reset" : (await reply.text()).slice(0, 200);
      if (reply.ok) token.value = "";
    } catch {
      answer.textContent = "no answer";
    }
  });
  byId("runs").addEventListener("change", poll);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { state.drawn = ""; });

  async function forever() {
    if (!document.hidden) await poll();
    setTimeout(forever, PERIOD_MS);
  }
  document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
  forever();
})();
