// A reading of the metrics, and figures derived from two of them.

const OBJECTIVES = ["ttft", "tbt", "deadline"];

export const NOTHING = { asked: 0, found: 0, evictions: 0, recoveries: 0 };

// `before` is the reading before it: its values are reused while no router answers.
// `isUp`: each kind of process that an answer needs is up.
export function readingOf(samples, atMs, before, isUp) {
  const moved = movedIn(samples) ?? before?.moved ?? NOTHING;
  return { atMs, isUp, rt: tierOf(samples, "rt"), be: tierOf(samples, "be"), moved };
}

function movedIn(samples) {
  const asked = samples.sum("prefix_cache_queries_total");
  if (asked === null) return null;
  const found = samples.sum("prefix_cache_hits_total");
  const evictions = samples.sum("num_evictions_total");
  const recoveries = samples.sum("recoveries_total") + samples.sum("requests_resubmitted_total");
  return { asked, found, evictions, recoveries };
}

function tierOf(samples, tier) {
  const met = (slo, is) => samples.sum("request_slo_total", { tier, slo, met: is });
  const metSoFar = (slo, is) => samples.sum("open_request_slo", { tier, slo, met: is }) ?? 0;
  return {
    tokens: samples.sum("generation_tokens_total", { tier }),
    running: samples.sum("num_requests_running", { tier }),
    waiting: samples.sum("num_requests_waiting", { tier }),
    kept: Object.fromEntries(OBJECTIVES.map((slo) => [slo, met(slo, "true")])),
    missed: Object.fromEntries(OBJECTIVES.map((slo) => [slo, met(slo, "false")])),
    keptSoFar: Object.fromEntries(OBJECTIVES.map((slo) => [slo, metSoFar(slo, "true")])),
    missedSoFar: Object.fromEntries(OBJECTIVES.map((slo) => [slo, metSoFar(slo, "false")])),
    silence: samples.max("longest_silence_seconds", { tier }),
    firstToken: samples.buckets("time_to_first_token_seconds", { tier }),
    nextToken: samples.buckets("inter_token_latency_seconds", { tier }),
  };
}

export function tokensPerSecond(older, newer, tier) {
  const seconds = (newer.atMs - older.atMs) / 1000;
  return seconds > 0 ? (newer[tier].tokens - older[tier].tokens) / seconds : 0;
}

// Returns whether a process was missing without which nothing is computed.
export const isStopped = (older, newer) => !(older.isUp && newer.isUp);

// Returns whether best effort had requests and got no token, because real time used all instances.
export function isPaused(older, newer) {
  const had = (tier) => [older, newer].every((reading) => reading[tier].running + reading[tier].waiting > 0);
  return !isStopped(older, newer) && had("rt") && had("be") && newer.be.tokens === older.be.tokens;
}

// Returns the share of requests that met this objective: of those that ended in between, and of the open ones as they
// are now. null: none had it.
export function shareKept(older, newer, tier, slo) {
  const kept = newer[tier].kept[slo] - older[tier].kept[slo] + newer[tier].keptSoFar[slo];
  const missed = newer[tier].missed[slo] - older[tier].missed[slo] + newer[tier].missedSoFar[slo];
  return kept + missed > 0 ? kept / (kept + missed) : null;
}

// A router's counts restart with it.
export const grown = (older, newer) => Math.max(newer - older, 0);

export function shareFound(older, newer) {
  const asked = grown(older.asked, newer.asked);
  return asked > 0 ? Math.min(grown(older.found, newer.found) / asked, 1) : null;
}

// Estimates a quantile within its bucket, as Prometheus does. null: nothing was observed in between.
export function quantile(q, older, newer) {
  const counts = newer.map(([bound, count], index) => [bound, count - (older[index]?.[1] ?? 0)]);
  const total = counts.at(-1)?.[1] ?? 0;
  if (total <= 0) return null;
  const rank = q * total;
  const index = counts.findIndex(([, count]) => count >= rank);
  const [lower, below] = index > 0 ? counts[index - 1] : [0, 0];
  const [upper, count] = counts[index];
  if (upper === Infinity) return lower;
  return lower + ((upper - lower) * (rank - below)) / (count - below);
}
