// Calls `look` repeatedly while the tab is visible. It returns the milliseconds until its next call. null: `now` has to
// be called first.

export class Poll {
  constructor(look) {
    this.look = look;
    this.timer = null;
    this.isLooking = false;
    document.addEventListener("visibilitychange", () => this.now());
  }

  async now() {
    clearTimeout(this.timer);
    if (this.isLooking || document.hidden) return;
    this.isLooking = true;
    const waitMs = await this.look();
    this.isLooking = false;
    if (waitMs !== null) this.timer = setTimeout(() => this.now(), waitMs);
  }
}
