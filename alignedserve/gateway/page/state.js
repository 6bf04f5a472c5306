// Shows the server's state in a line, and in the tab's title.

import { byId, setText } from "./dom.js";
import { age } from "./format.js";

const STOPPING = "this server is stopping";
const TITLES = { ready: "AlignedServe", degraded: "◐ AlignedServe", bad: "✕ AlignedServe", away: "✕ AlignedServe" };

// Returns whether each kind of process that an answer needs is up. While the server stops, requests finish.
export const isUp = ({ status, reason }) => status !== "unavailable" || reason === STOPPING;

export function showHealth(health) {
  if (health.status === "ok") show("ready", "● Ready");
  else if (health.status === "degraded") show("degraded", `◐ Degraded: ${whatIsWrong(health)}`);
  else if (health.reason === STOPPING) show("degraded", "◐ Stopping: running requests finish, new ones are refused");
  else show("bad", `✕ Unavailable: ${health.reason}`);
}

function whatIsWrong(health) {
  const stores = [health.store && "the store", health.files && "the file storage"];
  const down = [...(health.down ?? []), ...stores.filter(Boolean)];
  return [down.length && `${down.join(", ")} down`, ...(health.missing ?? [])].filter(Boolean).join("; ");
}

export function showAway(error, retryMs) {
  const seconds = Math.round(retryMs / 1000);
  const why = error instanceof TypeError ? "it can't be reached" : error.message;
  show("away", `✕ The server is away (${why}); retrying every ${seconds} s`);
}

export function showAbout(model, cluster, serverTimeMs) {
  const starts = (cluster?.processes ?? []).map((process) => process.started_s).filter((startS) => startS > 0);
  const upFor = starts.length ? `up for ${age(serverTimeMs / 1000 - Math.min(...starts))}` : "";
  const facts = [model && `model ${model.id}`, model && `up to ${model.max_model_len} tokens`, upFor];
  setText(byId("about"), [...facts, `API at ${location.origin}/v1`].filter(Boolean).join(" · "));
}

function show(level, text) {
  byId("state").dataset.level = level;
  document.body.dataset.level = level;
  setText(byId("state"), text);
  document.title = TITLES[level];
}
