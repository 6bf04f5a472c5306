// Parses Prometheus's text, as this server writes it.

const LINE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const PREFIX = "alignedserve:";

export class Samples {
  constructor(text) {
    this.byName = new Map();
    for (const line of text.split("\n")) {
      const found = LINE.exec(line);
      if (found) this.add(found[1], labelsOf(found[2] ?? ""), toNumber(found[3]));
    }
  }

  add(name, labels, value) {
    if (!this.byName.has(name)) this.byName.set(name, []);
    this.byName.get(name).push({ labels, value });
  }

  // Returns the samples with these labels. `name` is without our prefix.
  find(name, labels = {}) {
    const wanted = Object.entries(labels);
    const named = this.byName.get(PREFIX + name) ?? [];
    return named.filter((sample) => wanted.every(([label, value]) => sample.labels[label] === value));
  }

  // null: there is no such sample.
  sum(name, labels) {
    const found = this.find(name, labels);
    return found.length ? found.reduce((total, sample) => total + sample.value, 0) : null;
  }

  max(name, labels) {
    return Math.max(0, ...this.find(name, labels).map((sample) => sample.value));
  }

  // Returns [bound, number of values up to it] of a histogram, by rising bounds, for all gateways together.
  buckets(name, labels) {
    const counts = new Map();
    for (const { labels: { le }, value } of this.find(`${name}_bucket`, labels)) {
      counts.set(le, (counts.get(le) ?? 0) + value);
    }
    return [...counts].map(([le, count]) => [toNumber(le), count]);
  }
}

function labelsOf(text) {
  return Object.fromEntries([...text.matchAll(LABEL)].map(([, name, value]) => [name, value]));
}

function toNumber(text) {
  return text === "+Inf" ? Infinity : Number(text);
}
