// A conversation with the model, to try the server.

import { Unauthorized, post } from "./api.js";
import { Bar, byId, element, setText } from "./dom.js";
import { count, duration, number } from "./format.js";
import { eventsOf } from "./stream.js";

// What the small models of a first try can do, and parameters with which they do it, as in `alignedserve chat`.
const SMALL_MODELS = new Map(Object.entries({
  demo: {
    abilities:
      "The demo model has 2.9 million parameters. It counts, spells, reverses, lists days and months, adds and " +
      "subtracts, and can do nothing else.",
    examples: [
      "Count from 7 to 12.",
      'Spell the word "kettle".',
      'Reverse the word "lamp".',
      "List the days from Friday to Sunday.",
      "What is 17 + 25?",
    ],
    parameters: { temperature: 0 },
  },
  smollm2: {
    abilities:
      "SmolLM2 has 135 million parameters. It answers simple questions, and makes up what it does not know.",
    examples: ["Name three fruits.", "How many legs does a spider have?", "Write a haiku about the sea."],
    parameters: { temperature: 0.2, top_p: 0.9, repetition_penalty: 1.1, max_tokens: 1024 },
  },
}));

export class Chat {
  constructor(onUnauthorized, modelName) {
    this.onUnauthorized = onUnauthorized;
    this.modelName = modelName;
    this.messages = [];
    this.stopper = null;
    this.small = undefined;
    byId("say").addEventListener("submit", (event) => {
      event.preventDefault();
      this.say(byId("text").value.trim());
    });
    byId("text").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      byId("say").requestSubmit();
    });
    byId("stop").addEventListener("click", () => this.stopper?.abort());
    byId("clear").addEventListener("click", () => this.clear());
  }

  // Begins a new conversation.
  begins(text) {
    if (this.stopper) return;
    this.clear();
    this.say(text);
  }

  // Called when the model's name is known.
  showModel() {
    const small = SMALL_MODELS.get(this.modelName());
    if (small === this.small) return;
    this.small = small;
    byId("small-model").hidden = !small;
    if (!small) return;
    setText(byId("abilities"), small.abilities);
    const button = (text) => element("button", { type: "button", onclick: () => this.begins(text) }, text);
    byId("examples").replaceChildren(...small.examples.map(button));
  }

  clear() {
    this.stopper?.abort();
    this.messages = [];
    byId("said").replaceChildren();
    byId("text").focus();
  }

  async say(text) {
    if (!text || this.stopper) return;
    const messages = [...this.messages, { role: "user", content: text }];
    this.messages = messages;
    byId("text").value = "";
    new Message("you", text);
    const answer = new Message("model", "");
    this.begin();
    try {
      await this.hear(messages, answer);
    } catch (error) {
      this.failed(error, answer);
    } finally {
      this.end(messages, answer);
    }
  }

  async hear(messages, answer) {
    const tier = byId("tier").value;
    const stream = { stream: true, stream_options: { include_usage: true }, return_progress: true };
    const body = { messages, service_tier: tier, ...this.small?.parameters, ...stream };
    const response = await post("/v1/chat/completions", body, this.stopper.signal);
    for await (const event of eventsOf(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.prompt_progress) answer.reading(event.prompt_progress);
      answer.add(event.choices[0]?.delta.content ?? "");
      if (event.usage) answer.finish(event.usage.completion_tokens);
    }
  }

  failed(error, answer) {
    if (error.name === "AbortError") {
      answer.note("stopped");
    } else {
      answer.note(`failed: ${error.message}`);
      if (error instanceof Unauthorized) this.onUnauthorized();
    }
  }

  begin() {
    this.stopper = new AbortController();
    byId("send").hidden = true;
    byId("stop").hidden = false;
  }

  end(messages, answer) {
    // The conversation may have been cleared meanwhile.
    if (this.messages === messages) this.messages.push({ role: "assistant", content: answer.text });
    this.stopper = null;
    byId("send").hidden = false;
    byId("stop").hidden = true;
  }
}

class Message {
  constructor(who, text) {
    this.text = text;
    this.beganMs = performance.now();
    this.firstMs = null;
    this.body = element("p", { className: "text" }, text);
    this.figures = element("p", { className: "note" });
    this.bar = new Bar("Share of the conversation that is read");
    this.bar.show(null);
    const title = element("p", { className: "who" }, who);
    const parts = [title, this.bar.node, this.body, this.figures];
    byId("said").append(element("div", { className: `message ${who}` }, ...parts));
    this.scroll();
  }

  reading({ processed, total }) {
    this.bar.show(processed < total ? processed / total : null);
    this.note(processed < total ? `read ${number(processed)} of ${count(total, "token")}` : "");
  }

  add(text) {
    if (!text) return;
    this.firstMs ??= performance.now();
    this.text += text;
    setText(this.body, this.text);
    this.note(`first token after ${this.firstTime}`);
  }

  finish(numTokens) {
    const seconds = (performance.now() - (this.firstMs ?? this.beganMs)) / 1000;
    const rate = numTokens > 1 && seconds > 0 ? `, ${number((numTokens - 1) / seconds)} tokens/s` : "";
    const first = this.firstMs === null ? "" : `first token after ${this.firstTime}, `;
    this.note(`${first}${count(numTokens, "token")}${rate}`);
  }

  note(text) {
    setText(this.figures, text);
    this.scroll();
  }

  get firstTime() {
    return duration((this.firstMs - this.beganMs) / 1000);
  }

  scroll() {
    byId("said").scrollTop = byId("said").scrollHeight;
  }
}
