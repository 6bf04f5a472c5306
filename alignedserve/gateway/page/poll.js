// Calls `look` again and again while the tab can be seen. It answers after how many milliseconds it is to be called
// again, or null: not before `now` is called.

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
