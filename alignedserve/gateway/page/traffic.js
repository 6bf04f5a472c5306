// Real time beside best effort: load, latency, and attained objectives.

import { Chart } from "./chart.js";
import { byId, element, setText } from "./dom.js";
import { NONE, duration, number, percent } from "./format.js";
import { quantile, shareKept, tokensPerSecond } from "./reading.js";

const TIERS = { rt: "real time", be: "best effort" };
const RATE_S = 5;
const WINDOW_S = 60;

const NOTE =
  "Times and shares cover the last minute, and open requests as they are now. p50 and p99 are estimated from histograms. " +
  "In time: the first token is due when its objective says, and each further one an interval later. A stream that was " +
  "ahead may pause and still be in time, so see its longest silence, which counts from its first token. – means none.";

// Title of each figure, its name for tests and styles, and its text for a tier.
const FIGURES = [
  ["tokens per second", "rate", (tier, history) => rateOf(tier, history)],
  ["running", "running", (tier, history) => number(history.latest[tier].running)],
  ["waiting", "waiting", (tier, history) => number(history.latest[tier].waiting)],
  ["first token, p50 / p99", "ttft", (tier, history) => timesOf(tier, history, "firstToken")],
  ["token to token, p50 / p99", "tbt", (tier, history) => timesOf(tier, history, "nextToken")],
  ["longest silence of a stream", "silence", (tier, history) => silenceOf(history.latest[tier].silence)],
  ["first token in time", "ttft-kept", (tier, history) => keptOf(tier, history, "ttft")],
  ["all tokens in time", "tbt-kept", (tier, history) => keptOf(tier, history, "tbt")],
  ["done by its deadline", "deadline-kept", (tier, history) => keptOf(tier, history, "deadline")],
];

function rateOf(tier, history) {
  return number(tokensPerSecond(history.since(RATE_S), history.latest, tier));
}

function timesOf(tier, history, name) {
  const [older, newer] = [history.since(WINDOW_S), history.latest].map((reading) => reading[tier][name]);
  const [half, most] = [0.5, 0.99].map((q) => quantile(q, older, newer));
  return half === null ? NONE : `${duration(half)} / ${duration(most)}`;
}

const silenceOf = (seconds) => (seconds > 0 ? duration(seconds) : NONE);

function keptOf(tier, history, slo) {
  return percent(shareKept(history.since(WINDOW_S), history.latest, tier, slo));
}

export class Traffic {
  constructor() {
    this.chart = new Chart();
    this.cells = [];
    const beside = element("div", { className: "beside" }, this.chart.node, this.table());
    byId("traffic").append(beside, element("p", { className: "note" }, NOTE));
  }

  table() {
    const heads = Object.entries(TIERS).map(([tier, name]) => head(tier, name));
    const rows = FIGURES.map(([name, figure, say]) => this.row(name, figure, say));
    const top = element("tr", {}, element("td"), ...heads);
    return element("table", { className: "figures" }, element("thead", {}, top), element("tbody", {}, ...rows));
  }

  row(name, figure, say) {
    const cells = Object.keys(TIERS).map((tier) => {
      const node = element("td", { id: `${tier}-${figure}` });
      this.cells.push({ node, say: (history) => say(tier, history) });
      return node;
    });
    return element("tr", { className: figure }, element("th", { scope: "row" }, name), ...cells);
  }

  show(history) {
    this.chart.show(history.readings);
    for (const { node, say } of this.cells) setText(node, say(history));
  }
}

function head(tier, name) {
  const mark = element("span", { className: `mark ${tier}`, ariaHidden: "true" });
  return element("th", { scope: "col" }, mark, name);
}
