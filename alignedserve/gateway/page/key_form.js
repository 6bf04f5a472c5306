// Asks for the API key if the server needs one.

import { forgetKey, heldKey, holdKey } from "./api.js";
import { byId, setText } from "./dom.js";

export class KeyForm {
  constructor(onKey) {
    byId("ask-key").addEventListener("submit", (event) => {
      event.preventDefault();
      holdKey(byId("key").value.trim());
      byId("key").value = "";
      onKey();
    });
    byId("forget").addEventListener("click", () => {
      forgetKey();
      location.reload();
    });
  }

  // Called if the server has refused the request: there is no key, or a wrong one.
  ask() {
    setText(byId("key-problem"), heldKey() === null ? "" : "✕ The server does not know this key.");
    forgetKey();
    this.show(true);
    byId("key").focus();
  }

  accepted() {
    this.show(false);
    byId("forget").hidden = heldKey() === null;
  }

  show(isWanted) {
    byId("ask-key").hidden = !isWanted;
    byId("main").hidden = isWanted;
    byId("forget").hidden = true;
  }
}
