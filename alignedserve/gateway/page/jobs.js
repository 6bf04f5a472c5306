// The latest batch jobs.

import { Refused, get } from "./api.js";
import { Bar, Rows, byId, element, setText } from "./dom.js";
import { age, number } from "./format.js";

const NUM_JOBS = 10;
const MARKS = { completed: "✓", failed: "✕", expired: "✕", cancelled: "–", cancelling: "–" };

export class Jobs {
  constructor() {
    const list = element("ol", { className: "jobs" });
    this.rows = new Rows(list, () => new Row());
    this.note = element("p", { className: "note" });
    byId("jobs").append(list, this.note);
  }

  async look(serverTimeMs) {
    try {
      const { data } = await (await get(`/v1/batches?limit=${NUM_JOBS}`)).json();
      this.rows.show(data.map((job) => ({ ...job, serverTimeMs })), (job) => job.id);
      setText(this.note, data.length ? "" : "None yet: alignedserve batch submit in.jsonl");
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      setText(this.note, error.message);
    }
  }
}

class Row {
  constructor() {
    this.id = element("code");
    this.status = element("span", { className: "status" });
    this.bar = new Bar("Lines that are done");
    this.counts = element("span", { className: "counts" });
    const top = element("div", { className: "row" }, this.id, element("span", { className: "space" }), this.status);
    this.node = element("li", {}, top, this.bar.node, this.counts);
  }

  show(job) {
    const { completed, failed, total } = job.request_counts;
    this.node.dataset.job = job.id;
    this.node.dataset.status = job.status;
    setText(this.id, job.id);
    setText(this.status, `${MARKS[job.status] ?? "…"} ${job.status.replace("_", " ")}`);
    this.bar.show(total ? (completed + failed) / total : 0);
    const done = `${number(completed)} of ${number(total)} completed, ${number(failed)} failed`;
    setText(this.counts, `${done}; made ${age(job.serverTimeMs / 1000 - job.created_at)} ago`);
  }
}
