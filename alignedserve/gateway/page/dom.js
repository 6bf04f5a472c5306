// Received text is only ever set as text, never as HTML. Unchanged text is not set again, so that it stays selected.

export const byId = (id) => document.getElementById(id);

export function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// A bar that is filled to `share`, from 0 to 1. null hides it.
export class Bar {
  constructor(label) {
    this.fill = element("span", { className: "fill" });
    this.node = element("span", { className: "bar", role: "meter", ariaLabel: label }, this.fill);
    this.node.ariaValueMin = "0";
    this.node.ariaValueMax = "100";
  }

  show(share) {
    this.node.hidden = share === null;
    const percent = Math.round((share ?? 0) * 1000) / 10;
    this.fill.style.width = `${percent}%`;
    this.node.ariaValueNow = String(percent);
  }
}

// Children of `parent`, one per item by its key, in the items' order. `make(item)` returns a `node` and `show(item)`.
export class Rows {
  constructor(parent, make) {
    this.parent = parent;
    this.make = make;
    this.byKey = new Map();
  }

  show(items, keyOf) {
    const keys = items.map(keyOf);
    for (const [key, row] of this.byKey) {
      if (!keys.includes(key)) {
        row.node.remove();
        this.byKey.delete(key);
      }
    }
    items.forEach((item, index) => this.place(keys[index], item, index));
  }

  place(key, item, index) {
    if (!this.byKey.has(key)) this.byKey.set(key, this.make(item));
    const row = this.byKey.get(key);
    row.show(item);
    if (this.parent.children[index] !== row.node) this.parent.insertBefore(row.node, this.parent.children[index]);
  }
}
