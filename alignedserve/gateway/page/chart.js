// Tokens per second of both tiers over the last minutes, a band each, with the pauses of best effort, and with the times
// in which a process was missing.

import { element, setText } from "./dom.js";
import { number } from "./format.js";
import { isPaused, isStopped, tokensPerSecond } from "./reading.js";

// What the chart may be wide. It begins with the first, and grows with what it shows.
const SPANS_MIN = [1, 2, 5];
const WIDTH = 300;
const HEIGHT = 100;
const GAP = 6;
const SVG = "http://www.w3.org/2000/svg";
const NAMES = { rt: "real time", be: "best effort" };

export class Chart {
  constructor() {
    const height = (HEIGHT - GAP) / 2;
    this.bands = { rt: new Band("rt", 0, height), be: new Band("be", height + GAP, height) };
    this.pauses = svgElement("g", { class: "pauses" });
    this.svg = svgElement("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.stops = svgElement("g", { class: "stops" });
    this.svg.append(this.pauses, this.stops, ...this.bands.rt.nodes, ...this.bands.be.nodes);
    this.span = element("span", { className: "left" });
    const now = element("span", { className: "right" }, "now");
    this.node = element("div", { className: "chart" }, this.bands.rt.label, this.bands.be.label, this.svg, this.span, now);
  }

  show(readings) {
    const minutes = spanOf(readings);
    const steps = stepsOf(readings, minutes * 60_000);
    for (const band of Object.values(this.bands)) band.show(steps);
    const { top, height } = this.bands.be;
    const seconds = (name) => Math.round(steps.reduce((sum, step) => sum + (step[name] ? step.seconds : 0), 0));
    const [paused, stopped] = [seconds("isPaused"), seconds("isStopped")];
    this.pauses.replaceChildren(...rectsOf(steps, "isPaused", { y: top, height }));
    this.stops.replaceChildren(...rectsOf(steps, "isStopped", { y: 0, height: HEIGHT }));
    this.bands.be.say(paused ? `, paused by real time for ${paused} s` : "");
    this.bands.rt.say(stopped ? `, a process was missing for ${stopped} s` : "");
    setText(this.span, minutes === 1 ? "a minute ago" : `${minutes} minutes ago`);
    const of = Object.entries(this.bands).map(([tier, band]) => `${NAMES[tier]} up to ${number(band.most)}`);
    const times = `best effort paused for ${paused} s, a process missing for ${stopped} s`;
    this.svg.ariaLabel = `Tokens per second since ${this.span.textContent}: ${of.join(", ")}; ${times}`;
  }
}

function spanOf(readings) {
  const minutes = readings.length ? (readings.at(-1).atMs - readings[0].atMs) / 60_000 : 0;
  return SPANS_MIN.find((span) => minutes <= span) ?? SPANS_MIN.at(-1);
}

class Band {
  constructor(tier, top, height) {
    this.tier = tier;
    this.top = top;
    this.height = height;
    this.most = 0;
    this.area = svgElement("polygon", { class: `area ${tier}` });
    this.line = svgElement("polyline", { class: `line ${tier}`, fill: "none", "vector-effect": "non-scaling-stroke" });
    const base = { x1: 0, x2: WIDTH, y1: top + height, y2: top + height, class: "base" };
    this.nodes = [svgElement("line", base), this.area, this.line];
    this.label = element("span", { className: `top ${tier}` });
  }

  show(steps) {
    this.most = roundUp(Math.max(...steps.map((step) => step[this.tier]), 0));
    const floor = this.top + this.height;
    const y = (step) => floor - (this.height * step[this.tier]) / this.most;
    const points = steps.map((step) => `${step.to.toFixed(2)},${y(step).toFixed(2)}`);
    this.line.setAttribute("points", points.join(" "));
    const ends = steps.length ? [`${WIDTH},${floor}`, `${steps[0].to.toFixed(2)},${floor}`] : [];
    this.area.setAttribute("points", [...points, ...ends].join(" "));
    this.say("");
  }

  say(more) {
    setText(this.label, `${NAMES[this.tier]}, up to ${number(this.most)} tokens/s${more}`);
  }
}

// The steps between readings: place in the chart, rates of both tiers, and why there may have been no tokens.
function stepsOf(readings, spanMs) {
  const end = readings.at(-1)?.atMs ?? 0;
  const x = (reading) => WIDTH * (1 - (end - reading.atMs) / spanMs);
  return readings.slice(1).map((newer, index) => ({
    from: x(readings[index]),
    to: x(newer),
    seconds: (newer.atMs - readings[index].atMs) / 1000,
    rt: tokensPerSecond(readings[index], newer, "rt"),
    be: tokensPerSecond(readings[index], newer, "be"),
    isPaused: isPaused(readings[index], newer),
    isStopped: isStopped(readings[index], newer),
  }));
}

// Returns a rectangle for each time in which `name` was true. Adjacent steps are one.
function rectsOf(steps, name, place) {
  const found = [];
  for (const { from, to } of steps.filter((step) => step[name])) {
    if (found.length && Math.abs(found.at(-1)[1] - from) < 1e-6) found.at(-1)[1] = to;
    else found.push([from, to]);
  }
  return found.map(([from, to]) => svgElement("rect", { x: from, width: to - from, ...place }));
}

// Rounds up to a round number, at least ten, so that the scale does not change with every reading.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 10)));
  return [1, 2, 4, 6, 10].map((digit) => digit * power).find((bound) => bound >= value);
}

function svgElement(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}
