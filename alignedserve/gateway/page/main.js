// Polls the server once per second, and shows its state.

import { Refused, Unauthorized, get, getCluster, getHealth } from "./api.js";
import { byId, setText } from "./dom.js";
import { Chat } from "./chat.js";
import { History } from "./history.js";
import { Jobs } from "./jobs.js";
import { KeyForm } from "./key_form.js";
import { Memory } from "./memory.js";
import { Poll } from "./poll.js";
import { Processes } from "./processes.js";
import { readingOf } from "./reading.js";
import { Samples } from "./samples.js";
import { isUp, showAbout, showAway, showHealth } from "./state.js";
import { Traffic } from "./traffic.js";

const EVERY_MS = 1000;
const MAX_WAIT_MS = 8000;

const history = new History();
const traffic = new Traffic();
const processes = new Processes();
const memory = new Memory();
const jobs = new Jobs();
const poll = new Poll(look);
const keyForm = new KeyForm(askAgain);
const chat = new Chat(() => poll.now(), () => model?.id);
let waitMs = EVERY_MS;
// The model from /v1/models. null: unknown, or the server was away since.
let model = null;
// Whether the key may read the counts of all clients, as far as is known.
let mayCount = true;

async function look() {
  try {
    await lookAtAll();
    waitMs = EVERY_MS;
  } catch (error) {
    if (error instanceof Unauthorized) {
      keyForm.ask();
      return null;
    }
    model = null;
    waitMs = Math.min(2 * waitMs, MAX_WAIT_MS);
    showAway(error, waitMs);
  }
  return waitMs;
}

async function lookAtAll() {
  const health = await getHealth();
  showHealth(health);
  const { serverTime } = health;
  const [counters] = await Promise.all([getCounters(), jobs.look(serverTime), findModel()]);
  keyForm.accepted();
  chat.showModel();
  showAbout(model, counters?.cluster, serverTime);
  if (counters) showCounters(counters, serverTime, isUp(health));
}

// Another key may read the counts, or may not.
function askAgain() {
  mayCount = true;
  delete document.body.dataset.counters;
  setText(byId("no-counters"), "");
  poll.now();
}

// Returns null if the key may not read them. They are not asked for again with this key.
async function getCounters() {
  if (!mayCount) return null;
  try {
    const text = await (await get("/metrics")).text();
    return { text, cluster: await getCluster() };
  } catch (error) {
    if (!(error instanceof Refused && error.status === 403)) throw error;
    mayCount = false;
    document.body.dataset.counters = "none";
    setText(byId("no-counters"), `No numbers of the server: ${error.message}.`);
    return null;
  }
}

function showCounters({ text, cluster }, serverTime, isUp) {
  history.add(readingOf(new Samples(text), performance.now(), history.latest, isUp));
  traffic.show(history);
  processes.show(cluster, serverTime);
  memory.show(cluster, history);
}

async function findModel() {
  model ??= (await (await get("/v1/models")).json()).data[0];
}

poll.now();
