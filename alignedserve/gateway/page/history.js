// The readings of the last minutes.

const KEPT_MS = 5 * 60 * 1000;

export class History {
  constructor() {
    this.readings = [];
  }

  add(reading) {
    // A restarted gateway counts from zero.
    if (this.latest && isBefore(reading, this.latest)) this.readings = [];
    this.readings.push(reading);
    const first = this.readings.findIndex((each) => each.atMs >= reading.atMs - KEPT_MS);
    this.readings.splice(0, first);
  }

  get latest() {
    return this.readings.at(-1);
  }

  // The oldest reading of the last `seconds`. If that is the latest one, after a pause, the one before it.
  since(seconds) {
    const index = this.readings.findIndex((each) => each.atMs >= this.latest.atMs - seconds * 1000);
    const isAlone = index === this.readings.length - 1;
    return this.readings[isAlone ? Math.max(index - 1, 0) : index];
  }
}

function isBefore(newer, older) {
  return ["rt", "be"].some((tier) => newer[tier].tokens < older[tier].tokens);
}
