// The dashboard page: fetches the cell's status every REFRESH_MS and draws it.
"use strict";

const REFRESH_MS = 2000;
const by = (id) => document.getElementById(id);
const percent = (share) =>
  share === null ? "-" : share === 1 ? "100 %" : `${Math.min(99.9, 100 * share).toFixed(1)} %`;
const share = (value) => (value === null ? "-" : `${(100 * value).toFixed(0)} %`);
let latest = null, seen = 0, chosen = null;
// The cell to show, from the query: /dashboard?cell=ADDRESS; null: the gateway chooses.
const shown = new URLSearchParams(location.search).get("cell");

function ago(seconds) {
  const value = Math.max(0, seconds);
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (value >= 2 * size) return `${(value / size).toFixed(0)} ${unit}`;
  }
  return `${value.toFixed(0)} s`;
}

// Fills a table. columns: names; "<" in front aligns a column left. rows: arrays of text,
// [text, CSS class] or DOM nodes. words: text of an empty table.
function table(id, columns, rows, words) {
  if (!rows.length) return by(id).replaceChildren(rowOf([make("td", { class: "empty" }, words)]));
  const left = columns.map((name) => name.startsWith("<"));
  const kind = (number, more = "") => `${left[number] ? "left" : ""} ${more}`.trim();
  const head = columns.map((name, n) => make("th", { class: kind(n) }, name.replace("<", "")));
  by(id).replaceChildren(rowOf(head), ...rows.map((row) => rowOf(row.map((cell, number) => {
    if (cell instanceof Node) { const td = make("td", { class: kind(number) }); td.append(cell); return td; }
    const [text, more] = Array.isArray(cell) ? cell : [cell, ""];
    return make("td", { class: kind(number, more) }, `${text}`);
  }))));
}

function rowOf(cells) {
  const row = make("tr");
  row.append(...cells);
  return row;
}

function findings(cell) {
  if (!cell.findings.length) {
    const state = cell.workers.length ? make("strong", { class: "good" }, "Healthy")
      : make("strong", { class: "bad" }, "No workers are attached");
    const words = cell.workers.length ? cell.summary.replace(/^healthy;?/, "") : ": requests cannot be served";
    const line = make("div");
    line.append(state, words);
    return by("findings").replaceChildren(line);
  }
  by("findings").replaceChildren(...cell.findings.map((one) => {
    const box = make("div", { class: "finding" });
    const list = make("ul");
    list.append(...one.evidence.map((line) => make("li", {}, line)));
    box.append(make("strong", {}, `${one.what} `), make("span", { class: "soft" }, `stage: ${one.stage}`),
      list, make("p", {}, `First: ${one.first}`));
    return box;
  }));
}

function overTime(cell) {
  const points = (read) => cell.history.map((one) => [one.at, read(one) ?? null]);
  const options = { now: cell.at };
  const kinds = { prefill: "one", decode: "two", interactive: "one", batch: "two" };
  lines(by("pools-chart"), ["prefill", "decode"].map((name) => (
    { name, kind: kinds[name], points: points((one) => one.pools[name]?.serving) }
  )), { ...options, unit: "workers", whole: true });
  lines(by("queue-chart"), ["interactive", "batch"].map((name) => (
    { name, kind: kinds[name], points: points((one) => one.lanes[name]?.queued) }
  )), { ...options, unit: "requests", whole: true });
  for (const what of ["ttft", "itl"]) {
    const series = ["interactive", "batch"].map((name) => (
      { name, kind: kinds[name], points: points((one) => one.lanes[name]?.[`${what}_p95_ms`]) }
    ));
    for (const lane of cell.lanes) {
      const target = lane[what].target_ms;
      if (target === null || !cell.history.length) continue;
      const from = Math.min(cell.at - 60, cell.history[0].at);
      series.push({ name: `target, ${lane.lane}: ${target} ms`, kind: "target", points: [[from, target], [cell.at, target]] });
    }
    lines(by(`${what}-chart`), series, { ...options, unit: "ms" });
  }
}

// The time in which the cell has counted requests and tokens.
function countedSeconds(cell) {
  return Math.max(1, Math.min(cell.window_s, cell.uptime_s));
}

function lanes(cell) {
  const rows = cell.lanes.flatMap((lane) => ["ttft", "itl"].map((what) => {
    const values = lane[what], first = what === "ttft";
    const time = (value, index) => !values.num ? "-" :
      [ms(value), values.is_late[index] ? "bad" : ""];
    const attained = values.attained === null ? "-" :
      [percent(values.attained), values.attained >= lane.percentile / 100 ? "good" : "bad"];
    const sheds = Object.values(lane.sheds).reduce((sum, one) => sum + one, 0);
    const seconds = countedSeconds(cell);
    const counts = [lane.queued, lane.running, (lane.ended / seconds).toFixed(1),
      (lane.output_tokens / seconds).toFixed(0), [sheds, sheds ? "bad" : ""]];
    return [first ? lane.lane : "", what.toUpperCase(), time(values.p50_ms, 0), time(values.p95_ms, 1),
      time(values.p99_ms, 2), values.target ?? "-", attained,
      ...(first ? counts : counts.map(() => ""))];
  }));
  table("lanes", ["<lane", "<", "p50", "p95", "p99", "target", "attained", "queued", "running",
    "requests/s", "tokens/s", "refused"], rows, "no lanes");
}

// What prompts found in prefix caches and in the KV store, and what workers computed.
function promptTokens(cell) {
  const found = cell.prompt_tokens, sources = ["device", "host", "disk", "fetched", "computed"];
  const total = sources.reduce((sum, one) => sum + found[one], 0);
  const seconds = countedSeconds(cell);
  const rows = !total ? [] : [
    ["tokens/s", ...sources.map((one) => (found[one] / seconds).toFixed(0))],
    ["share", ...sources.map((one) => share(found[one] / total))],
  ];
  table("prompt-tokens", ["<", "prefix cache", "host memory", "disk", "other workers", "computed"], rows,
    "no prompt was computed in the last minute");
}

function stages(cell) {
  const lane = cell.lanes.find((one) => one.lane === "interactive" && one.ended)
    ?? cell.lanes.find((one) => one.ended);
  if (!lane) return empty(by("stages-chart"), "no request ended in the last minute");
  const shown = lane.stages.filter((one) => one.p50_ms > 0);
  const longest = Math.max(...shown.map((one) => one.p50_ms));
  bars(by("stages-chart"), shown.map((one) => (
    { label: one.stage, start_ms: 0, duration_ms: one.p50_ms, kind: "bar" }
  )), longest);
}

function decisions(cell) {
  const into = by("decisions");
  if (cell.decisions === null) return empty(into, "the coordinator does not scale these pools");
  if (!cell.decisions.length) return empty(into, "no decisions yet");
  into.replaceChildren(...cell.decisions.slice(0, 8).map((one) => {
    const line = make("p", { class: "decision" });
    line.append(make("span", { class: "soft" }, `${ago(cell.at - one.at)} ago  `),
      make("strong", {}, `${one.pool} ${one.from_workers} → ${one.to_workers} `), one.reason);
    return line;
  }));
}

function workers(cell) {
  table("workers", ["<worker", "<pool", "<state", "requests", "waiting", "KV used", "staging used", "attached"],
    cell.workers.map((one) => [one.worker, one.pool, [one.state, one.state === "serving" ? "good" : "bad"],
      one.requests, one.waiting, share(one.kv_used), share(one.staging_used), ago(one.attached_s)]),
    "no workers are attached");
}

function requests(cell) {
  table("requests", ["<request", "<state", "first token", "age", "prompt tokens", "output tokens", "<lane", "<tenant"],
    cell.requests.map((one) => {
      const button = make("button", { type: "button" }, one.request_id);
      button.addEventListener("click", () => { location.hash = encodeURIComponent(`${one.tenant}/${one.request_id}`); });
      return [button, [one.state, one.error ? "bad" : ""], one.ttft_ms ? ms(one.ttft_ms) : "-",
        ms(one.age_ms), one.prompt_tokens, one.output_tokens, one.lane, one.tenant];
    }), "no requests");
}

async function waterfall() {
  const into = by("waterfall"), requested = chosen;
  if (requested === null) return;
  into.hidden = false;
  let one;
  try {
    // Request IDs are unique per tenant only. Neither IDs nor tenants contain a slash.
    const [id, tenant = ""] = requested.split("/").reverse();
    one = await fetchJson(`/dashboard/requests/${encodeURIComponent(id)}`, { tenant });
  } catch (error) {
    if (requested === chosen) empty(into, `${requested}: ${error.message}`);
    return;
  }
  if (requested !== chosen) return;
  const chart = make("div");
  const stalls = one.stalls.map((stall) => ({ ...stall, label: `stall: ${stall.cause}`, kind: "stall" }));
  const route = one.route ? `${one.route}, ` : "";
  const title = `${one.request_id}: ${route}${one.state}, first token ${ms(one.ttft_ms)}, total ${ms(one.total_ms)}`;
  const note = one.itl_target_ms === null ? "the request has no ITL target"
    : `${stalls.length ? `the longest ${stalls.length}` : "no"} gaps over ${one.itl_target_ms} ms`;
  into.replaceChildren(make("strong", {}, title), chart, make("div", { class: "soft" }, note));
  const total = Math.max(one.total_ms, ...stalls.map((stall) => stall.start_ms + stall.duration_ms));
  bars(chart, [...one.stages.map((stage) => ({ ...stage, label: stage.stage, kind: "bar" })), ...stalls], total);
}

// Storage key of the viewer's API key. It stays in this tab and is only sent to this gateway.
const KEY = "baton-key";

async function fetchJson(path, parameters = {}) {
  const query = new URLSearchParams(shown === null ? parameters : { ...parameters, cell: shown });
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const response = await fetch(`${path}?${query}`, { cache: "no-store", headers });
  by("key").hidden = response.status !== 401 && response.status !== 403;
  if (!response.ok) {
    let words = `HTTP ${response.status}`;
    try { words = (await response.json()).error.message || words; } catch { /* The body is not a gateway error. */ }
    throw new Error(words);
  }
  return response.json();
}

function cells(cell) {
  by("cells").hidden = cell.cells.length < 2;
  by("cells").replaceChildren(...cell.cells.map((name) => {
    const current = name === cell.cell ? { "aria-current": "page" } : {};
    return make("a", { href: `?${new URLSearchParams({ cell: name })}`, ...current }, name);
  }));
}

function draw() {
  const cell = latest;
  by("where").textContent = `${cell.model || "no model"} at ${cell.coordinator}, up ${ago(cell.uptime_s)}`;
  by("window").textContent = cell.window_s.toFixed(0);
  for (const part of [cells, findings, overTime, lanes, promptTokens, stages, decisions, workers, requests]) part(cell);
}

async function refresh() {
  const live = by("live");
  try {
    latest = await fetchJson("/dashboard/data");
    seen = Date.now();
    document.body.classList.add("known");
    draw();
    live.textContent = "live";
    live.className = "good";
    waterfall();
  } catch (error) {
    const age = latest ? `; the data below is ${ago((Date.now() - seen) / 1000)} old` : "";
    live.textContent = `disconnected: ${error.message}${age}`;
    live.className = "bad";
    if (!latest) empty(by("findings"), "no status of the cell yet");
  }
  setTimeout(refresh, REFRESH_MS);
}

// A request's waterfall has the URL /dashboard#TENANT/REQUEST or /dashboard#REQUEST.
function choose() {
  chosen = decodeURIComponent(location.hash.slice(1)) || null;
  by("waterfall").hidden = chosen === null;
  waterfall();
}

by("key").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = by("key").querySelector("input");
  sessionStorage.setItem(KEY, field.value);
  field.value = "";
});
window.addEventListener("hashchange", choose);
window.addEventListener("resize", () => { if (latest) { draw(); waterfall(); } });
choose();
refresh();
