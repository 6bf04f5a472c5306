// All processes of all islands, and their changes since the page was opened.

import { Changes, keyOf } from "./changes.js";
import { Bar, Rows, byId, element, setText } from "./dom.js";
import { NONE, age, clock, number, percent } from "./format.js";

const ROLES = ["gateway", "router", "kvpool", "prefill", "decode", "colocated"];
// The same states as in the metrics (telemetry/exposition.py).
const RUNNING = ["prefilling", "running", "making room"];
const GONE = ["leaving"];
const WITH_REQUESTS = ["prefill", "decode", "colocated"];
const FRESH_MS = 60_000;
const STATES = {
  up: ["up", "● up"],
  back: ["back", "↻ back"],
  down: ["down", "✕ down"],
  unanswering: ["down", "✕ no answer"],
  unknown: ["unknown", "? unknown"],
};
const COLUMNS = ["process", "state", "pid", "up for", "running", "waiting", "KV blocks in use"];

export class Processes {
  constructor() {
    this.changes = new Changes();
    const body = element("tbody");
    this.rows = new Rows(body, () => new Row());
    const events = element("ol", { id: "events", className: "events" });
    this.events = new Rows(events, eventRow);
    this.quiet = element("p", { className: "note" }, "No process has started or died since this page was opened.");
    const heads = COLUMNS.map((name) => element("th", { scope: "col" }, name));
    const table = element("table", { className: "processes" }, element("thead", {}, element("tr", {}, ...heads)), body);
    byId("processes").append(table, events, this.quiet);
  }

  // `cluster` is null while no router answers.
  show(cluster, serverTimeMs) {
    const nowMs = Date.now();
    const found = this.changes.look(cluster && cluster.processes, nowMs);
    const hasIslands = found.some((process) => process.island > 0);
    const shown = found.sort(byPlace).map((process) => ({ ...process, nowMs, serverTimeMs, hasIslands }));
    this.rows.show(shown, keyOf);
    this.events.show(this.changes.events, (event) => `${event.atMs} ${event.text}`);
    this.quiet.hidden = this.changes.events.length > 0;
  }
}

function byPlace(one, other) {
  const roles = ROLES.indexOf(one.role) - ROLES.indexOf(other.role);
  return one.island - other.island || roles || one.instance_id.localeCompare(other.instance_id);
}

class Row {
  constructor() {
    this.cells = COLUMNS.map((name) => element("td"));
    this.cells.forEach((cell, index) => (cell.dataset.label = COLUMNS[index]));
    this.bar = new Bar("KV blocks in use");
    this.blocks = element("span", { className: "blocks" });
    this.cells.at(-1).append(this.bar.node, this.blocks);
    this.node = element("tr", {}, ...this.cells);
  }

  show(process) {
    const [level, word] = STATES[stateOf(process)];
    this.node.dataset.instance = process.instance_id;
    this.node.dataset.level = level;
    const [name, state, pid, upFor, running, waiting] = this.cells;
    setText(name, process.hasIslands ? `${process.island}: ${process.instance_id}` : process.instance_id);
    setText(state, word);
    setText(pid, pidOf(process));
    setText(upFor, ageOf(process));
    const isUp = process.state === "up";
    const has = isUp && WITH_REQUESTS.includes(process.role);
    setText(running, has ? number(countOf(process.requests, isRunning)) : "");
    setText(waiting, has ? number(countOf(process.requests, isWaiting)) : "");
    this.showBlocks(process.blocks, isUp);
  }

  showBlocks({ used, free }, isUp) {
    const share = isUp && used + free > 0 ? used / (used + free) : null;
    this.bar.show(share);
    setText(this.blocks, share === null ? "" : `${number(used)} of ${number(used + free)} (${percent(share)})`);
  }
}

function stateOf({ state, role, backMs, nowMs }) {
  if (state === "unknown") return role === "router" ? "unanswering" : "unknown";
  return state === "up" && backMs !== null && nowMs - backMs < FRESH_MS ? "back" : state;
}

function pidOf({ state, pid, formerPid }) {
  if (!pid) return NONE;
  if (state === "down") return `was ${pid}`;
  return formerPid ? `${pid} (was ${formerPid})` : String(pid);
}

function ageOf({ state, started_s, missedMs, nowMs, serverTimeMs }) {
  if (missedMs !== null) return `down for ${age((nowMs - missedMs) / 1000)}`;
  return state === "up" && started_s ? age(serverTimeMs / 1000 - started_s) : NONE;
}

const isRunning = (state) => RUNNING.includes(state);
const isWaiting = (state) => !RUNNING.includes(state) && !GONE.includes(state);

function countOf(requests, isCounted) {
  return Object.entries(requests).reduce((total, [state, count]) => total + (isCounted(state) ? count : 0), 0);
}

function eventRow({ atMs, text }) {
  const time = element("time", {}, clock(new Date(atMs)));
  return { node: element("li", {}, time, ` ${text}`), show() {} };
}
