// The pool, the prefix cache, evictions and recoveries.

import { Bar, byId, element, setText } from "./dom.js";
import { NONE, number, percent } from "./format.js";
import { NOTHING, grown, shareFound } from "./reading.js";

const WINDOW_S = 60;

export class Memory {
  constructor() {
    this.bar = new Bar("Pool in use");
    this.texts = {};
    const list = element(
      "dl",
      { className: "facts" },
      this.fact("pool", "pool in use", this.bar.node),
      this.fact("found", "prompt tokens found in the prefix cache"),
      this.fact("evictions", "requests evicted, KV kept"),
      this.fact("recoveries", "requests recovered after a process died"),
    );
    byId("memory").append(list);
  }

  fact(name, title, ...more) {
    this.texts[name] = element("span", { id: `memory-${name}` });
    return element("div", {}, element("dt", {}, title), element("dd", {}, ...more, this.texts[name]));
  }

  show(cluster, history) {
    this.showPool(cluster);
    const [minute, latest] = [history.since(WINDOW_S).moved, history.latest.moved];
    const [now, ever] = [shareFound(minute, latest), shareFound(NOTHING, latest)];
    setText(this.texts.found, `${percent(now)} in the last minute, ${percent(ever)} in total`);
    for (const name of ["evictions", "recoveries"]) {
      const recent = number(grown(minute[name], latest[name]));
      setText(this.texts[name], `${recent} in the last minute, ${number(latest[name])} in total`);
    }
  }

  showPool(cluster) {
    const pools = (cluster?.processes ?? []).filter((process) => process.role === "kvpool");
    const used = pools.reduce((total, pool) => total + pool.blocks.used, 0);
    const all = pools.reduce((total, pool) => total + pool.blocks.used + pool.blocks.free, 0);
    this.bar.show(all ? used / all : null);
    setText(this.texts.pool, all ? `${number(used)} of ${number(all)} blocks (${percent(used / all)})` : NONE);
  }
}
