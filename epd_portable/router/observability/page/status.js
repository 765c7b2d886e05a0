// Draws what /status.json says, once a second while the page is seen. Every text goes into the page
// as text (textContent, setAttribute): names come from many hands.
"use strict";

const SCHEMA = 4;
const POLL_MS = 1000;
const PATIENCE_MS = 5000;
const WINDOW_S = 6; // over which rates are taken
const LIT_S = 10; // how long a fallback shines
const REQUESTS_SHOWN = 25;
const LANES = 8; // of one request, at most
const EDGES_NAMED = 16;
const UNKNOWN = "not known";
const KEPT_AS = "epd-status-key";
const SVG = "http://www.w3.org/2000/svg";

const STAGES = { // first and last column of each role; who is lower comes later
  "encode": [1, 1], "prefill": [2, 2], "decode": [3, 3],
  "prefill-decode": [2, 3], "encode-prefill": [1, 2], "encode-prefill-decode": [1, 3],
};
const ORDER = Object.keys(STAGES);
const FALLBACK_WORDS = {
  retried: "Another instance asked, or once more",
  local: "Done where the answer is made",
  original_media: "Sent again with its media",
  left_out: "Answered without some items",
  incomplete: "Answer broken off",
  error: "Instance's error passed on",
  refused: "Refused: 400 or 413",
  unavailable: "Unavailable: 503",
  timeout: "Given up: 504",
};

const at = (id) => document.getElementById(id);

function made(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children.filter((child) => child !== ""));
  return node;
}

function drawn(name, attributes = {}, text = "") {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text) node.textContent = text;
  return node;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Numbers for people.

function bytes(n) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (n < 1000 || unit === "GB") return `${n < 10 && unit !== "B" ? n.toFixed(1) : Math.round(n)} ${unit}`;
    n /= 1000;
  }
}

const duration = (s) =>
  s < 0.0995 ? `${(s * 1000).toFixed(s < 0.00995 ? 1 : 0)} ms`
    : s < 0.9995 ? `${Math.round(s * 1000)} ms`
      : s < 99.5 ? `${s.toFixed(s < 9.95 ? 2 : 1)} s` : `${Math.round(s / 60)} min`;

const ago = (s) =>
  s < 1.5 ? "just now" : s < 90 ? `${Math.round(s)} s ago`
    : s < 5400 ? `${Math.round(s / 60)} min ago` : `${Math.round(s / 3600)} h ago`;

const perSecond = (n, what = "") => `${n < 9.95 ? n.toFixed(1) : Math.round(n)}${what}/s`;
const many = (n, one) => `${n} ${one}${n === 1 ? "" : "s"}`;

// Asking.

let key = keyOfAddress() ?? sessionStorage.getItem(KEPT_AS) ?? "";
let tag = "";
let refusal = ""; // why the last key was refused
let data = null; // the last answer
let clock = { router: 0, here: 0 }; // the router's time when that was
let heardAt = performance.now();
let timer = 0;
let asking = false;

function keyOfAddress() {
  const found = new URLSearchParams(location.hash.slice(1)).get("key");
  if (!found) return null;
  sessionStorage.setItem(KEPT_AS, found);
  history.replaceState(null, "", location.pathname + location.search);
  return found;
}

function useKey(given) {
  key = given;
  tag = refusal = "";
  if (key) sessionStorage.setItem(KEPT_AS, key);
  else sessionStorage.removeItem(KEPT_AS);
}

const now = () => clock.router + (performance.now() - clock.here) / 1000;

async function ask() {
  clearTimeout(timer);
  if (asking) return;
  asking = true;
  const headers = {};
  if (key) headers.authorization = `Bearer ${key}`;
  if (tag) headers["if-none-match"] = tag;
  let answer = null;
  try {
    answer = await fetch("status.json", {
      headers, cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(PATIENCE_MS),
    });
    await take(answer);
  } catch (error) {
    if (answer === null || error.name === "TimeoutError") lost("does not answer");
    else throw error;
  } finally {
    asking = false;
    // Without a key that is refused there is something to show at once.
    const pause = answer?.status === 401 ? 0 : POLL_MS;
    if (!document.hidden) timer = setTimeout(ask, pause);
  }
}

async function take(answer) {
  if (answer.status === 401) {
    useKey("");
    refusal = (await answer.json()).error.message;
    return;
  }
  if (answer.status !== 304 && !answer.ok) return lost(`answers ${answer.status}`);
  clock = { router: Number(answer.headers.get("x-epd-now")), here: performance.now() };
  if (answer.status !== 304) {
    const status = await answer.json();
    if (status.schema !== SCHEMA) {
      notice("The router speaks of another version than this page: reload it.");
      return;
    }
    tag = answer.headers.get("etag") ?? "";
    data = status;
  }
  heardAt = performance.now();
  notice(data.instances ? "" : refusal);
  remember(data);
  show();
}

function lost(what) {
  const silent = (performance.now() - heardAt) / 1000;
  const then = data ? " What is below is how it was then." : "";
  notice(`The router ${what} since ${Math.max(1, Math.round(silent))} s.${then}`);
  at("detail").classList.add("stale");
  const overall = at("overall");
  overall.className = "pill bad";
  setText(overall, "gone");
  setText(at("freshness"), "");
}

function notice(text) {
  const node = at("notice");
  node.hidden = !text;
  setText(node, text);
}

// Rates, from what was counted some seconds ago.

let samples = [];

function remember(status) {
  if (!status.instances) {
    samples = [];
    return;
  }
  const sample = { at: clock.router, pairs: new Map(), received: new Map() };
  for (const pair of status.pairs) sample.pairs.set(pairKey(pair), pair);
  for (const one of status.instances) if (one.engine) sample.received.set(one.name, one.engine.received_bytes);
  const last = samples.at(-1);
  const older = (a, b) => [...a.pairs].some(([k, pair]) => pair.count > (b.pairs.get(k)?.count ?? 0));
  if (last && older(last, sample)) samples = []; // the router has begun to count anew
  samples.push(sample);
  while (samples.length > 2 && sample.at - samples[1].at >= WINDOW_S) samples.shift();
}

const pairKey = (pair) => JSON.stringify([pair.source, pair.target, pair.cargo]);

function rates(pair) {
  const first = samples[0], last = samples.at(-1);
  const seconds = last.at - first.at;
  const got = last.received.get(pair.target) ?? {};
  const paths = Object.keys(got).filter((path) => got[path] > 0);
  const path = pair.path || (pair.cargo === "items" && paths.length === 1 ? paths[0] : "");
  if (seconds < 0.5) return { path, count: 0, text: "…" };
  const grown = (each, field) => each[field] - (first.pairs.get(pairKey(each))?.[field] ?? 0);
  const count = grown(pair, "count");
  const reported = grown(pair, "reported");
  const nbytes = grown(pair, "nbytes");
  const result = { path, count: count / seconds, text: "idle" };
  if (pair.cargo === "kv") {
    if (count > 0) result.text = perSecond(count / seconds);
    return result;
  }
  const sources = [...last.pairs.values()].filter(
    (each) => each.target === pair.target && each.cargo === "items" && grown(each, "count") > 0);
  const before = first.received.get(pair.target);
  if (before && sources.length === 1 && sources[0] === pair && last.received.has(pair.target)) {
    const all = Object.keys(got).reduce((sum, name) => sum + got[name] - (before[name] ?? 0), 0);
    if (all >= nbytes) {
      result.text = `${bytes(all / seconds)}/s`;
      return result;
    }
  }
  if (count > 0 || reported > 0) {
    result.text = reported >= count ? `${bytes(nbytes / seconds)}/s`
      : reported > 0 ? `≥ ${bytes(nbytes / seconds)}/s` : UNKNOWN;
  }
  return result;
}

// Showing.

function show() {
  const overall = at("overall");
  setText(overall, data.status);
  overall.className = `pill ${data.status === "ok" ? "good" : data.status === "draining" ? "warn" : "bad"}`;
  const counts = Object.entries(data.counts).filter(([, n]) => n).map(([state, n]) => `${n} ${state}`);
  setText(at("counts"), counts.join(", ") || "no instances");
  const whole = Boolean(data.instances);
  at("key-form").hidden = whole;
  at("forget").hidden = !key;
  at("detail").hidden = !whole;
  at("detail").classList.remove("stale");
  document.title = `${data.status} – epd-portable router`;
  if (!whole) {
    setText(at("freshness"), "");
    return;
  }
  setText(at("model"), data.model);
  setText(at("traffic"), `${many(data.in_flight, "request")} in flight`
    + (data.waiting ? `, ${data.waiting} of them wait to be let in` : ""));
  setText(at("freshness"), "live");
  showInstances();
  showEdges();
  showFallbacks();
  showRequests();
}

const nodes = new Map(); // boxes by instance
const states = new Map(); // by instance, for who hears and does not see

function mood(one) {
  if (one.state === "down") return ["bad", "down"];
  if (one.state === "draining") return ["warn", one.healthy ? "draining" : "draining, down"];
  if (one.state === "joining") return ["busy", "joining"];
  if (one.ejected) return ["warn", "up, ejected"];
  if (one.suspected) return ["warn", "up, suspected"];
  return ["good", "up"];
}

function showInstances() {
  const list = at("instances");
  const seen = new Set();
  const next = [1, 1, 1, 1];
  const ordered = [...data.instances].sort((a, b) => ORDER.indexOf(a.role) - ORDER.indexOf(b.role));
  const most = Math.max(4, ...ordered.map((one) => one.in_flight));
  const said = [];
  for (const one of ordered) {
    seen.add(one.name);
    let box = nodes.get(one.name);
    if (!box) {
      box = instanceBox();
      nodes.set(one.name, box);
      list.append(box.node);
    }
    const [from, to] = STAGES[one.role];
    const columns = next.slice(from, to + 1);
    const row = Math.max(...columns);
    for (let column = from; column <= to; column++) next[column] = row + 1;
    box.node.style.gridColumn = `${from} / ${to + 1}`;
    box.node.style.gridRow = String(row);
    fillBox(box, one, most);
    const [, word] = mood(one);
    if (states.has(one.name) && states.get(one.name) !== word) said.push(`${one.name} is ${word}`);
    states.set(one.name, word);
  }
  for (const [name, box] of nodes) {
    if (seen.has(name)) continue;
    box.node.remove();
    nodes.delete(name);
    states.delete(name);
    said.push(`${name} has left`);
  }
  if (said.length) setText(at("changes"), said.join("; "));
  const more = data.instances_in_all - data.instances.length;
  at("left-out").hidden = more <= 0;
  setText(at("left-out"), `${more} more instances are not shown.`);
}

function instanceBox() {
  const parts = {
    name: made("strong"), state: made("span", { class: "pill" }), role: made("div", { class: "role" }),
    bar: made("i"), load: made("div", { class: "figures" }), engine: made("div", { class: "figures" }),
    why: made("div", { class: "why" }),
  };
  parts.node = made("li", {},
    made("div", { class: "title" }, parts.name, parts.state), parts.role,
    made("span", { class: "meter", "aria-hidden": "true" }, parts.bar),
    parts.load, parts.engine, parts.why);
  return parts;
}

function fillBox(box, one, most) {
  const [colour, word] = mood(one);
  box.node.className = `is-${colour}`;
  box.node.dataset.instance = one.name;
  box.node.dataset.state = one.state;
  setText(box.name, one.name);
  box.state.className = `pill ${colour}`;
  setText(box.state, word);
  setText(box.role, one.role.replaceAll("-", " + "));
  box.bar.style.width = `${Math.round((100 * one.in_flight) / most)}%`;
  box.bar.className = one.in_flight > 8 ? "much" : "";
  const load = [`${one.in_flight} in flight`];
  const waiting = one.in_flight - one.computes_for;
  if (one.role !== "encode" && waiting > 0) load.push(`${waiting} waiting for items`);
  if (one.pending_encode_s >= 0.1) load.push(`${duration(one.pending_encode_s)} of encoding ahead`);
  setText(box.load, load.join(" · "));
  setText(box.engine, engineLine(one));
  setText(box.why, [one.reason, one.problem].filter(Boolean).join("; "));
}

function engineLine(one) {
  if (!one.engine) return one.healthy ? "engine's queue not known" : "";
  const { running, waiting, kv_used: kv, queued_items: items } = one.engine;
  const words = [];
  if (items !== null) words.push(`queue: ${many(items, "item")}`);
  if (items === null && waiting !== null) words.push(`queue: ${waiting}`);
  if (running !== null && one.role !== "encode") words.push(`runs ${running}`);
  if (kv !== null && one.role !== "encode") words.push(`KV ${Math.round(100 * kv)} %`);
  const got = receivedRate(one.name);
  if (got) words.push(`gets ${got}`);
  return words.join(" · ") || "engine's queue not known";
}

function receivedRate(name) {
  const first = samples[0], last = samples.at(-1);
  const before = first?.received.get(name), after = last?.received.get(name);
  if (!before || !after || last.at - first.at < 0.5) return "";
  return Object.keys(after)
    .map((path) => [path, (after[path] - (before[path] ?? 0)) / (last.at - first.at)])
    .filter(([, rate]) => rate > 0)
    .map(([path, rate]) => `${bytes(rate)}/s by ${path}`).join(", ");
}

function showEdges() {
  const svg = at("edges");
  const rows = at("pairs");
  const frame = at("topology").getBoundingClientRect();
  const found = data.pairs.map((pair) => ({ pair, ...rates(pair) }));
  found.sort((a, b) => a.pair.source.localeCompare(b.pair.source) || a.pair.target.localeCompare(b.pair.target));
  rows.replaceChildren(...found.map(pairRow));
  const inPlace = found.filter(({ pair }) => nodes.has(pair.source) && nodes.has(pair.target));
  const place = (list, field) => {
    const groups = new Map();
    for (const each of list) {
      const group = groups.get(each.pair[field]) ?? [];
      group.push(each);
      groups.set(each.pair[field], group);
    }
    const other = field === "source" ? "target" : "source";
    const top = (name) => nodes.get(name).node.offsetTop;
    for (const group of groups.values()) {
      group.sort((a, b) => top(a.pair[other]) - top(b.pair[other]));
      group.forEach((each, index) => { each[field] = (index + 1) / (group.length + 1); });
    }
  };
  place(inPlace, "source");
  place(inPlace, "target");
  const named = new Set([...inPlace].sort((a, b) => b.count - a.count).slice(0, EDGES_NAMED));
  const lines = [], labels = [];
  for (const each of inPlace) {
    const from = nodes.get(each.pair.source).node.getBoundingClientRect();
    const to = nodes.get(each.pair.target).node.getBoundingClientRect();
    const x1 = from.right - frame.left, y1 = from.top - frame.top + from.height * each.source;
    const x2 = to.left - frame.left, y2 = to.top - frame.top + to.height * each.target;
    const bend = Math.max(30, (x2 - x1) / 2);
    const flows = each.count > 0 ? "flows" : "";
    lines.push(drawn("path", {
      d: `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`,
      class: `${flows} ${each.pair.cargo}`,
    }));
    if (!named.has(each)) continue;
    const t = 0.3; // nearer to its source, before lines cross
    const u = 1 - t;
    const x = u ** 3 * x1 + 3 * u * u * t * (x1 + bend) + 3 * u * t * t * (x2 - bend) + t ** 3 * x2;
    const y = (u ** 3 + 3 * u * u * t) * y1 + (3 * u * t * t + t ** 3) * y2;
    labels.push({ x, y, least: x1 + 8, text: label(each), flows });
  }
  labels.sort((a, b) => a.y - b.y);
  labels.forEach((one, index) => { // none over another
    for (const above of labels.slice(0, index)) {
      if (Math.abs(above.x - one.x) < 110 && one.y - above.y < 16) one.y = above.y + 16;
    }
  });
  const texts = labels.map(({ x, y, text, flows }) => drawn("text", { x, y, class: flows }, text));
  svg.replaceChildren(...lines, ...texts);
  texts.forEach((text, index) => {
    const box = text.getBBox();
    const moved = Math.max(0, labels[index].least - box.x); // none over a box
    text.setAttribute("x", labels[index].x + moved);
    svg.insertBefore(drawn("rect", {
      x: box.x + moved - 3, y: box.y - 1, width: box.width + 6, height: box.height + 2, rx: 3,
    }), texts[0]);
  });
}

const label = ({ pair, path, count, text }) =>
  `${pair.cargo === "kv" ? "KV" : path || "path?"} ${text === UNKNOWN ? perSecond(count, " items") : text}`;

function pairRow({ pair, path, count, text }) {
  const what = pair.cargo === "kv" ? "KV" : "items";
  const cells = [
    pair.source, pair.target, what, pair.cargo === "kv" ? "engines' connector" : path || "not known",
    perSecond(count), pair.cargo === "kv" ? UNKNOWN : text,
    pair.cargo === "kv" ? many(pair.count, "prompt")
      : `${many(pair.count, "item")}, ${bytes(pair.nbytes)} of ${pair.reported} reported`,
  ];
  return made("tr", {}, ...cells.map((cell) => made("td", {}, cell)));
}

const fallbacks = new Map();

function showFallbacks() {
  for (const { fallback, count, at: used } of data.fallbacks) {
    let parts = fallbacks.get(fallback);
    if (!parts) {
      parts = { name: made("strong"), used: made("span") };
      parts.node = made("li", { "data-fallback": fallback }, parts.name, parts.used);
      fallbacks.set(fallback, parts);
      at("fallbacks").append(parts.node);
    }
    const since = now() - used;
    const lit = count > 0 && since < LIT_S;
    parts.node.className = lit ? "lit" : count ? "" : "unused";
    setText(parts.name, FALLBACK_WORDS[fallback] ?? fallback.replaceAll("_", " "));
    setText(parts.used, count ? `${lit ? "now lit: " : ""}${count} ×, ${ago(since)}` : "not used");
  }
}

const rows = new Map(); // of requests that are shown

function showRequests() {
  const shown = data.requests.slice(0, REQUESTS_SHOWN);
  const list = at("requests");
  at("no-requests").hidden = shown.length > 0;
  const seen = new Set();
  shown.forEach((request, index) => {
    const name = JSON.stringify([request.id, request.began_at]);
    seen.add(name);
    let row = rows.get(name);
    if (!row) {
      row = requestRow();
      rows.set(name, row);
    }
    if (list.children[index] !== row.node) list.insertBefore(row.node, list.children[index] ?? null);
    fillRow(row, request);
  });
  for (const [name, row] of rows) {
    if (seen.has(name)) continue;
    row.node.remove();
    rows.delete(name);
  }
}

function requestRow() {
  const row = {
    name: made("b"), what: made("span"), took: made("span", { class: "took" }),
    labels: made("span", { class: "labels", "aria-hidden": "true" }),
    svg: drawn("svg", { role: "img" }), body: made("tbody"), request: null, drawn: "",
  };
  const heads = ["What", "Who", "Began", "Took", "How it ended"].map((text) => made("th", {}, text));
  row.detail = made("details", {},
    made("summary", {},
      made("span", { class: "who" }, row.name, row.what),
      made("span", { class: "lanes" }, row.labels, row.svg),
      row.took),
    made("div", { class: "scrolls" },
      made("table", {}, made("thead", {}, made("tr", {}, ...heads)), row.body)));
  row.detail.addEventListener("toggle", () => fillTable(row));
  row.node = made("li", {}, row.detail);
  return row;
}

function fillRow(row, request) {
  row.request = request;
  const over = request.ended_at > 0;
  const end = over ? request.ended_at : now();
  const how = request.gone ? "client gone" : over ? request.status || "no answer"
    : request.status ? `${request.status}, answering` : "in flight";
  row.node.dataset.request = request.id;
  setText(row.name, request.id);
  row.name.title = request.id;
  const fell = [...new Set(request.steps.map((step) => step.fallback.replaceAll("_", " ")))].join(", ");
  const said = [how, request.endpoint, over ? ago(now() - end) : "", fell ? `▲ ${fell}` : ""];
  setText(row.what, said.filter(Boolean).join(" · "));
  row.what.className = request.status >= 400 || request.gone || fell ? "troubled" : "";
  setText(row.took, duration(end - request.began_at));
  const content = JSON.stringify(request);
  if (over && row.drawn === content) return;
  row.drawn = content;
  drawLanes(row, request, end);
  fillTable(row);
}

// What was done for a request: the router's part, encode jobs, and the instances that prefill and
// answer.
function stagesOf(request, end) {
  const stages = [];
  const add = (kind, who, from, to, how, failed = false) =>
    stages.push({ kind, who, from, to: to || end, how, failed });
  add("receive", "router", request.began_at, request.read_at, request.read_at ? "received" : "comes");
  if (request.read_at) {
    const how = request.admitted_at ? "let in" : request.ended_at ? "not let in" : "waits to be let in";
    add("queue", "router", request.read_at, request.admitted_at, how);
  }
  for (const item of request.items) {
    for (const job of item.jobs) {
      const failed = Boolean(job.end) && job.end !== "encoded";
      add("encode", job.instance, job.began_at, job.ended_at, `${item.modality}: ${job.end || "under way"}`, failed);
    }
  }
  for (const leg of request.legs) {
    const how = leg.end || "under way", failed = leg.end === "failed";
    if (leg.stage === "prefill") {
      add("prefill", leg.instance, leg.began_at, leg.ended_at, how, failed);
    } else if (request.first_at < leg.began_at || request.first_at > (leg.ended_at || end)) {
      add("wait", leg.instance, leg.began_at, leg.ended_at, how, failed);
    } else {
      add("wait", leg.instance, leg.began_at, request.first_at, "first byte");
      add("stream", leg.instance, request.first_at, leg.ended_at, how, failed);
    }
  }
  return stages;
}

const STAGE_WORDS = {
  receive: "body", queue: "queue", encode: "encode", prefill: "prefill",
  wait: "first byte", stream: "answer",
};
const took = (stage) => `${STAGE_WORDS[stage.kind]} ${duration(stage.to - stage.from)}`;
const LANE_PX = 17;
const LETTER_PX = 7.2;

// One lane for the router, for each encode job, and for each instance that was asked.
function lanesOf(stages, seconds) {
  const lanes = [];
  for (const stage of stages) {
    if (stage.kind === "queue" || stage.kind === "stream") lanes.at(-1).stages.push(stage);
    else lanes.push({ who: stage.who, stages: [stage] });
  }
  const unseen = (stage) => stage.to - stage.from < 0.01 * seconds;
  if (lanes.length > 1 && lanes[0].stages.every(unseen)) lanes.shift();
  const more = lanes.length - LANES;
  if (more > 0) lanes.splice(LANES - 1, more + 1, { who: `${more + 1} more`, stages: [] });
  return lanes;
}

function drawLanes(row, request, end) {
  const seconds = Math.max(end - request.began_at, 1e-4);
  const stages = stagesOf(request, end);
  const lanes = lanesOf(stages, seconds);
  const share = (time) => Math.min(100, (100 * Math.max(0, time - request.began_at)) / seconds);
  const width = row.svg.clientWidth || 500;
  const fits = (text, percent) => (percent * width) / 100 > LETTER_PX * text.length + 10;
  const bars = [], texts = [];
  lanes.forEach((lane, index) => {
    const top = index * LANE_PX;
    bars.push(drawn("rect", { class: "lane", x: 0, y: top + 3, width: "100%", height: LANE_PX - 6, rx: 2 }));
    for (const stage of lane.stages) {
      const from = share(stage.from), to = share(stage.to), text = took(stage);
      const bar = drawn("rect", {
        class: `bar-${stage.failed ? "failed" : stage.kind}`, "data-stage": stage.kind,
        x: `${Math.min(from, 99.6)}%`, y: top + 2, width: `${Math.max(to - from, 0.4)}%`,
        height: LANE_PX - 4, rx: 2,
      });
      bar.append(drawn("title", {}, `${text}, ${stage.who}, ${stage.how}`));
      bars.push(bar);
      const middle = { dx: 5, y: top + LANE_PX / 2 };
      if (fits(text, to - from)) {
        texts.push(drawn("text", { x: `${from}%`, ...middle, class: `on-${stage.kind}` }, text));
      } else if (lane.stages.length === 1 && fits(text, 100 - to)) {
        texts.push(drawn("text", { x: `${to}%`, ...middle, class: "beside" }, text));
      }
    }
  });
  const steps = request.steps.map((step) => {
    const x = `${share(step.at)}%`;
    const line = drawn("line", { class: "step", x1: x, x2: x, y1: 0, y2: lanes.length * LANE_PX });
    line.append(drawn("title", {}, FALLBACK_WORDS[step.fallback] ?? step.fallback));
    return line;
  });
  row.labels.replaceChildren(...lanes.map((lane) => made("span", {}, lane.who)));
  row.svg.setAttribute("height", lanes.length * LANE_PX);
  const named = stages.filter((stage) => stage.kind !== "receive" && stage.kind !== "queue");
  row.svg.setAttribute("aria-label", named.map((stage) => `${stage.who}: ${took(stage)}`).join(", ") || "no stages");
  row.svg.replaceChildren(...bars, ...steps, ...texts);
}

function fillTable(row) {
  if (!row.detail.open) return;
  const request = row.request;
  const line = (...cells) => made("tr", {}, ...cells.map((cell) => made("td", {}, cell)));
  const since = (time) => `+${duration(Math.max(0, time - request.began_at))}`;
  const stages = stagesOf(request, request.ended_at || now()).map((stage) => line(
    STAGE_WORDS[stage.kind], stage.who, since(stage.from), duration(stage.to - stage.from), stage.how));
  const steps = request.steps.map((step) => line(
    "fallback", "router", since(step.at), "",
    `${step.phase}, ${step.failure.replaceAll("_", " ")}: ${FALLBACK_WORDS[step.fallback] ?? step.fallback}`));
  row.body.replaceChildren(...stages, ...steps);
}

// To begin.

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(at("key").value.trim());
  at("key").value = "";
  ask();
});
at("forget").addEventListener("click", () => {
  useKey("");
  ask();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
window.addEventListener("hashchange", () => {
  const given = keyOfAddress();
  if (given) {
    useKey(given);
    ask();
  }
});
window.addEventListener("resize", () => { if (data?.instances) showEdges(); });
ask();
