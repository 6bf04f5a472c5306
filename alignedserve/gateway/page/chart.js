// Tokens per second of both classes over the last minutes: a solid line and a broken one.

import { element, setText } from "./dom.js";
import { number } from "./format.js";
import { tokensPerSecond } from "./reading.js";

const SPAN_MS = 5 * 60 * 1000;
const WIDTH = 300;
const HEIGHT = 100;
const SVG = "http://www.w3.org/2000/svg";

export class Chart {
  constructor() {
    this.lines = { be: line("be"), rt: line("rt") };
    this.svg = svgElement("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    const middle = { x1: 0, x2: WIDTH, y1: HEIGHT / 2, y2: HEIGHT / 2, class: "middle" };
    this.svg.append(svgElement("line", middle), this.lines.be, this.lines.rt);
    this.top = element("span", { className: "top" });
    const span = element("span", { className: "left" }, "5 minutes ago");
    const now = element("span", { className: "right" }, "now");
    this.node = element("div", { className: "chart" }, this.top, this.svg, span, now);
  }

  show(readings) {
    const rates = { rt: ratesOf(readings, "rt"), be: ratesOf(readings, "be") };
    const top = roundUp(Math.max(...[...rates.rt, ...rates.be].map((point) => point.rate), 0));
    for (const tier of ["rt", "be"]) this.lines[tier].setAttribute("points", pointsOf(rates[tier], top));
    setText(this.top, `${number(top)} tokens/s`);
    this.svg.ariaLabel = `Tokens per second over the last five minutes, up to ${number(top)}`;
  }
}

function ratesOf(readings, tier) {
  const end = readings.at(-1)?.atMs ?? 0;
  return readings.slice(1).map((newer, index) => ({
    agoMs: end - newer.atMs,
    rate: tokensPerSecond(readings[index], newer, tier),
  }));
}

function pointsOf(rates, top) {
  const x = (point) => WIDTH * (1 - point.agoMs / SPAN_MS);
  const y = (point) => HEIGHT * (1 - point.rate / top);
  return rates.map((point) => `${x(point).toFixed(2)},${y(point).toFixed(2)}`).join(" ");
}

// Rounds up to a round number, ten at least: the scale does not change with every reading.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 10)));
  return [1, 2, 4, 6, 10].map((digit) => digit * power).find((bound) => bound >= value);
}

function line(tier) {
  return svgElement("polyline", { class: `line ${tier}`, fill: "none", "vector-effect": "non-scaling-stroke" });
}

function svgElement(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}
