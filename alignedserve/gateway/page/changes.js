// What became of processes from one look to the next. The server names those that are there, and those that it misses.

const KEPT = 50;

export class Changes {
  constructor() {
    // key -> as last seen, with what this page knows beside: when it went, the pid before
    this.byKey = new Map();
    this.events = [];
  }

  // `processes`: null while no router answers. All that were ever seen, with `state`, `wentMs`, `formerPid`, `backMs`.
  look(processes, nowMs) {
    const named = new Map((processes ?? []).map((process) => [keyOf(process), process]));
    for (const key of new Set([...named.keys(), ...this.byKey.keys()])) {
      this.byKey.set(key, this.next(this.byKey.get(key), named.get(key), nowMs));
    }
    return [...this.byKey.values()];
  }

  next(before, said, nowMs) {
    if (!before) return { ...said, wentMs: said.state === "up" ? null : nowMs, formerPid: null, backMs: null };
    // an island is not named while its router does not answer, and a gateway while it comes back
    const now = said ?? { ...before, state: "unknown", requests: {} };
    if (now.state !== "up") return this.gone(before, now, nowMs);
    return this.there(before, now, nowMs);
  }

  gone(before, now, nowMs) {
    if (before.state === "up") {
      const what = now.state === "down" ? "is down" : "is not heard of";
      this.say(nowMs, before, `${before.instance_id} (pid ${before.pid}) ${what}`);
    }
    const pid = now.pid || before.pid;
    return { ...before, ...now, pid, epoch: before.epoch, wentMs: before.wentMs ?? nowMs };
  }

  there(before, now, nowMs) {
    const isNew = before.epoch !== now.epoch;
    const awayMs = before.wentMs === null ? null : nowMs - before.wentMs;
    if (isNew) this.say(nowMs, now, `${now.instance_id} is back as pid ${now.pid}${after(awayMs)}`);
    else if (awayMs !== null) this.say(nowMs, now, `${now.instance_id} (pid ${now.pid}) is heard of again`);
    const marks = isNew ? { formerPid: before.pid, backMs: nowMs } : {};
    return { ...before, ...now, ...marks, wentMs: null };
  }

  say(atMs, process, text) {
    const island = process.island ? `, island ${process.island}` : "";
    this.events = [{ atMs, text: text + island }, ...this.events].slice(0, KEPT);
  }
}

export const keyOf = (process) => `${process.island}/${process.instance_id}`;

function after(awayMs) {
  return awayMs === null ? "" : `, after ${(awayMs / 1000).toFixed(1)} s`;
}
