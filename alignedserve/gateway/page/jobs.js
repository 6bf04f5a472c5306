// The latest batch jobs.

import { Refused, get, post } from "./api.js";
import { Bar, Rows, byId, element, setText } from "./dom.js";
import { age, clock, number } from "./format.js";

const NUM_JOBS = 10;
const CAN_BE_CANCELLED = ["validating", "in_progress"];
const MARKS = { completed: "✓", failed: "✕", expired: "✕", cancelled: "–", cancelling: "–" };

export class Jobs {
  constructor() {
    const list = element("ol", { className: "jobs" });
    this.rows = new Rows(list, () => new Row((id) => this.cancel(id)));
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

  async cancel(id) {
    if (!confirm(`Cancel ${id}? Its finished answers are kept.`)) return;
    try {
      await post(`/v1/batches/${encodeURIComponent(id)}/cancel`, {});
    } catch (error) {
      alert(error.message);
    }
  }
}

// Returns a row that shows this job.
export function rowOf(job) {
  const row = new Row(() => {});
  row.show(job);
  return row;
}

class Row {
  constructor(cancel) {
    this.id = element("code");
    this.status = element("span", { className: "status" });
    this.bar = new Bar("Finished lines");
    this.counts = element("span", { className: "counts" });
    this.window = new Window();
    this.cancel = element("button", { type: "button", className: "cancel", onclick: () => cancel(this.node.dataset.job) });
    this.cancel.textContent = "Cancel";
    const space = element("span", { className: "space" });
    const top = element("div", { className: "row" }, this.id, space, this.status, this.cancel);
    this.node = element("li", {}, top, this.bar.node, this.counts, this.window.node);
  }

  show(job) {
    const { completed, failed, total } = job.request_counts;
    this.node.dataset.job = job.id;
    this.node.dataset.status = job.status;
    setText(this.id, job.id);
    this.cancel.ariaLabel = `Cancel ${job.id}`;
    this.cancel.hidden = !CAN_BE_CANCELLED.includes(job.status);
    setText(this.status, `${MARKS[job.status] ?? "…"} ${job.status.replace("_", " ")}`);
    const isRunning = job.status === "in_progress";
    this.bar.show(isRunning ? job.alignedserve.progress : total ? (completed + failed) / total : 0);
    this.window.show(isRunning ? job : null);
    const done = `${number(completed)} of ${number(total)} completed, ${number(failed)} failed`;
    setText(this.counts, `${done}; created ${age(job.serverTimeMs / 1000 - job.created_at)} ago`);
  }
}

// A job's window: the share of it that has passed, with a mark at the estimated end of the job.
class Window {
  constructor() {
    this.text = element("span", { className: "counts estimate" });
    this.bar = new Bar("Share of its window that has passed");
    this.mark = element("span", { className: "due" });
    this.node = element("div", { className: "window", hidden: true }, this.text, this.bar.node, this.mark);
  }

  // `job` is null if it is not running.
  show(job) {
    this.node.hidden = job === null;
    if (job === null) return;
    const nowS = job.serverTimeMs / 1000;
    const share = (atS) => Math.min(Math.max((atS - job.created_at) / (job.expires_at - job.created_at), 0), 1);
    const dueS = job.alignedserve.estimated_completion_at;
    const isLate = dueS !== null && dueS > job.expires_at;
    this.node.dataset.late = String(isLate);
    this.bar.show(share(nowS));
    this.mark.hidden = dueS === null;
    if (dueS !== null) this.mark.style.left = `${share(dueS) * 100}%`;
    const done = dueS === null ? "no estimate yet" : `done in ${age(dueS - nowS)}, at ${clock(new Date(dueS * 1000))}`;
    const left = `${isLate ? "after its window, which" : "its window"} ends in ${age(job.expires_at - nowS)}`;
    setText(this.text, `${done}; ${left}`);
  }
}
