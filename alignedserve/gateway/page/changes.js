// Changes of processes between two polls. A router that answers lists each process of its island, up or down. Nothing
// is known about an island while its router does not answer.

const KEPT = 50;

export class Changes {
  constructor() {
    // The last report of each process by its key, with what this page adds: since when it is missed, when it came back,
    // and its former pid.
    this.byKey = new Map();
    this.events = [];
  }

  // Returns all processes seen so far. `processes` is null while no router answers.
  look(processes, nowMs) {
    const named = new Map((processes ?? []).map((process) => [keyOf(process), process]));
    const heard = new Set([...named.values()].map((process) => process.island));
    for (const key of new Set([...named.keys(), ...this.byKey.keys()])) {
      this.byKey.set(key, this.next(this.byKey.get(key), named.get(key), heard, nowMs));
    }
    return [...this.byKey.values()];
  }

  next(before, said, heard, nowMs) {
    if (!before) return { ...said, missedMs: said.state === "up" ? null : nowMs, backMs: null, formerPid: null };
    if (!heard.has(before.island)) return this.unheard(before, nowMs);
    if (said?.state === "up") return this.there(before, said, nowMs);
    return this.missed(before, said, nowMs);
  }

  // The island's router does not answer. Only the router itself is known to be missing.
  unheard(before, nowMs) {
    const isMissed = before.role === "router";
    if (isMissed && before.missedMs === null) this.say(nowMs, before, `router (pid ${before.pid}) does not answer`);
    const missedMs = isMissed ? (before.missedMs ?? nowMs) : before.missedMs;
    return { ...before, state: "unknown", requests: {}, missedMs };
  }

  missed(before, said, nowMs) {
    if (before.missedMs === null) this.say(nowMs, before, `${before.instance_id} (pid ${before.pid}) is down`);
    const { pid, epoch } = before;
    return { ...before, ...said, state: "down", requests: {}, pid, epoch, missedMs: before.missedMs ?? nowMs };
  }

  there(before, said, nowMs) {
    const wasMissed = before.missedMs !== null;
    const after = wasMissed ? `, after ${((nowMs - before.missedMs) / 1000).toFixed(1)} s` : "";
    const now = { ...before, ...said, missedMs: null };
    if (before.epoch !== said.epoch) {
      this.say(nowMs, said, `${said.instance_id} is back as pid ${said.pid}${after}`);
      return { ...now, backMs: nowMs, formerPid: before.pid };
    }
    if (wasMissed) this.say(nowMs, said, `${said.instance_id} (pid ${said.pid}) answers again${after}`);
    return now;
  }

  say(atMs, process, text) {
    const island = process.island ? `, island ${process.island}` : "";
    this.events = [{ atMs, text: text + island }, ...this.events].slice(0, KEPT);
  }
}

export const keyOf = (process) => `${process.island}/${process.instance_id}`;
